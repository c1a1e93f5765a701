"""Start shims, keep a few parked, and talk with them. The only module that starts processes.

A parked shim has forked the child that will become a command; a start then costs one message
and one execve. The pool is refilled after the answers have gone out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from runnerd.protocol.shimwire import (
    Parked,
    Scope,
    ShimMessage,
    end_message,
    parse_shim_message,
    signal_message,
)

from .cgroup import Leaves, end_stale
from .leaf import Leaf
from .log import Log
from .poller import EPOLLIN, Poller
from .shim_program import ShimProgram

CONTROL_FD: Final = 3
LIFELINE_FD: Final = 4
LEAF_FD: Final = 5
_MESSAGE_BYTES_MAX: Final = 16384
_REFILL_RETRY_S: Final = 0.5
_LEAF_RETRY_S: Final = 0.1
_STALE_AFTER_S: Final = 3.0  # shims that lost their daemon have ended their trees by then
_STALE_RETRY_S: Final = 1.0
_STALE_ROUNDS: Final = 10
_RESERVED: Final = 1  # for a rescue, see ShimPool.take


class Shim:
    """One shim: its control socket and its pid.

    Whoever uses it sets `on_message` (called with each message), `on_lost` (called once, after
    the last message, when the other end is gone) and `on_stray` (called when a handler failed).

    Attributes:
        pid: The shim's pid; it stays ours to signal until the reaper took its status.
        child_pid: The parked child, which becomes the command; None until the shim said so.
        is_reaped: Whether the pid may belong to somebody else by now.
        leaf: The cgroup of what becomes of its child, or None.
    """

    def __init__(self, pid: int, control: socket.socket, poller: Poller, leaf: Leaf | None) -> None:
        self.pid = pid
        self.child_pid: int | None = None
        self.is_reaped = False
        self.leaf = leaf
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

    def read_last_words(self) -> None:
        """Take all that it has said, up to its end where it is gone.

        It may be reaped in the same turn of the loop in which this can be read, and before. A
        handler's failure is the user's own, as ever.
        """
        while True:
            try:
                self._readable(EPOLLIN)
            except Exception as error:  # noqa: BLE001 - whoever uses this shim is told
                self.stray(error)
            else:
                return

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
        # A command of the shim's user may have stopped it, and a stopped one reads nothing.
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
        leaves: Where their children are put.
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
        leaves: Leaves,
        *,
        poller: Poller,
        log: Log,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.by_pid: dict[int, Shim] = {}
        self.on_stray: Callable[[Exception], None] = lambda error: log.failure("stray", error)
        self._is_stopping = is_stopping
        self._program = ShimProgram(path)
        self._lifeline = lifeline
        self._size = size
        self._leaves = leaves
        self._leaves_armed = False
        self._stale: list[Path] = []
        self._stale_rounds = _STALE_ROUNDS
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
        leaf = self._leaves.make()
        try:
            shim = self._spawn_in(leaf)
        except OSError:
            if leaf is not None:
                self._retire(leaf)
            raise
        self.by_pid[shim.pid] = shim
        return shim

    def _spawn_in(self, leaf: Leaf | None) -> Shim:
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(theirs)
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL_FD),
                (os.POSIX_SPAWN_DUP2, self._lifeline.fileno(), LIFELINE_FD),
            ]
            try:
                if leaf is not None:
                    folder = stack.enter_context(leaf.opened())
                    actions.append((os.POSIX_SPAWN_DUP2, folder, LEAF_FD))
                pid = os.posix_spawn(
                    self._program.path, ["runnerd-shim"], {}, file_actions=actions, setsigmask=[]
                )
            except OSError as error:
                ours.close()
                if not self._program.give_up_copy(error):
                    raise
                self._log.warning("shim_copy_off", error=str(error))
                return self._spawn_in(leaf)
        ours.setblocking(False)
        return Shim(pid, ours, self._poller, leaf)

    # ------------------------------------------------------------------ cgroups

    def leaf_refused(self, number: int) -> None:
        """A leaf could not be entered: none can, so no more are made."""
        if self._leaves.reason is None:
            self._leaves.give_up(f"a leaf cannot be entered: {os.strerror(number)}")
            self._log.warning("cgroup_leaves_off", reason=self._leaves.reason)

    def over(self, child_pid: int) -> Shim | None:
        """Return the shim, not reaped yet, whose child has or had this pid."""
        return next((each for each in self.by_pid.values() if each.child_pid == child_pid), None)

    def reaped(self, shim: Shim) -> None:
        """A shim's status was taken: its leaf goes as soon as nothing is in it."""
        if shim.leaf is not None:
            self._retire(shim.leaf)

    def _retire(self, leaf: Leaf) -> None:
        if not self._leaves.retire(leaf):
            self._remove_leaves_later()

    def _remove_leaves_later(self) -> None:
        if not self._leaves_armed:
            self._leaves_armed = True
            self._poller.call_at(time.monotonic() + _LEAF_RETRY_S, self, self._remove_leaves)

    def _remove_leaves(self) -> None:
        self._leaves_armed = False
        if not self._leaves.remove_retired():
            self._remove_leaves_later()

    def end_stale_leaves(self) -> None:
        """Soon end what daemons that have died by now left in theirs."""
        self._stale = self._leaves.stale()
        self._poller.call_at(time.monotonic() + _STALE_AFTER_S, self, self._end_stale)

    def _end_stale(self) -> None:
        self._stale_rounds -= 1
        before, self._stale = self._stale, [each for each in self._stale if not end_stale(each)]
        if before:
            left = [str(each) for each in self._stale]
            self._log.info("stale_cgroups", folders=len(before), left=left[:5])
        if self._stale and self._stale_rounds:
            self._poller.call_at(time.monotonic() + _STALE_RETRY_S, self, self._end_stale)
