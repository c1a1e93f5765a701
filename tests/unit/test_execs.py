"""One exec tells one story about its end, whatever came in whatever order."""

import math
from typing import Any, Literal, cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd.core.bounds import DRAIN_S
from runnerd.core.budget import TailBudget
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
from runnerd.core.life import TRANSITIONS, Event, State
from runnerd.protocol.exits import Exit, Oom, OomVerdict, Reason, StreamCount, Survivor

from .core_parts import (
    NOW_S,
    SMALL,
    WALL_S,
    blocking,
    exit_status,
    kept_records,
    make_exec,
    start_params,
)

SIGTERM, SIGKILL = 15, 9
ASKED: list[Reason] = ["cancelled", "deadline", "orphaned", "stalled", "stopped", "internal"]
GRACES = st.none() | st.sampled_from([0.0, 0.5, 5.0, 100.0])
STATUSES = st.sampled_from(
    [(0, None), (3, None), (255, None), (None, SIGTERM), (None, SIGKILL), (None, None)]
)


def running(**fields: Any) -> Exec:
    its_exec = make_exec(start_params(**fields))
    its_exec.started(100, 900, NOW_S, WALL_S)
    return its_exec


def lingering(its_exec: Exec, status: ExitStatus, *, by_itself: bool = False) -> Exit:
    its_exec.exited(status, by_itself=by_itself)
    its_exec.drained(status.at_s, WALL_S, oom_kills=0, starts=1)
    assert its_exec.exit is not None
    return its_exec.exit


def reason_of(its_exec: Exec, status: ExitStatus, *, by_itself: bool = False) -> Reason:
    return lingering(its_exec, status, by_itself=by_itself).reason


class History:
    """Drive one exec by the table, and check what may never happen as it happens."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.now_s = NOW_S
        self.budget = TailBudget(SMALL)
        self.exec = make_exec(start_params(**fields), budget=self.budget)
        self.fields = fields
        self.ends: list[tuple[float, float]] = []  # when each SendEnd went out, and its grace
        self.published: list[Exit] = []
        self.closes: list[Close] = []
        self.exit_seq = 0
        self.written = [0, 0]
        self.discarded = 0
        self.first_reason: Reason | None = None
        self.is_by_itself = False
        self.status: ExitStatus | None = None

    def step(self, event: Event, draw: st.DataObject) -> None:
        self.now_s += draw.draw(st.sampled_from([0.0, 0.01, 1.0]))
        match event:
            case Event.STARTED:
                self.take(self.exec.started(100, 900, self.now_s, WALL_S))
            case Event.START_FAILED:
                self.exec.start_failed()
            case Event.END:
                self.end(draw.draw(st.sampled_from(ASKED)), draw.draw(GRACES))
            case Event.EXITED:
                self.leave(*draw.draw(STATUSES), by_itself=draw.draw(st.booleans()))
            case Event.DRAINED:
                self.take(self.exec.drained(self.now_s, WALL_S, oom_kills=0, starts=1))
            case Event.EMPTY:
                self.take(self.exec.emptied(self.now_s, WALL_S))
            case Event.SHIM_LOST:
                if self.first_reason is None and self.status is None:
                    self.first_reason = "internal"
                self.exec.shim_lost()

    def end(self, reason: Reason, grace_s: float | None) -> None:
        state, ending = self.exec.state, self.exec.ending
        actions = self.exec.end(reason, grace_s, self.now_s)
        if state not in {State.FAILED, State.CLOSED}:
            assert self.exec.ending == (ending or reason)
            if self.first_reason is None and self.status is None:
                self.first_reason = reason
        else:
            assert actions == []
        self.take(actions)

    def leave(self, code: int | None, signal: int | None, *, by_itself: bool) -> None:
        self.is_by_itself = by_itself
        self.status = ExitStatus(code=code, signal=signal, at_s=self.now_s)
        self.take(self.exec.exited(self.status, by_itself=by_itself))

    def write(self, stream: Literal[0, 1], size: int) -> None:
        if self.exec.state in {State.STARTING, State.FAILED, State.CLOSED}:
            return  # its pipes are not read then
        if self.exec.has_exited:
            self.discarded += size
        else:
            self.written[stream] += size
        self.exec.output(stream, b"x" * size, self.now_s)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendEnd(grace_s):
                    self.take_end(grace_s)
                case RunClocks():
                    assert self.exec.clocks is not None
                    assert self.exec.clocks.next_s == self.now_s + self.fields["deadline_s"]
                case Drain(until_s):
                    assert until_s == self.now_s + DRAIN_S
                case Publish():
                    assert not self.published
                    assert not self.closes
                    self.published.append(action.exit)
                    self.exit_seq = self.exec.transcript.exited_seq
                    assert self.exit_seq == self.exec.transcript.last_output_seq + 1
                case Close():
                    assert self.published
                    assert not self.closes
                    self.closes.append(action)

    def take_end(self, grace_s: float) -> None:
        kill_at_s = self.now_s + grace_s
        # A repeat only ever brings the KILL nearer.
        assert all(kill_at_s < at_s + earlier_s for at_s, earlier_s in self.ends)
        self.ends.append((self.now_s, grace_s))
        assert self.exec.end_by_s == kill_at_s

    def check(self) -> None:
        its_exec, transcript = self.exec, self.exec.transcript
        assert its_exec.has_exited == bool(self.published)
        assert (its_exec.state is State.CLOSED) == bool(self.closes)
        assert its_exec.is_live == (its_exec.state not in {State.FAILED, State.CLOSED})
        assert (its_exec.end_by_s is None) == (not self.ends)
        if its_exec.state is not State.FAILED:
            assert self.budget.used_bytes == transcript.cost
        for stream in (0, 1):
            assert transcript.total_bytes[stream] == self.written[stream]
        if self.published:
            self.check_exit(self.published[0])
        if self.closes:
            assert transcript.closed_seq == transcript.last_seq == self.exit_seq + 1
            assert self.closes[0].closed.discarded_bytes == self.discarded
        elif self.published:
            assert transcript.last_seq == transcript.exited_seq == self.exit_seq

    def check_exit(self, its_exit: Exit) -> None:
        assert self.status is not None
        assert its_exit is self.exec.exit
        assert (its_exit.code, its_exit.signal) == (self.status.code, self.status.signal)
        if its_exit.reason in {"lost", "internal"}:
            assert None in {its_exit.code, its_exit.signal}
        else:
            assert (its_exit.code is None) != (its_exit.signal is None)
        assert its_exit.reason == self.expected_reason(self.status)
        for count, written in ((its_exit.stdout, 0), (its_exit.stderr, 1)):
            assert count.total_bytes == self.written[written]
            assert count.total_bytes == count.kept_bytes + count.dropped_bytes

    def expected_reason(self, status: ExitStatus) -> Reason:
        reason = self.first_reason or "exited"
        if self.is_by_itself and reason != "internal":
            reason = "exited"
        is_lost = status.code is None and status.signal is None
        return "lost" if is_lost and reason != "internal" else reason


@settings(max_examples=150)
@given(
    fields=st.fixed_dictionaries(
        {
            "deadline_s": st.none() | st.just(10.0),
            "grace_s": st.sampled_from([0.0, 5.0]),
            "leftovers": st.sampled_from(["keep", "kill"]),
            "sha256": st.booleans(),
        }
    ),
    draw=st.data(),
)
def test_every_history_tells_one_consistent_story(
    fields: dict[str, Any], draw: st.DataObject
) -> None:
    history = History(fields)
    for _ in range(draw.draw(st.integers(1, 25))):
        if draw.draw(st.booleans()):
            stream = cast("Literal[0, 1]", draw.draw(st.integers(0, 1)))
            history.write(stream, draw.draw(st.integers(1, 500)))
        event = draw.draw(st.sampled_from([*TRANSITIONS[history.exec.state]]))
        history.step(event, draw)
        history.check()
    if history.exec.state is State.FAILED:
        assert history.budget.used_bytes == 0
        assert history.exec.exit is None
        assert history.exec.closed is None


@pytest.mark.parametrize("fact", ["empty", "drained"])
def test_exited_is_published_at_the_end_of_the_drain_and_closed_when_both_are_over(
    fact: str,
) -> None:
    its_exec = running()
    assert its_exec.exited(exit_status(), by_itself=True) == [Drain(NOW_S + DRAIN_S)]
    assert not its_exec.has_exited
    if fact == "empty":
        assert its_exec.emptied(NOW_S, WALL_S) == []
        actions = its_exec.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
    else:
        actions = its_exec.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
        assert its_exec.state is State.LINGERING
        assert its_exec.closed is None
        actions += its_exec.emptied(NOW_S, WALL_S)
    assert [type(each) for each in actions] == [Publish, Close]
    assert its_exec.closed_s == NOW_S


@pytest.mark.parametrize("reason", ASKED)
@pytest.mark.parametrize("second", ASKED)
def test_the_reason_is_whoever_acted_first(reason: Reason, second: Reason) -> None:
    its_exec = running()
    its_exec.end(reason, 5.0, NOW_S)
    its_exec.end(second, 0.0, NOW_S)
    assert its_exec.ending == reason
    assert reason_of(its_exec, exit_status(None, SIGKILL)) == reason


@pytest.mark.parametrize("code", [0, 1, 137, 143])
@pytest.mark.parametrize("signal", [None, SIGTERM, SIGKILL])
def test_no_reason_is_guessed_from_a_number(code: int, signal: int | None) -> None:
    its_exec = running()
    status = exit_status(code if signal is None else None, signal)
    assert reason_of(its_exec, status) == "exited"


@pytest.mark.parametrize("reason", ASKED)
def test_what_certainly_left_by_itself_was_not_ended(reason: Reason) -> None:
    """An end that crossed the exit on its way is not what ended it, but a defect here may be."""
    its_exec = running()
    its_exec.end(reason, 5.0, NOW_S)
    expected = "internal" if reason == "internal" else "exited"
    assert reason_of(its_exec, exit_status(), by_itself=True) == expected


def test_what_ends_leftovers_does_not_rewrite_the_exit() -> None:
    its_exec = running()
    its_exec.exited(exit_status(), by_itself=False)
    assert its_exec.end("cancelled", 5.0, NOW_S) == [SendEnd(5.0)]
    its_exec.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
    its_exit = its_exec.exit
    assert its_exit is not None
    assert its_exit.reason == "exited"
    assert its_exec.ending == "cancelled"
    assert its_exec.end("stopped", 0.0, NOW_S) == [SendEnd(0.0)]
    assert its_exec.exit is its_exit


@pytest.mark.parametrize("is_first", [False, True])
def test_a_deadline_that_races_the_exit_gives_one_consistent_exit(is_first: bool) -> None:
    its_exec = running(deadline_s=1.0)
    at_s = NOW_S + 1.0
    if is_first:
        assert its_exec.end("deadline", None, at_s) == [SendEnd(5.0)]
    its_exec.exited(exit_status(None, SIGTERM, at_s=at_s), by_itself=False)
    if not is_first:
        its_exec.end("deadline", None, at_s)
    [published] = its_exec.drained(at_s, WALL_S, oom_kills=0, starts=1)
    assert isinstance(published, Publish)
    assert published.exit.reason == ("deadline" if is_first else "exited")
    assert published.exit.wall_s == 1.0


def test_a_deadline_is_armed_from_the_start_of_the_command() -> None:
    its_exec = make_exec(start_params(deadline_s=2.0))
    assert its_exec.started(100, 900, NOW_S + 3.0, WALL_S) == [RunClocks()]
    assert its_exec.clocks is not None
    assert its_exec.clocks.next_s == NOW_S + 5.0
    its_exec.exited(exit_status(at_s=NOW_S + 4.0), by_itself=True)
    assert its_exec.clocks is None, "they end with the command"
    assert make_exec().started(100, 900, NOW_S, WALL_S) == []


def test_an_end_before_the_start_is_a_latch() -> None:
    """The shim is told at once, and what it was told is not taken back by started."""
    its_exec = make_exec(start_params(grace_s=3.0))
    assert its_exec.end("cancelled", None, NOW_S) == [SendEnd(3.0)]
    assert its_exec.started(100, 900, NOW_S, WALL_S) == []
    assert (its_exec.ending, its_exec.end_by_s) == ("cancelled", NOW_S + 3.0)
    assert reason_of(its_exec, exit_status(None, SIGTERM)) == "cancelled"


def test_the_grace_is_only_ever_shortened() -> None:
    its_exec = running(grace_s=10.0)
    assert its_exec.end("cancelled", None, NOW_S) == [SendEnd(10.0)]
    assert its_exec.end("cancelled", None, NOW_S) == []  # the same again: no second TERM
    assert its_exec.end("cancelled", 10.0, NOW_S + 1) == []
    assert its_exec.end("stopped", 100.0, NOW_S + 1) == []
    assert its_exec.end_by_s == NOW_S + 10.0
    assert its_exec.end("stopped", 2.0, NOW_S + 1) == [SendEnd(2.0)]
    assert its_exec.end("cancelled", 0.0, NOW_S + 2) == [SendEnd(0.0)]
    assert its_exec.end("cancelled", 0.0, NOW_S + 2) == []
    assert its_exec.end_by_s == NOW_S + 2.0


def test_leftovers_are_ended_at_the_exit_only_where_asked() -> None:
    kept, killed = running(), running(leftovers="kill", grace_s=3.0)
    drain = Drain(NOW_S + DRAIN_S)
    assert kept.exited(exit_status(), by_itself=True) == [drain]
    assert killed.exited(exit_status(), by_itself=True) == [drain, SendEnd(3.0)]
    assert killed.ending is None  # nobody asked to end the command
    assert killed.end("cancelled", 3.0, NOW_S) == []
    assert killed.end("cancelled", 1.0, NOW_S) == [SendEnd(1.0)]


def test_leftovers_of_a_command_that_is_being_ended_get_no_second_term() -> None:
    its_exec = running(leftovers="kill")
    its_exec.end("cancelled", 1.0, NOW_S)
    assert its_exec.exited(exit_status(), by_itself=False) == [Drain(NOW_S + DRAIN_S)]
    assert its_exec.end_by_s == NOW_S + 1.0


@pytest.mark.parametrize(
    ("before", "expected"), [(None, "lost"), ("cancelled", "lost"), ("internal", "internal")]
)
def test_a_status_nobody_knows_is_never_made_up(before: Reason | None, expected: Reason) -> None:
    its_exec = running()
    if before is not None:
        its_exec.end(before, 0.0, NOW_S)
    its_exit = lingering(its_exec, exit_status(None, None))
    assert (its_exit.code, its_exit.signal, its_exit.reason) == (None, None, expected)


def test_a_lost_shim_is_the_reason_unless_somebody_acted_before() -> None:
    first, second = running(), running()
    first.shim_lost()
    first.end("cancelled", 0.0, NOW_S)
    second.end("cancelled", 0.0, NOW_S)
    second.shim_lost()
    assert reason_of(first, exit_status(None, SIGKILL)) == "internal"
    assert reason_of(second, exit_status(None, SIGKILL)) == "cancelled"
    third = running()
    third.exited(exit_status(), by_itself=True)
    third.shim_lost()
    third.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
    assert third.exit is not None
    assert third.exit.reason == "exited"


@pytest.mark.parametrize("reason", [None, *ASKED])
@pytest.mark.parametrize("signal", [None, SIGTERM, SIGKILL])
@pytest.mark.parametrize("sent_kill", [False, True])
def test_forced_is_a_kill_of_ours_that_ended_the_command(
    reason: Reason | None, signal: int | None, sent_kill: bool
) -> None:
    its_exec = running()
    if reason is not None:
        its_exec.end(reason, 0.0, NOW_S)
    its_exec.forced = sent_kill
    its_exit = lingering(its_exec, exit_status(0 if signal is None else None, signal))
    assert its_exit.forced == (sent_kill and signal == SIGKILL and reason is not None)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("later_starts", [0, 1])
def test_an_oom_kill_is_ours_alone_only_where_no_other_lived(
    alone: bool, later_starts: int
) -> None:
    its_exec = make_exec(alone=alone)
    its_exec.started(100, 900, NOW_S, WALL_S)
    its_exec.exited(exit_status(None, SIGKILL), by_itself=True)
    its_exec.drained(NOW_S, WALL_S, oom_kills=2, starts=1 + later_starts)
    assert its_exec.exit is not None
    was_alone = alone and not later_starts
    assert its_exec.exit.oom.verdict == ("killed" if was_alone else "possible")
    assert its_exec.exit.oom.kills == 2


@pytest.mark.parametrize(
    ("own", "kills", "verdict"), [(1, 1, "killed"), (0, 0, "none"), (None, 2, "possible")]
)
def test_a_cgroup_of_its_own_says_for_certain_who_was_killed(
    own: int | None, kills: int, verdict: OomVerdict
) -> None:
    """Though others live, and though the shared counter has risen for them."""
    its_exec = make_exec(alone=False)
    its_exec.started(100, 900, NOW_S, WALL_S)
    its_exec.own_oom_kills(own)
    its_exec.exited(exit_status(None, SIGKILL), by_itself=True)
    its_exec.own_oom_kills(0 if own else None)  # gone by then, or counted anew: never less
    its_exec.drained(NOW_S, WALL_S, oom_kills=2, starts=5)
    assert its_exec.exit is not None
    assert its_exec.exit.oom == Oom(kills=kills, verdict=verdict)


def test_an_oom_rise_with_a_kill_of_ours_is_a_childs() -> None:
    its_exec = running()
    its_exec.end("cancelled", 0.0, NOW_S)
    its_exec.forced = True
    its_exec.exited(exit_status(None, SIGKILL), by_itself=False)
    its_exec.drained(NOW_S, WALL_S, oom_kills=1, starts=1)
    assert its_exec.exit is not None
    assert its_exec.exit.oom.verdict == "child"


def test_output_after_the_exit_is_published_is_counted_and_not_kept() -> None:
    its_exec = running()
    its_exec.output(0, b"abc", NOW_S)
    its_exec.exited(exit_status(), by_itself=True)
    its_exec.output(1, b"de", NOW_S)
    its_exec.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
    its_exec.output(0, b"late", NOW_S)
    [close] = its_exec.emptied(NOW_S, WALL_S)
    assert isinstance(close, Close)
    assert close.closed.discarded_bytes == 4
    assert [each.data for each in kept_records(its_exec.transcript)] == [b"abc", b"de"]
    assert its_exec.stream_count(0) == StreamCount(
        total_bytes=3, kept_bytes=3, dropped_bytes=0, sha256=None
    )
    assert its_exec.stream_count(1).total_bytes == 2


def test_the_most_processes_seen_are_kept_and_nobody_is_no_look() -> None:
    its_exec = make_exec()
    its_exec.saw_processes(0)
    assert its_exec.peak_processes is None
    for count in (2, 5, 3, 0):
        its_exec.saw_processes(count)
    assert its_exec.peak_processes == 5


def test_a_shim_quicker_than_the_daemon_puts_no_phase_before_the_one_before_it() -> None:
    """The command can run before the daemon is back from handing the job over."""
    its_exec = make_exec()
    its_exec.spawned(NOW_S + 0.003)
    its_exec.started(7, None, NOW_S + 0.002, WALL_S)
    assert (its_exec.phases.spawned_ms, its_exec.phases.started_ms) == (2.0, 2.0)


def test_phases_and_times_are_measured_from_the_acceptance() -> None:
    its_exec = make_exec()
    its_exec.spawned(NOW_S + 0.001)
    its_exec.started(100, 900, NOW_S + 0.002, WALL_S + 0.002)
    its_exec.output(0, b"a", NOW_S + 0.003)
    its_exec.output(0, b"b", NOW_S + 0.004)
    its_exec.exited(exit_status(at_s=NOW_S + 1.002), by_itself=True)
    its_exec.drained(NOW_S + 1.5, WALL_S + 1.5, oom_kills=0, starts=1)
    its_exit = its_exec.exit
    assert its_exit is not None
    phases = its_exit.phases
    assert (phases.spawned_ms, phases.started_ms, phases.first_byte_ms) == (1.0, 2.0, 3.0)
    assert (phases.exited_ms, phases.drained_ms) == (1002.0, 1500.0)
    assert its_exit.started_at == WALL_S + 0.002
    assert its_exit.wall_s is not None
    assert math.isclose(its_exit.wall_s, 1.0, abs_tol=1e-6)
    assert math.isclose(its_exit.ended_at, WALL_S + 1.002, abs_tol=1e-5)


def test_what_the_kernel_did_not_report_is_null() -> None:
    its_exit = lingering(running(), exit_status(3))
    reported = (its_exit.cpu_user_s, its_exit.cpu_system_s, its_exit.peak_rss_bytes)
    assert reported == (None, None, None)
    assert (its_exit.minor_faults, its_exit.block_writes) == (None, None)


def test_a_failed_start_gives_its_share_back_and_publishes_nothing() -> None:
    budget = TailBudget(SMALL)
    others = [make_exec(budget=budget) for _ in range(4)]
    shared = budget.tail_bytes
    failed = make_exec(budget=budget)
    assert budget.tail_bytes < shared
    failed.start_failed()
    assert budget.tail_bytes == shared
    assert (failed.is_live, failed.exit, failed.closed) == (False, None, None)
    assert failed.end("cancelled", 0.0, NOW_S) == []
    assert all(each.is_live for each in others)


def test_survivors_are_over_when_nothing_is_left() -> None:
    its_exec = running()
    lingering(its_exec, exit_status())
    its_exec.survivors = [Survivor(pid=7, reason="D", command=None)]
    its_exec.emptied(NOW_S, WALL_S)
    assert its_exec.survivors == []
    assert its_exec.is_empty


@pytest.mark.parametrize(
    ("fields", "flow"),
    [({}, "drop"), ({"flow": "block"}, "block"), ({"flow": "drop"}, "drop")],
)
def test_flow_blocks_by_default_only_where_the_start_attaches(
    fields: dict[str, Any], flow: str
) -> None:
    assert make_exec(start_params(**fields)).gate.flow == flow
    assert make_exec(blocking(**fields)).gate.flow == (fields.get("flow") or "block")


def test_stdin_is_there_only_where_asked_for() -> None:
    assert make_exec().stdin is None
    assert make_exec(start_params(stdin="pipe")).stdin is not None


def test_every_reason_of_the_protocol_is_reached_here() -> None:
    assert {*ASKED, "exited", "lost"} == set(get_args(Reason))
