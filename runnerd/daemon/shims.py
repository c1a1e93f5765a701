"""Start shims, keep a few parked, and talk with them. The only module that starts processes.

A parked shim has forked the child that will become a command; a start then costs one message
and one execve. The pool is refilled after the answers have gone out.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from runnerd.protocol.shimwire import (
    Parked,
    Scope,
    ShimMessage,
    end_message,
    parse_shim_message,
    signal_message,
)

from .log import Log
from .poller import EPOLLIN, Poller

CONTROL_FD: Final = 3
LIFELINE_FD: Final = 4
_MESSAGE_BYTES_MAX: Final = 16384
_REFILL_RETRY_S: Final = 0.5
_RESERVED: Final = 1  # for a rescue, see ShimPool.take


class Shim:
    """One shim: its control socket and its pid.

    Whoever uses it sets `on_message` (called with each message), `on_lost` (called once, after
    the last message, when the other end is gone) and `on_stray` (called when a handler failed).

    Attributes:
        pid: The shim's pid; it stays ours to signal until the reaper took its status.
        child_pid: The parked child, which becomes the command; None until the shim said so.
        is_reaped: Whether the pid may belong to somebody else by now.
    """

    def __init__(self, pid: int, control: socket.socket, poller: Poller) -> None:
        self.pid = pid
        self.child_pid: int | None = None
        self.is_reaped = False
        self.on_message: Callable[[ShimMessage], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.on_stray: Callable[[Exception], None] | None = None
        self._control: socket.socket | None = control
        self._poller = poller
        poller.watch(control.fileno(), EPOLLIN, self._readable, self)

    def stray(self, error: Exception) -> None:
        """A handler failed: tell whoever uses this shim."""
        if self.on_stray is not None:
            self.on_stray(error)

    def _readable(self, _events: int) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # what the shim said before it went is still to be read
            if not data:
                self._lost()
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        # What cannot be understood is a failure of the exec's: it could have been its exit.
        message = parse_shim_message(data)
        if isinstance(message, Parked):
            self.child_pid = message.pid
        if self.on_message is not None:
            self.on_message(message)

    def _lost(self) -> None:
        self.close()
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """Let go of the control socket: a hang-up, on which a shim ends its tree."""
        if self._control is not None:
            self.signal(signal.SIGCONT)  # a stopped one would stay, also after the daemon's end
            self._poller.unwatch(self._control.fileno())
            self._control.close()
            self._control = None

    def send_job(self, fds: Sequence[int]) -> None:
        """Hand it a job: stdin, stdout, stderr and the memfd, in this order.

        Raises:
            OSError: If it is gone.
        """
        if self._control is None:
            raise BrokenPipeError("the shim is gone")
        self.signal(signal.SIGCONT)  # a command of the same uid may have stopped it
        socket.send_fds(self._control, [b"job"], list(fds))

    def send_end(self, grace_s: float) -> None:
        """Tell it to end its tree; one that is gone has nothing to end."""
        # A stopped shim reads nothing: CONT first. See design of the ladder in shim/README.md.
        self.signal(signal.SIGCONT)
        self._send(end_message(round(grace_s * 1000)))

    def send_signal(self, number: int, scope: Scope) -> bool:
        """Tell it to send a signal; False where it is gone."""
        self.signal(signal.SIGCONT)
        return self._send(signal_message(number, scope))

    def _send(self, message: bytes) -> bool:
        if self._control is None:
            return False
        try:
            self._control.send(message)
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Signal the shim itself: a direct child, its pid is ours until it is reaped."""
        if not self.is_reaped:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the shim; what it leaves comes to the daemon."""
        self.signal(signal.SIGKILL)


class ShimPool:
    """Parked shims, ready for a start.

    Args:
        path: The shim's binary.
        lifeline: The end of the lifeline that shims are given.
        size: How many to keep parked.
        is_stopping: Whether the lifeline has ended: parked shims leave then, and nobody parks.

    Attributes:
        by_pid: Every shim not reaped; the reaper's map.
        on_stray: Told of failures of the pool and of parked shims.
    """

    def __init__(
        self,
        path: str,
        lifeline: socket.socket,
        size: int,
        *,
        poller: Poller,
        log: Log,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.by_pid: dict[int, Shim] = {}
        self.on_stray: Callable[[Exception], None] = lambda error: log.failure("stray", error)
        self._is_stopping = is_stopping
        self._path = path
        self._lifeline = lifeline
        self._size = size
        self._poller = poller
        self._log = log
        self._parked: list[Shim] = []
        self._refill_armed = False
        self._closed = False

    @property
    def parked(self) -> int:
        """How many are ready."""
        return len(self._parked)

    def stray(self, error: Exception) -> None:
        """A refill failed in a way it should not have: starts go on, refills are tried again."""
        self.on_stray(error)
        self._refill_later(_REFILL_RETRY_S)

    def ready(self, *, rescue: bool) -> int:
        """Return how many of the parked a start may take."""
        return len(self._parked) if rescue else max(0, len(self._parked) - _RESERVED)

    def take(self, *, rescue: bool) -> Shim:
        """Return a shim for one job: a parked one, else a new one.

        The last one parked is kept for a rescue: it and its child have their pids already, so it
        works where no other is to be had.

        Raises:
            OSError: If none is parked and none can be started.
        """
        shim = self._parked.pop(0) if self.ready(rescue=rescue) else self._spawn()
        shim.on_lost = None
        self._refill_later(0.0)
        return shim

    def refill(self) -> None:
        """Start shims until enough are parked; on failure, try again later."""
        self._refill_armed = False
        while len(self._parked) < self._size and not self._closed and not self._is_stopping():
            try:
                shim = self._spawn()
            except OSError as error:
                self._log.warning("shim_spawn_failed", errno=error.errno, error=str(error))
                self._refill_later(_REFILL_RETRY_S)
                return
            shim.on_lost = lambda shim=shim: self._parked_lost(shim)
            shim.on_stray = lambda error, shim=shim: self._parked_failed(shim, error)
            self._parked.append(shim)

    def close(self) -> None:
        """Park no more, and let the parked ones go."""
        self._closed = True
        for shim in self._parked:
            shim.close()
        self._parked.clear()

    def _parked_lost(self, shim: Shim) -> None:
        if shim in self._parked:
            self._parked.remove(shim)
        if self._is_stopping():
            return
        # Killed while parked: a command of the same uid can do that. Replaced, not mourned.
        self._log.warning("parked_shim_lost", pid=shim.pid)
        shim.kill()
        self._refill_later(_REFILL_RETRY_S)

    def _parked_failed(self, shim: Shim, error: Exception) -> None:
        self.on_stray(error)
        if shim in self._parked:
            self._parked.remove(shim)
        shim.close()
        shim.kill()
        self._refill_later(_REFILL_RETRY_S)

    def _refill_later(self, after_s: float) -> None:
        if not self._refill_armed and not self._closed:
            self._refill_armed = True
            self._poller.call_at(time.monotonic() + after_s, self, self.refill)

    def _spawn(self) -> Shim:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.posix_spawn(
                self._path,
                ["runnerd-shim"],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL_FD),
                    (os.POSIX_SPAWN_DUP2, self._lifeline.fileno(), LIFELINE_FD),
                ],
                setsigmask=[],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        shim = Shim(pid, ours, self._poller)
        self.by_pid[pid] = shim
        return shim
