"""One exec from its acceptance to execve, or to the true error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runnerd.core.bounds import START_TIMEOUT_S
from runnerd.core.execs import Exec
from runnerd.core.life import State
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart
from runnerd.protocol.shimwire import Failed, ShimMessage

from .effects import each_of
from .launcher import explain_failure
from .pipes import Pipes
from .poller import Owner
from .shims import Shim
from .timers import Timers

if TYPE_CHECKING:
    from .service import Service


class Starting:
    """The start of one exec.

    Args:
        service: The daemon's shared parts.
        its_exec: The exec, accepted.
        params: As requested; let go of once the command has them.
        owner: Who is told of a failure.
        on_known: Called once: with None after execve succeeded, or with the true error.
        end_half_made: Ends what became of the parked child of a start that failed.

    Attributes:
        shim: The shim that has the job.
        pipes: Our ends of the command's streams.
    """

    def __init__(
        self,
        service: Service,
        its_exec: Exec,
        params: ExecStart,
        owner: Owner,
        *,
        on_known: Callable[[RequestError | None], None],
        end_half_made: Callable[[int], None],
    ) -> None:
        self.shim: Shim | None = None
        self.pipes: Pipes | None = None
        self._service = service
        self._exec = its_exec
        self._params: ExecStart | None = params
        self._owner = owner
        self._timers = Timers(service.poller, owner)
        self._on_known: Callable[[RequestError | None], None] | None = on_known
        self._end_half_made = end_half_made
        self._waiting: list[Callable[[], None]] = []

    def launch(
        self, on_message: Callable[[ShimMessage], None], on_lost: Callable[[], None]
    ) -> tuple[Shim, Pipes]:
        """Hand the command to a shim.

        Raises:
            RequestError: start_failed, with nothing left.
        """
        now_s = time.monotonic()
        assert self._params is not None
        self._exec.dequeued(now_s)
        shim, pipes = self._service.launcher.launch(self._params)
        self.shim, self.pipes = shim, pipes
        try:
            shim.on_message = on_message
            shim.on_lost = on_lost
            shim.on_stray = self._owner.stray
            self._timers.arm("start", now_s + START_TIMEOUT_S, self._timed_out)
            self._exec.spawned(time.monotonic())
        except BaseException:
            self.drop()
            raise
        return shim, pipes

    def succeeded(self) -> None:
        """Execve succeeded: answer the start."""
        self._timers.cancel("start")
        self._params = None  # argv and env may have megabytes, and the command has them now
        self.shim = self.pipes = None
        self._tell(None)

    def failed(self, message: Failed) -> None:
        """The shim says that the command could not be started."""
        if self._params is None:
            return
        error = explain_failure(
            message.stage,
            message.errno,
            self._params,
            self._exec.cwd,
            interpreter=message.interpreter,
        )
        if message.stage == "killed" and self._exec.ending is not None:
            kind = "stopping" if self._exec.ending == "stopped" else "cancelled"
            error = RequestError(
                kind, f"exec '{self._exec.exec_id}' was ended before it had started"
            )
            # The same start sent again must not run after its cancel was answered.
            self._service.registry.bury(self._exec.exec_id, time.monotonic())
        self.fail(error)

    def _timed_out(self) -> None:
        self.fail(
            RequestError(
                "start_timeout", f"the command did not reach execve within {START_TIMEOUT_S:g} s"
            )
        )

    def fail(self, error: RequestError) -> None:
        """Give the start up: nothing of it is left, its id is free, everyone gets the error."""
        if self._exec.state is not State.STARTING:
            return
        error = self._service.start_error(self._exec, error)
        self._timers.cancel("start")
        self._exec.start_failed()
        each_of(
            lambda: self._service.forget(self._exec),
            lambda: self._service.observe_start_failed(self._exec, error),
            self.drop,
            lambda: self._tell(error),
            self.run_waiting,
        )

    def drop(self) -> None:
        """Leave nothing of it: neither pipes nor a process."""
        self._timers.cancel("start")
        if self.pipes is not None:
            self.pipes.close()
        if self.shim is not None:
            # Killed, not asked: whatever became of it must not become a command any more.
            self.shim.close()
            self.shim.kill()
            self._service.reaper.when_gone(self.shim.pid, self._owner, self._dropped)

    def _dropped(self) -> None:
        # The parked child, or a command that had got as far as execve before its shim was lost.
        child_pid = None if self.shim is None else self.shim.child_pid
        if child_pid is not None:
            self._end_half_made(child_pid)

    def _tell(self, error: RequestError | None) -> None:
        on_known, self._on_known = self._on_known, None
        if on_known is not None:
            on_known(error)

    def when_known(self, call: Callable[[], None]) -> bool:
        """Call later, once it is known how the start ended; False where it is known already."""
        if self._exec.state is not State.STARTING:
            return False
        self._waiting.append(call)
        return True

    def run_waiting(self) -> None:
        """Let those go on who waited for the outcome."""
        calls, self._waiting = self._waiting, []
        each_of(*calls)
