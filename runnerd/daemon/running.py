"""One exec at work: its shim, pipes, timers, subscribers and waiters.

Facts come in (a message of the shim, bytes, a timer, a request), core/execs.py says what follows,
and `_carry_out` does it: the one place where a decision becomes an effect, so that nothing can
happen uncounted.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from runnerd.core.bounds import (
    DRAIN_S,
    END_RECEIPT_S,
    KILL_ROUNDS_S,
    STOP_GRACE_S,
)
from runnerd.core.execs import (
    Action,
    ArmDeadline,
    Close,
    Drain,
    Exec,
    ExitStatus,
    Publish,
    SendEnd,
)
from runnerd.core.life import State
from runnerd.core.oom import SIGKILL
from runnerd.core.past import Past
from runnerd.protocol.answers import Exit, Reason
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart, ExecWrite
from runnerd.protocol.shimwire import (
    Empty,
    Ending,
    Exited,
    Failed,
    Killed,
    Killing,
    OomAdjRefused,
    Parked,
    Scope,
    ShimMessage,
    Signalled,
    Started,
    Survivors,
    Termed,
)

from .adopted import AdoptedTree, Kin
from .effects import each_of
from .ending import EndMessage, ShimEnder
from .output_pump import OutputPump
from .pipes import Pipes
from .procfs import Stat
from .readers import Readers
from .shims import Shim
from .starting import Starting
from .stdin_pump import Reply, StdinPump
from .timers import Timers

if TYPE_CHECKING:
    from .service import Service

# Longer than everything that may follow a failure: a receipt, KILL in rounds, a drain.
_STUCK_S: Final = END_RECEIPT_S + KILL_ROUNDS_S + DRAIN_S + 1.0
_RETRIES: Final = 2


class OnStart(Protocol):
    """Who asked for a start, told once what became of it."""

    def __call__(self, outcome: Running | Past | RequestError, *, created: bool) -> None:
        """Take the exec or the true error; `created` is false for a start sent again."""


class Running:
    """The edge of one exec.

    Args:
        service: The daemon's shared parts.
        its_exec: The exec, accepted.
        params: As requested.
        on_start: Called once: with itself after execve succeeded, or with the true error.
    """

    def __init__(
        self,
        service: Service,
        its_exec: Exec,
        params: ExecStart,
        on_start: OnStart,
    ) -> None:
        self.exec = its_exec
        self._service = service
        self._poller = service.poller
        # By insertion, and quick to leave: thousands may wait for one exec.
        self._exit_waiters: dict[Callable[[Exit], None], None] = {}
        self._end_waiters: dict[Callable[[], None], None] = {}
        self._signal_waiters: list[Callable[[int | RequestError], None]] = []
        self._timers = Timers(service.poller, self)
        self._shim: Shim | None = None
        self._pipes: Pipes | None = None
        self._output: OutputPump | None = None
        self._stdin: StdinPump | None = None
        self._ender: ShimEnder | None = None
        self._adopted: AdoptedTree | None = None
        self._status: ExitStatus | None = None  # as reported, whatever became of it
        self._strays = 0
        self._asked_score = params.oom_score_adj
        self._on_start = [on_start]
        self._starting = Starting(
            service,
            its_exec,
            params,
            self,
            on_known=self._start_known,
            end_half_made=self._end_half_made,
        )
        self.readers = Readers(
            its_exec,
            service.poller,
            self,
            tail_bytes=self._tail_bytes,
            on_progress=self._readers_progressed,
        )
        its_exec.transcript.on_room = self._room_made

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Launch it once it is journaled, or that has taken too long."""
        self._attempt(lambda: self._starting.begin(self.launch))

    def launch(self) -> None:
        """Hand the command to a shim, unless it was ended first; a failure is its answer."""
        if self.exec.state is State.STARTING:
            self._attempt(self._hand_over)

    def _hand_over(self) -> None:
        self._pipes = self._starting.pipes
        self._shim = self._starting.launch(self._take_message, self._shim_lost)
        self._ender = ShimEnder(self.exec, self._shim, self._poller, self)

    def _attempt(self, part_of_start: Callable[[], None]) -> None:
        try:
            part_of_start()
        except RequestError as error:
            self._starting.fail(error)
        except Exception as error:  # noqa: BLE001 - stray: it costs this exec alone
            self.stray(error)

    def join(self, on_start: OnStart) -> None:
        """Tell one more what became of the start: its sender has sent it again."""
        if self.exec.state is State.STARTING:
            self._on_start.append(on_start)
        else:
            on_start(self, created=False)

    def when_started(self, call: Callable[[], None]) -> bool:
        """Call later, once it is known how the start ended; False where it is known already."""
        return self._starting.when_known(call)

    def _take_message(self, message: ShimMessage) -> None:
        match message:
            case Started():
                self._started(message)
            case Exited():
                self._exited(status_of(message))
            case Empty():
                self._emptied()
            case Failed():
                self._starting.failed(message)
            case Signalled():
                if self._signal_waiters:
                    self._signal_waiters.pop(0)(outcome_of(message))
            case OomAdjRefused():
                self._service.log.warning(
                    "oom_score_adj_refused", exec_id=self.exec.exec_id, errno=message.errno
                )
            case Ending() | Termed() | Killing() | Killed() | Survivors():
                self._end_goes_on(message)
            case Parked():
                pass  # the shim itself keeps what it says

    def _end_goes_on(self, message: EndMessage) -> None:
        if self._ender is None:
            return
        self._ender.take(message)
        if isinstance(message, Survivors):
            self._service.counters.survivors += len(message.processes)
        if isinstance(message, Ending | Survivors):
            self._end_changed()

    def _emptied(self) -> None:
        if self.exec.state not in (State.DRAINING, State.LINGERING):
            return
        output, lingered = self._output, self.exec.state is State.LINGERING
        if lingered and output is not None:
            self.exec.discarded(output.bytes_left())
        self._carry_out(self.exec.emptied(time.monotonic(), time.time()))
        if not lingered and output is not None and output.drain():
            self._drained()  # what is in the pipes now is the last of it

    def _started(self, message: Started) -> None:
        if self.exec.state is not State.STARTING:
            return
        assert self._pipes is not None
        at_s = message.at_ns / 1e9
        # Of then, not of now: a command can have ended before its start is heard of here.
        at = time.time() - max(0.0, time.monotonic() - at_s)
        actions = self.exec.started(message.pid, message.oom_score_adj, at_s, at)
        self._output = OutputPump(
            self.exec,
            self._pipes,
            self._poller,
            tail_bytes=self._tail_bytes,
            owner=self,
            on_output=self.readers.wake,
            on_eof=self._pipes_at_eof,
            big_pipes=self._service.big_pipes,
        )
        if self.exec.stdin is not None:
            self._stdin = StdinPump(
                self.exec.stdin, self._pipes, self._service.stdin_totals, self._poller, self
            )
        self._service.observer.started(self.exec)
        self._service.reaper.commands.add(message.pid)
        self._starting.succeeded()
        self.readers.hold_changed()
        self._output.start()
        self._carry_out(actions)
        self._starting.run_waiting()

    def _start_known(self, error: RequestError | None) -> None:
        # Let go of: it holds the request, whose environment may have megabytes.
        told, self._on_start = self._on_start, []
        outcome = self if error is None else error
        each_of(
            *(functools.partial(each, outcome, created=each is told[0]) for each in told),
            lambda: None if error is None else self._end_changed(),
        )

    def _end_half_made(self, child_pid: int) -> None:
        self._adopted = self._adopt_tree(child_pid)
        self._adopted.end(0.0)

    def _tail_bytes(self) -> int:
        return self._service.registry.budget.tail_bytes

    def _readers_progressed(self) -> None:
        self._service.registry.budget.want(self.exec.transcript)
        if self._output is not None and self._output.is_waiting:
            self._output.gate_changed()

    def _room_made(self) -> None:
        self._readers_progressed()
        if not self.exec.transcript.spool.is_on:
            self.readers.wake()  # there may be a gap to be told

    # ------------------------------------------------------------------ exit

    def _exited(self, status: ExitStatus) -> None:
        if self.exec.status is not None or self.exec.state is State.STARTING:
            return
        self._status = status
        if self.exec.pid is not None:
            self._service.reaper.commands.discard(self.exec.pid)
        self._timers.cancel("deadline")
        if self._service.guard.cause() is not None:
            # The lifeline ends natively, before the loop hears of it: the stop may have acted
            # on this command already.
            self.exec.end("stopped", STOP_GRACE_S, time.monotonic())
        ender = self._ender
        # Not ours for certain: the shim had not begun to end anything yet, or TERM met a command
        # that does not handle it, so an exit by code cannot be the answer to it.
        not_our_signal = status.code is not None or (
            status.signal == SIGKILL and not self.exec.forced
        )
        by_itself = self._adopted is None and (
            ender is None or not ender.confirmed or (ender.leader_was_default and not_our_signal)
        )
        self._carry_out(self.exec.exited(status, by_itself=by_itself))

    def _pipes_at_eof(self) -> None:
        if self.exec.state in (State.DRAINING, State.DRAINING_EMPTY):
            self._drained()

    def _drained(self) -> None:
        self._timers.cancel("drain")
        if self.exec.state not in (State.DRAINING, State.DRAINING_EMPTY):
            return
        if self.exec.state is State.DRAINING_EMPTY and self._output is not None:
            self.exec.discarded(self._output.bytes_left())  # of who is no process of it
        actions = self.exec.drained(
            time.monotonic(),
            time.time(),
            oom_kills=self._service.oom_kills(),
            starts=self._service.registry.starts,
        )
        self._carry_out(actions)

    def _carry_out(self, actions: list[Action]) -> None:
        # What the core has decided happened: one effect that fails must not undo the others.
        each_of(*(functools.partial(self._carry_out_one, action) for action in actions))

    def _carry_out_one(self, action: Action) -> None:
        match action:
            case SendEnd():
                self._send_end(action.grace_s)
            case ArmDeadline():
                self._timers.arm("deadline", action.at_s, self._deadline_reached)
            case Drain():
                self._drain(action.until_s)
            case Publish():
                self._publish(action.exit)
            case Close():
                self._close()

    def _drain(self, until_s: float) -> None:
        self._timers.arm("drain", until_s, self._drained)  # first: a drain that fails still ends
        if self._output is None or self._output.drain():
            self._drained()

    def _publish(self, its_exit: Exit) -> None:
        waiters, self._exit_waiters = self._exit_waiters, {}
        each_of(
            lambda: self._service.observer.exited(self.exec, its_exit),
            lambda: None if self._output is None else self._output.discard(),
            lambda: None if self._stdin is None else self._stdin.close(),
            self.readers.wake,
            *(functools.partial(waiter, its_exit) for waiter in waiters),
        )

    def _close(self) -> None:
        self._timers.cancel_all()
        # The shim left before it had read them: nothing was signalled.
        waiters, self._signal_waiters = self._signal_waiters, []
        each_of(
            lambda: None if self._output is None else self._output.close(),
            lambda: None if self._ender is None else self._ender.forget_timers(),
            *(functools.partial(waiter, 0) for waiter in waiters),
            lambda: self._service.observer.closed(self.exec),
            lambda: self._service.closed(self),
            self.readers.wake,
            self._end_changed,
            self._let_go,
        )

    def _let_go(self) -> None:
        # The record stays for an hour, its machinery does not.
        self._shim = self._pipes = self._output = self._stdin = None
        self._ender = self._adopted = None

    # ------------------------------------------------------------------ ending

    def end(self, reason: Reason, grace_s: float | None = None) -> None:
        """End the exec with everything it started; see Exec.end."""
        self._carry_out(self.exec.end(reason, grace_s, time.monotonic()))
        if self.exec.state is State.STARTING and self._shim is None:
            self._starting.give_up()  # accepted and not launched yet: it never is

    def _deadline_reached(self) -> None:
        self.end("deadline")

    def _send_end(self, grace_s: float) -> None:
        if self._adopted is not None:
            self._adopted.end(grace_s)
        elif self._ender is not None:
            self._ender.end(grace_s)

    def force(self) -> None:
        """Its shim has had its time: end what is left without it."""
        if self._adopted is None and self._shim is not None and not self.exec.survivors:
            self._shim.kill()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call once it is closed, or it is known who survives; again may be called for news."""
        self._end_waiters[call] = None

    def _end_changed(self) -> None:
        waiters, self._end_waiters = self._end_waiters, {}
        each_of(*waiters)

    @property
    def end_confirmed(self) -> bool:
        """Whether the ending has begun for certain."""
        return self._adopted is not None or (self._ender is not None and self._ender.confirmed)

    def when_exited(self, call: Callable[[Exit], None]) -> None:
        """Call once the exit is published."""
        self._exit_waiters[call] = None

    def forget_exit_waiter(self, call: Callable[[Exit], None]) -> None:
        """Do not call it any more."""
        self._exit_waiters.pop(call, None)

    def forget_end_waiter(self, call: Callable[[], None]) -> None:
        """Do not call it any more."""
        self._end_waiters.pop(call, None)

    # ------------------------------------------------------------------ a shim that is gone

    def _shim_lost(self) -> None:
        if self.exec.is_empty or self.exec.state in (State.FAILED, State.CLOSED):
            return
        assert self._shim is not None
        self._service.log.warning("shim_lost", exec_id=self.exec.exec_id, pid=self._shim.pid)
        self._service.counters.shims_lost += 1
        if self.exec.state is State.STARTING:
            self._starting.fail(
                RequestError("internal", "the shim was lost before the command had started")
            )
            return
        self.exec.shim_lost()
        self._shim.kill()  # its socket may have been closed while it lives
        self._service.reaper.when_gone(self._shim.pid, self, self._adopt)

    def _adopt_tree(self, leader: int) -> AdoptedTree:
        return AdoptedTree(
            self.exec,
            leader,
            self._poller,
            self,
            kin=Kin(
                is_shim=self._service.pool.by_pid.__contains__,
                is_command=self._service.reaper.commands.__contains__,
                all_ours=self._service.all_children_ours,
                least_score=self._service.launcher.telling_score(self._asked_score),
            ),
            reap=self._service.reaper.reap,
            on_empty=self._adopted_empty,
            on_survivors=self._end_changed,
        )

    def _adopt(self) -> None:
        assert self.exec.pid is not None
        if self._ender is not None:
            self._ender.forget_timers()
        waiters, self._signal_waiters = self._signal_waiters, []
        for waiter in waiters:
            waiter(RequestError("internal", "the shim was lost"))
        self._adopted = adopted = self._adopt_tree(self.exec.pid)
        if self.exec.status is None:
            self._service.reaper.adopt(self.exec.pid, self, self._adopted_exited)
        if self._adopted is not adopted:
            return  # it was reaped already, it was the last, and all of it is closed
        grace_s = self.exec.grace_s
        if self.exec.end_by_s is not None:
            grace_s = max(0.0, self.exec.end_by_s - time.monotonic())
        adopted.end(grace_s)

    def _adopted_exited(self, status: ExitStatus) -> None:
        self._exited(status)

    def _adopted_empty(self) -> None:
        self._service.reaper.reap()
        if self.exec.state is State.FAILED:
            return  # a half-made start, told already
        if self.exec.status is None:
            # Not among our children any more, so nobody can tell: never made up.
            nobody_knows = ExitStatus(code=None, signal=None, at_s=time.monotonic())
            self._exited(self._status or nobody_knows)
        self._emptied()

    # ------------------------------------------------------------------ requests

    def write(self, request: ExecWrite, reply: Reply, writer: object) -> None:
        """Take an exec.write; those of one writer take effect in the order they came."""
        if self.exec.stdin is None:
            reply(RequestError("stdin_closed", "the exec was started without stdin: pipe"))
            return
        if self._stdin is None:
            taken = self.exec.stdin.accepted_bytes
            reply(RequestError("stdin_closed", "the exec has ended", accepted_bytes=taken))
            return
        self._stdin.write(request, reply, writer)

    @property
    def stdin_room_bytes(self) -> int:
        """How much stdin could take now."""
        return 0 if self._stdin is None else self._stdin.room_bytes

    def signal(self, number: int, to: Scope, reply: Callable[[int | RequestError], None]) -> None:
        """Send one signal by way of the shim."""
        if self._adopted is not None:
            try:
                reply(self._adopted.signal(number, to))
            except OSError as error:
                reply(RequestError("internal", f"cannot look at the processes: {error.strerror}"))
        elif self._shim is None or not self._shim.send_signal(number, to):
            reply(0)
        else:
            self._signal_waiters.append(reply)

    def inodes(self) -> set[int]:
        """Return the inodes of its pipes still open."""
        return set() if self._output is None else self._output.inodes()

    @property
    def shim_pid(self) -> int | None:
        """Return its shim's pid while it is ours."""
        return None if self._shim is None or self._shim.is_reaped else self._shim.pid

    def adopted_members(self) -> list[Stat] | None:
        """Return the processes of an adopted tree, None where the shim still holds it.

        Raises:
            OSError: If we cannot look.
        """
        return None if self._adopted is None else self._adopted.members()

    # ------------------------------------------------------------------ failures, timers

    def stray(self, error: Exception) -> None:
        """One of this exec's handlers failed: this exec ends, nothing else notices."""
        self._strays += 1
        self._service.stray(error, "exec", exec_id=self.exec.exec_id)
        if self.exec.is_live and self._strays == 1:
            self._timers.arm("stuck", time.monotonic() + _STUCK_S, self._check_stuck)
        try:
            self._end_after_stray()
        except Exception as second:
            if self._strays > 1:
                raise  # an exec that cannot be ended is a state nobody knows
            self._strays += 1
            self._service.stray(second, "exec", exec_id=self.exec.exec_id)
            self._shim_lost()  # the way round the shim and what was asked of it

    def _check_stuck(self) -> None:
        if self.exec.is_live and not self.exec.survivors:
            error = RuntimeError(f"exec '{self.exec.exec_id}' cannot be brought to its end")
            self._service.uncaught("exec", error)

    def _end_after_stray(self) -> None:
        if self.exec.state is State.STARTING:
            self._starting.fail(RequestError("internal", "the start failed inside runnerd"))
            return
        self.exec.failed_inside()
        # What failed may fail again at once, as long as its descriptor is ready: nothing of the
        # streams is touched any more. The exit still comes, by way of the shim.
        if self._output is not None:
            self._output.close()
        if self._stdin is not None:
            self._stdin.close()
        if self.exec.is_live:
            self.end("internal", 0.0)
        if self.exec.state in (State.DRAINING, State.DRAINING_EMPTY) and self._strays <= _RETRIES:
            self._timers.arm("drain", time.monotonic(), self._drained)


def outcome_of(message: Signalled) -> int | RequestError:
    """Return how many got a signal, or why nobody did."""
    if message.count or message.errno != errno.EPERM:
        return message.count
    return RequestError("not_permitted", "the daemon's user may not signal that process")


def status_of(message: Exited) -> ExitStatus:
    """Turn a shim's `exited` into the core's status."""
    by_code = message.kind == "exit"
    return ExitStatus(
        code=message.value if by_code else None,
        signal=None if by_code else message.value,
        core_dumped=message.kind == "dump",
        at_s=message.at_ns / 1e9,
        cpu_user_s=message.utime_us / 1e6,
        cpu_system_s=message.stime_us / 1e6,
        peak_rss_bytes=message.maxrss_kib * 1024,
        minor_faults=message.minflt,
        major_faults=message.majflt,
        block_reads=message.inblock,
        block_writes=message.oublock,
    )
