"""One exec at work: what happens to it, and what follows from that.

Facts come in (a message of the shim, the end of its output, a timer, a request), core/execs.py
says what follows, and `_carry_out` does it: the one place where a decision becomes an effect, so
that nothing can happen uncounted. Its parts know nothing of one another: its start (starting.py),
its processes (tree.py), streams (exec_streams.py), clocks (clock_watch.py) and readers
(readers.py).
"""

from __future__ import annotations

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
    Close,
    Drain,
    Exec,
    ExitStatus,
    Publish,
    RunClocks,
    SendEnd,
)
from runnerd.core.life import State
from runnerd.core.past import Past
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Exit, Reason
from runnerd.protocol.requests import ExecStart
from runnerd.protocol.shimwire import (
    Empty,
    Ending,
    Exited,
    Failed,
    Killed,
    Killing,
    LeafRefused,
    OomAdjRefused,
    Parked,
    ShimMessage,
    Signalled,
    Started,
    Survivors,
    Termed,
)

from .clock_watch import ClockWatch
from .effects import each_of
from .exec_streams import ExecStreams
from .readers import Readers
from .starting import Starting
from .statuses import told_by_shim
from .timers import Timers
from .tree import Tree

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

    Attributes:
        tree: Its processes.
        streams: Its pipes or terminal.
        readers: Who reads its output.
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
        # By insertion, and quick to leave: thousands may wait for one exec.
        self._exit_waiters: dict[Callable[[Exit], None], None] = {}
        self._end_waiters: dict[Callable[[], None], None] = {}
        self._timers = Timers(service.poller, self)
        self._status: ExitStatus | None = None  # as reported, whatever became of it
        self._strays = 0
        self._on_start = [on_start]
        self.tree = Tree(
            service,
            its_exec,
            self,
            asked_score=params.oom_score_adj,
            on_exited=self._exited,
            on_empty=self._left,
            on_news=self._end_changed,
        )
        self._starting: Starting | None = Starting(
            service,
            its_exec,
            params,
            self,
            on_known=self._start_known,
            end_half_made=self.tree.end_half_made,
        )
        self._rest_until_s = 0.0
        self._clocks: ClockWatch | None = None
        if its_exec.clocks is not None:
            self._clocks = ClockWatch(
                its_exec.clocks,
                service.poller,
                self,
                service.freezes,
                self.tree.cpu_s,
                self._clock_ended,
            )
        self.readers = Readers(
            its_exec,
            service.poller,
            self,
            tail_bytes=lambda: service.registry.budget.tail_bytes,
            on_progress=self._readers_progressed,
            on_count=self._readers_counted,
        )
        self.streams = ExecStreams(
            service,
            its_exec,
            self,
            on_output=self.readers.wake if self._clocks is None else self._output_read,
            on_eof=self._streams_at_eof,
            on_shut=self.readers.look,
        )
        its_exec.transcript.on_room = self._room_made

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Launch it once it is journaled, or that has taken too long."""
        self._attempt(lambda: self._start().begin(self.launch))

    def _start(self) -> Starting:
        assert self._starting is not None
        return self._starting

    def launch(self) -> None:
        """Hand the command to a shim, unless it was ended first; a failure is its answer."""
        if self.exec.state is State.STARTING:
            self._attempt(self._hand_over)

    def _hand_over(self) -> None:
        starting = self._start()
        self.streams.take(starting.pipes)
        self.tree.handed_to(starting.launch(self._take_message, self._shim_lost))

    def _attempt(self, part_of_start: Callable[[], None]) -> None:
        try:
            part_of_start()
        except RequestError as error:
            self._start().fail(error)
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
        return self._starting is not None and self._starting.when_known(call)

    def _take_message(self, message: ShimMessage) -> None:
        match message:
            case Started():
                self._started(message)
            case Exited():
                self._exited(told_by_shim(message))
            case Empty():
                self.tree.left_by_shim()
            case Failed():
                self._start().failed(message)
            case Signalled():
                self.tree.signalled(message)
            case LeafRefused():
                self.tree.leaf_refused(message.errno)
            case OomAdjRefused():
                self._service.log.warning(
                    "oom_score_adj_refused", exec_id=self.exec.exec_id, errno=message.errno
                )
            case Ending() | Termed() | Killing() | Killed() | Survivors():
                self.tree.end_goes_on(message)
            case Parked():
                pass  # the shim itself keeps what it says

    def _started(self, message: Started) -> None:
        if self.exec.state is not State.STARTING:
            return
        at_s = message.at_ns / 1e9
        # Of then, not of now: a command can have ended before its start is heard of here.
        at = time.time() - max(0.0, time.monotonic() - at_s)
        actions = self.exec.started(message.pid, message.oom_score_adj, at_s, at)
        self.streams.make_pumps()
        self._service.observer.started(self.exec)
        self._service.reaper.started(message.pid)
        self._rest_until_s = self._start().rest_until_s
        self._start().succeeded()
        self.readers.hold_changed()
        self.streams.start_reading()
        self._carry_out(actions)
        self._start().run_waiting()

    def _start_known(self, error: RequestError | None) -> None:
        # Let go of: it holds the request, whose environment may have megabytes.
        told, self._on_start = self._on_start, []
        outcome = self if error is None else error
        each_of(
            *(functools.partial(each, outcome, created=each is told[0]) for each in told),
            lambda: None if error is None else self._end_changed(),
        )

    def _readers_counted(self, count: int) -> None:
        if self._clocks is not None:
            self._clocks.readers_counted(count)
        if self.exec.is_live:  # a reader of what is over only looks
            self._service.activity.worked(time.monotonic())

    def _readers_progressed(self) -> None:
        self._service.registry.budget.read_on(self.exec.transcript)
        self.streams.gate_changed()

    def _room_made(self) -> None:
        self._readers_progressed()
        if not self.exec.transcript.spool.is_on:
            self.readers.wake()  # there may be a gap to be told

    def _output_read(self) -> None:
        if self._clocks is not None:
            self._clocks.output_read()
        self.readers.wake()

    def _clock_ended(self, reason: Reason) -> None:
        self.end(reason)

    # ------------------------------------------------------------------ exit

    def _exited(self, status: ExitStatus) -> None:
        if self.exec.status is not None or self.exec.state is State.STARTING:
            return
        self._status = status
        self._service.rests.over(self._rest_until_s)
        self.tree.read_leaf()
        if self.exec.pid is not None:
            self._service.reaper.told(self.exec.pid)
        if self._clocks is not None:
            self._clocks.stop()
            self._clocks = None
        if self._service.guard.cause() is not None:
            # The lifeline ends natively, before the loop hears of it: the stop may have acted
            # on this command already.
            self.exec.end("stopped", STOP_GRACE_S, time.monotonic())
        actions = self.exec.exited(status, by_itself=self.tree.had_no_part_in(status))
        self._carry_out(actions)

    def _streams_at_eof(self) -> None:
        if self.exec.state in (State.DRAINING, State.DRAINING_EMPTY):
            self._drained()

    def _drained(self) -> None:
        self._timers.cancel("drain")
        if self.exec.state not in (State.DRAINING, State.DRAINING_EMPTY):
            return
        if self.exec.state is State.DRAINING_EMPTY:
            self.streams.count_rest()  # of who is no process of it
        self.tree.read_leaf()  # again: more may have died of it since the exit
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
            case RunClocks():
                assert self._clocks is not None
                self._clocks.start()
            case Drain():
                self._drain(action.until_s)
            case Publish():
                self._publish(action.exit)
            case Close():
                self._close()

    def _drain(self, until_s: float) -> None:
        self._timers.arm("drain", until_s, self._drained)  # first: a drain that fails still ends
        if self.streams.drain():
            self._drained()

    def _publish(self, its_exit: Exit) -> None:
        waiters, self._exit_waiters = self._exit_waiters, {}
        self._service.activity.worked(time.monotonic())
        each_of(
            lambda: self._service.observer.exited(self.exec, its_exit),
            self.streams.discard,
            self.streams.close_stdin,
            self.readers.wake,
            *(functools.partial(waiter, its_exit) for waiter in waiters),
        )

    def _close(self) -> None:
        self._timers.cancel_all()
        self._starting = None  # the record stays for an hour, what is not needed for it does not
        each_of(
            self.streams.close,
            self.tree.close,
            lambda: self._service.observer.closed(self.exec),
            lambda: self._service.closed(self),
            self.readers.wake,
            self._end_changed,
        )

    def let_go(self) -> None:
        """Part with its parts, once it is closed and forgotten.

        They and it refer to each other: only the collector would free them, thousands of execs
        later and all at once, while the loop stands still.
        """
        if not len(self.readers):  # one that still reads has need of them
            self.readers.end_hold()
            self.exec.transcript.on_room = _nothing
            del self.tree, self.streams, self.readers, self._timers, self._clocks

    # ------------------------------------------------------------------ ending

    def end(self, reason: Reason, grace_s: float | None = None) -> None:
        """End the exec with everything it started; see Exec.end."""
        self._carry_out(self.exec.end(reason, grace_s, time.monotonic()))
        if self.exec.state is State.STARTING and self.tree.shim is None:
            self._start().give_up()  # accepted and not launched yet: it never is

    def _send_end(self, grace_s: float) -> None:
        self.tree.end(grace_s)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call once it is closed, or it is known who survives; again may be called for news."""
        self._end_waiters[call] = None

    def _end_changed(self) -> None:
        waiters, self._end_waiters = self._end_waiters, {}
        each_of(*waiters)

    def when_exited(self, call: Callable[[Exit], None]) -> None:
        """Call once the exit is published."""
        self._exit_waiters[call] = None

    def forget_exit_waiter(self, call: Callable[[Exit], None]) -> None:
        """Do not call it any more."""
        self._exit_waiters.pop(call, None)

    def forget_end_waiter(self, call: Callable[[], None]) -> None:
        """Do not call it any more."""
        self._end_waiters.pop(call, None)

    # ------------------------------------------------------------------ its processes

    def _shim_lost(self) -> None:
        if self.exec.is_empty or self.exec.state in (State.FAILED, State.CLOSED):
            return
        if self.tree.is_adopted:
            return  # it has done its part and left, see Tree.left_by_shim
        assert self.tree.shim is not None
        self._service.log.warning("shim_lost", exec_id=self.exec.exec_id, pid=self.tree.shim.pid)
        self._service.counters.shims_lost += 1
        if self.exec.state is State.STARTING:
            self._start().fail(
                RequestError("internal", "the shim was lost before the command had started")
            )
            return
        self.exec.shim_lost()
        self.tree.shim_lost()

    def _left(self) -> None:
        """Nothing of it is left."""
        if self.exec.state is State.FAILED:
            return  # a half-made start, told already
        if self.exec.status is None:
            # Not among our children any more, so nobody can tell: never made up.
            nobody_knows = ExitStatus(code=None, signal=None, at_s=time.monotonic())
            self._exited(self._status or nobody_knows)
        if self.exec.state not in (State.DRAINING, State.LINGERING):
            return
        lingered = self.exec.state is State.LINGERING
        if lingered:
            self.streams.count_rest()
        self._carry_out(self.exec.emptied(time.monotonic(), time.time()))
        if not lingered and self.streams.drain():
            self._drained()  # what is in the pipes now is the last of it

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
            self._start().fail(RequestError("internal", "the start failed inside runnerd"))
            return
        self.exec.failed_inside()
        # What failed may fail again at once, as long as its descriptor is ready: nothing of the
        # streams is touched any more. The exit still comes, by way of the shim.
        self.streams.stop()
        if self.exec.is_live:
            self.end("internal", 0.0)
        if self.exec.state in (State.DRAINING, State.DRAINING_EMPTY) and self._strays <= _RETRIES:
            self._timers.arm("drain", time.monotonic(), self._drained)


def _nothing() -> None:
    """Take the place of a callback that nobody needs any more."""
