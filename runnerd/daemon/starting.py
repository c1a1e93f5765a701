"""One exec from its acceptance to execve, or to the true error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runnerd.core.bounds import JOURNAL_WAIT_S, START_TIMEOUT_S
from runnerd.core.execs import Exec
from runnerd.core.life import State
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart
from runnerd.protocol.shimwire import Failed, ShimMessage

from .effects import each_of
from .launcher import Prepared, explain_failure
from .pipes import Streams
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
        rest_until_s: Up to when floods rest for it; see Rests.
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
        self.pipes: Streams | None = None
        self._service = service
        self._exec = its_exec
        self._params: ExecStart | None = params
        self._prepared: Prepared | None = None
        self._launch: Callable[[], None] | None = None
        self._owner = owner
        self._timers = Timers(service.poller, owner)
        self._on_known: Callable[[RequestError | None], None] | None = on_known
        self._end_half_made = end_half_made
        self._waiting: list[Callable[[], None]] = []
        self.rest_until_s = 0.0

    def begin(self, launch: Callable[[], None]) -> None:
        """Have the start journaled, and make meanwhile what the command needs; then launch.

        `launch` is called once the start is written, or after JOURNAL_WAIT_S, or at once where
        there is no journal; never where the start has failed before or somebody has ended it.

        Raises:
            RequestError: start_failed; `fail` is still to be called.
        """
        journal = self._service.journal
        self._rest()
        if journal.is_on:
            self._launch = launch
            until_s = time.monotonic() + JOURNAL_WAIT_S
            self._timers.arm("journal", until_s, lambda: self._go_on("slow"))
            past = self._service.registry.past_of(self._exec)
            journal.begin(past, self._owner, self._journaled)
        assert self._params is not None
        self._prepared = self._service.launcher.prepare(self._params)
        self.pipes = self._prepared.pipes
        if not journal.is_on:
            self._launch = launch
            self._go_on("failed" if journal.exists else "none")

    def _rest(self) -> None:
        self.rest_until_s = self._service.rests.begin(time.monotonic())

    def _journaled(self, is_written: bool) -> None:  # noqa: FBT001 - an answer, not a mode
        if self._launch is not None:
            self._exec.journaled = is_written
            self._go_on(None if is_written else "failed")

    def _go_on(self, unjournaled: str | None) -> None:
        launch, self._launch = self._launch, None
        self._timers.cancel("journal")
        if launch is None:
            return
        if unjournaled is not None:
            self._service.observer.unjournaled(unjournaled)
        launch()

    def launch(
        self, on_message: Callable[[ShimMessage], None], on_lost: Callable[[], None]
    ) -> Shim:
        """Hand the command to a shim.

        Raises:
            RequestError: start_failed; `fail` is still to be called.
        """
        now_s = time.monotonic()
        assert self._prepared is not None
        self._rest()
        self._exec.dequeued(now_s)
        self.shim = shim = self._service.launcher.launch(self._prepared)
        self._prepared = None
        shim.on_message = on_message
        shim.on_lost = on_lost
        shim.on_stray = self._owner.stray
        self._timers.arm("start", now_s + START_TIMEOUT_S, self._timed_out)
        self._exec.spawned(time.monotonic())
        return shim

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
            user=self._service.launcher.user_of(self._params),
            cwd=self._exec.cwd,
            interpreter=message.interpreter,
        )
        if message.stage == "killed" and self._exec.ending is not None:
            self.give_up()
            return
        self.fail(error)

    def give_up(self) -> None:
        """It was ended before it had become the command, and never will."""
        kind = "stopping" if self._exec.ending == "stopped" else "cancelled"
        exec_id = self._exec.exec_id
        self.fail(RequestError(kind, f"exec '{exec_id}' was ended before it had started"))

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
        self._timers.cancel_all()
        self._launch = None
        self._exec.start_failed()
        each_of(
            lambda: self._service.undo_start(self._exec),
            lambda: self._service.observer.start_failed(self._exec, error),
            self.drop,
            lambda: self._tell(error),
            self.run_waiting,
        )

    def drop(self) -> None:
        """Leave nothing of it: no pipe, terminal or process. Dropped twice, dropped once."""
        self._timers.cancel_all()
        self._launch = self._prepared = None
        pipes, self.pipes = self.pipes, None
        if pipes is not None:
            pipes.close()
        shim, self.shim = self.shim, None
        if shim is not None:
            # Killed, not asked: whatever became of it must not become a command any more.
            shim.close()
            shim.kill()
            self._service.reaper.when_gone(shim.pid, self._owner, lambda: self._dropped(shim))

    def _dropped(self, shim: Shim) -> None:
        # The parked child, or a command that had got as far as execve before its shim was lost.
        if shim.child_pid is not None:
            self._end_half_made(shim.child_pid)

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
