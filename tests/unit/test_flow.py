"""What a reader is sent, and when a command waits for it."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runnerd.core import flow
from runnerd.core.blocks import Block, Record
from runnerd.core.bounds import RECORD_COST_BYTES, Bounds
from runnerd.core.budget import TailBudget
from runnerd.core.flow import Gap, Gate, Subscription, Terminal, chunk_bytes
from runnerd.core.transcript import StreamName, Transcript
from runnerd.protocol.errors import RequestError

from .core_parts import NOW_S, SMALL, fill, make_transcript

BOTH: list[StreamName] = ["stdout", "stderr"]
FILTERS: list[list[StreamName]] = [["stdout", "stderr"], ["stdout"], ["stderr"]]
HOLD_S = 30.0


def subscribe(
    transcript: Transcript,
    *,
    streams: list[StreamName] | None = None,
    after: int | Literal["tail"] = 0,
    window_bytes: int | None = None,
) -> Subscription:
    return Subscription(
        1, transcript, streams=streams or BOTH, after=after, window_bytes=window_bytes
    )


def take_all(subscription: Subscription) -> list[Record | Gap | Terminal]:
    found: list[Record | Gap | Terminal] = []
    while (item := subscription.next_item()) is not None:
        assert not isinstance(item, Block)
        found.append(item)
    return found


def seqs(subscription: Subscription) -> list[int]:
    items = take_all(subscription)
    assert not any(isinstance(item, Gap) for item in items)
    return [item.seq for item in items if not isinstance(item, Gap)]


def three_records() -> Transcript:
    transcript = make_transcript()
    for stream, data in ((0, b"out"), (1, b"error"), (0, b"more")):
        transcript.append(stream, data)
    return transcript


class Client:
    """What one subscriber makes of what it is sent; every promise is checked as it comes."""

    def __init__(
        self,
        transcript: Transcript,
        written: list[bytes],
        streams: list[StreamName],
        after: int | Literal["tail"],
        window_bytes: int | None,
    ) -> None:
        self.subscription = subscribe(
            transcript, streams=streams, after=after, window_bytes=window_bytes
        )
        self.written = written
        self.wanted = {"stdout": {0}, "stderr": {1}}.get("".join(streams), {0, 1})
        self.ends: list[int | None] = [0, 0] if after == 0 else [None, None]
        self.seq = transcript.last_output_seq if after == "tail" else after
        self.unacked: list[Record] = []
        self.window_bytes = window_bytes
        self.terminals: list[str] = []

    def take(self, most: int) -> None:
        for _ in range(most):
            item = self.subscription.next_item()
            match item:
                case None:
                    return
                case Gap():
                    self.take_gap(item)
                case Record():
                    self.take_record(item)
                case Block():
                    raise AssertionError(item)
                case Terminal():
                    assert item.seq > self.seq
                    self.seq = item.seq
                    self.terminals.append(item.what)

    def take_record(self, record: Record) -> None:
        assert not self.terminals
        assert record.seq > self.seq
        assert record.stream in self.wanted
        assert self.ends[record.stream] in {None, record.offset}
        end = record.offset + len(record.data)
        assert record.data == self.written[record.stream][record.offset : end]
        self.ends[record.stream] = end
        self.seq = record.seq
        if self.window_bytes is not None:
            self.unacked.append(record)
            sent = sum(len(each.data) for each in self.unacked)
            assert sent <= self.window_bytes or len(self.unacked) == 1

    def take_gap(self, gap: Gap) -> None:
        assert not self.terminals
        assert self.seq < gap.first_seq <= gap.last_seq
        for stream in (0, 1):
            lost = gap.lost_bytes[stream]
            if stream not in self.wanted:
                assert lost == 0
                continue
            known = self.ends[stream]
            if known is not None:
                # Exact wherever this client knows where it stood.
                assert lost == gap.next_offsets[stream] - known
            elif lost is not None:
                # Or where the transcript knew: then the lost bytes lead from there to here.
                assert 0 <= lost <= gap.next_offsets[stream]
            self.ends[stream] = gap.next_offsets[stream]
        self.seq = gap.last_seq

    def ack(self, seq: int) -> None:
        self.subscription.ack(seq)
        self.unacked = [each for each in self.unacked if each.seq > seq]


chunks = st.tuples(st.sampled_from([0, 1]), st.integers(1, 400))
steps = st.one_of(
    st.tuples(st.just("write"), st.lists(chunks, min_size=1, max_size=8)),
    st.tuples(st.just("take"), st.integers(1, 6)),
    st.tuples(st.just("ack"), st.integers(0, 8)),
)


@settings(max_examples=300)
@given(
    before=st.lists(chunks, max_size=20),
    after=st.integers(0, 20) | st.just("tail"),
    streams=st.sampled_from(FILTERS),
    window_bytes=st.none() | st.integers(1, 900),
    mix=st.lists(steps, max_size=25),
)
def test_a_subscriber_is_sent_every_byte_or_told_that_it_is_lost(
    before: list[tuple[int, int]],
    after: int | Literal["tail"],
    streams: list[StreamName],
    window_bytes: int | None,
    mix: list[tuple[str, list[tuple[int, int]] | int]],
) -> None:
    transcript = make_transcript(TailBudget(SMALL))
    written = [b"", b""]

    def write(stream: int, size: int) -> None:
        data = bytes((len(written[stream]) + at) % 251 for at in range(size))
        written[stream] += data
        transcript.append(stream, data)

    for stream, size in before:
        write(stream, size)
    if isinstance(after, int):
        after = min(after, transcript.last_seq)
    client = Client(transcript, written, streams, after, window_bytes)
    for what, value in mix:
        if isinstance(value, list):
            for stream, size in value:
                write(stream, size)
        elif what == "take":
            client.take(value)
        else:
            client.ack(max(0, client.seq - value))
    transcript.mark_exited()
    client.take(1)
    transcript.mark_closed()
    for _ in range(1000):
        client.take(1000)
        client.ack(client.seq)
        if client.subscription.over:
            break
    assert client.terminals == ["exited", "closed"]
    for stream in client.wanted:
        assert client.ends[stream] in {None, len(written[stream])}
        if after == 0:
            assert client.ends[stream] == len(written[stream])
    assert client.subscription.next_item() is None


@pytest.mark.parametrize(
    ("after", "expected"), [(0, [1, 2, 3]), (1, [2, 3]), (3, []), ("tail", [])]
)
def test_after_names_the_last_record_the_reader_has(
    after: int | Literal["tail"], expected: list[int]
) -> None:
    transcript = three_records()
    subscription = subscribe(transcript, after=after)
    assert seqs(subscription) == expected
    transcript.append(0, b"new")
    assert seqs(subscription) == [4]


@pytest.mark.parametrize("after", [4, 5, 2**63 - 1])
def test_after_beyond_the_last_record_is_refused(after: int) -> None:
    """It belongs to another exec, or another incarnation's exec of the same id."""
    with pytest.raises(RequestError) as caught:
        subscribe(three_records(), after=after)
    assert caught.value.kind == "cursor_invalid"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (0, ["exited", "closed"]),
        (3, ["exited", "closed"]),
        (4, ["closed"]),
        (5, ["closed"]),
        ("tail", ["exited", "closed"]),
    ],
)
def test_a_subscription_always_ends_with_closed(
    after: int | Literal["tail"], expected: list[str]
) -> None:
    transcript = three_records()
    transcript.mark_exited()
    transcript.mark_closed()
    subscription = subscribe(transcript, after=after)
    items = [item for item in take_all(subscription) if isinstance(item, Terminal)]
    assert [item.what for item in items] == expected
    assert subscription.over
    assert subscription.next_item() is None


def test_exited_and_closed_come_last_and_once() -> None:
    transcript = three_records()
    subscription = subscribe(transcript)
    transcript.mark_exited()
    assert seqs(subscription) == [1, 2, 3, 4]
    assert not subscription.over
    assert subscription.next_item() is None
    transcript.mark_closed()
    assert seqs(subscription) == [5]
    assert subscription.over
    assert subscription.next_item() is None


@pytest.mark.parametrize(("streams", "expected"), [(["stdout"], [1, 3]), (["stderr"], [2])])
def test_only_the_streams_asked_for_are_sent(
    streams: list[StreamName], expected: list[int]
) -> None:
    assert seqs(subscribe(three_records(), streams=streams)) == expected


def test_a_window_bounds_what_is_sent_and_not_acknowledged() -> None:
    transcript = make_transcript()
    for _ in range(5):
        transcript.append(0, b"x" * 10)
    subscription = subscribe(transcript, window_bytes=25)
    assert seqs(subscription) == [1, 2]
    subscription.ack(1)
    assert seqs(subscription) == [3]
    subscription.ack(1)  # cumulative: the same again, or a lower one, opens nothing
    subscription.ack(0)
    assert seqs(subscription) == []
    subscription.ack(3)
    assert seqs(subscription) == [4, 5]


def test_a_window_of_exactly_the_size_is_enough() -> None:
    transcript = make_transcript()
    transcript.append(0, b"x" * 10)
    transcript.append(0, b"x" * 10)
    assert seqs(subscribe(transcript, window_bytes=20)) == [1, 2]
    assert seqs(subscribe(transcript, window_bytes=19)) == [1]


def test_a_window_smaller_than_a_chunk_still_lets_one_through() -> None:
    transcript = three_records()
    subscription = subscribe(transcript, window_bytes=1)
    for seq in (1, 2, 3):
        assert seqs(subscription) == [seq]
        subscription.ack(seq)
    assert subscription.next_item() is None


def test_a_huge_window_is_bounded_by_the_number_of_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that never acknowledges must not make the daemon remember records without end."""
    monkeypatch.setattr(flow, "UNACKED_RECORDS_MAX", 2)
    subscription = subscribe(three_records(), window_bytes=2**40)
    assert seqs(subscription) == [1, 2]
    subscription.ack(1)
    assert seqs(subscription) == [3]


def test_a_gap_exited_and_closed_ignore_the_window() -> None:
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    transcript.append(0, b"x" * 10)
    subscription = subscribe(transcript, window_bytes=1)
    assert seqs(subscription) == [1]
    fill(transcript, budget, SMALL.tail_bytes_max * 2)
    assert isinstance(subscription.next_item(), Gap)
    assert subscription.next_item() is None  # the record after it has to wait
    transcript.evict()
    transcript.mark_exited()
    transcript.mark_closed()
    rest = take_all(subscription)
    assert isinstance(rest[0], Gap)
    assert [item.what for item in rest[1:] if isinstance(item, Terminal)] == ["exited", "closed"]


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    subscription = subscribe(three_records(), window_bytes=3)
    assert seqs(subscription) == [1]
    with pytest.raises(RequestError) as caught:
        subscription.ack(2)
    assert caught.value.kind == "cursor_invalid"
    assert seqs(subscription) == []  # and nothing was released by the attempt


def dropped_to(first_seq: int) -> Transcript:
    """Records alternate: odd ones are stdout, 10 bytes; even ones stderr, 100 bytes."""
    transcript = make_transcript()
    for seq in range(1, 11):
        transcript.append(*((0, b"o" * 10) if seq % 2 else (1, b"e" * 100)))
    transcript.trim(transcript.end_cost - transcript.cost_up_to(first_seq - 1))
    assert transcript.first_seq == first_seq
    return transcript


def test_a_gap_names_sequences_and_bytes_of_each_stream() -> None:
    gap = subscribe(dropped_to(6)).next_item()
    assert gap == Gap(1, 5, (30, 200), (30, 200))


def test_a_gap_counts_from_where_the_reader_stood() -> None:
    transcript = dropped_to(1)
    subscription = subscribe(transcript)
    for _ in range(3):
        subscription.next_item()
    transcript.trim(transcript.end_cost - transcript.cost_up_to(7))
    assert subscription.next_item() == Gap(4, 7, (20, 200), (40, 300))


def test_a_reader_that_resumes_inside_what_is_kept_gets_exact_gaps_later() -> None:
    transcript = dropped_to(3)
    subscription = subscribe(transcript, after=4)
    transcript.trim(0)
    assert subscription.next_item() == Gap(5, 10, (30, 300), (50, 500))


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_reader_that_resumes_before_what_is_kept_is_not_told_a_guess(after: int) -> None:
    """It alone knows where it stood: the offsets say the rest."""
    subscription = subscribe(dropped_to(6), after=after)
    assert subscription.next_item() == Gap(after + 1, 5, (None, None), (30, 200))
    transcript = subscription.transcript
    transcript.trim(0)
    assert subscription.next_item() == Gap(6, 10, (20, 300), (50, 500))  # exact from now on


def test_a_reader_that_has_all_that_was_dropped_missed_nothing() -> None:
    assert seqs(subscribe(dropped_to(6), after=5)) == [6, 7, 8, 9, 10]


def test_what_the_other_stream_lost_is_no_gap() -> None:
    transcript = make_transcript()
    transcript.append(1, b"e" * 100)
    transcript.append(0, b"o")
    transcript.trim(transcript.end_cost - transcript.cost_up_to(1))
    assert seqs(subscribe(transcript, streams=["stdout"])) == [2]
    assert subscribe(transcript, streams=["stderr"]).next_item() == Gap(1, 1, (0, 100), (0, 100))


class GateMachine(RuleBasedStateMachine):
    """A blocking exec, the reader it waits for, and others that want the memory.

    The pump is modelled as the daemon's: it asks the gate before each read. The subscriber reads,
    acknowledges, is lost and comes back where it was; nothing may be missing for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.budget = TailBudget(SMALL)
        self.transcript = make_transcript(self.budget)
        self.gate = Gate("block", HOLD_S, NOW_S)
        self.others: list[Transcript] = []
        self.holder: Subscription | None = None
        self.bystander: Subscription | None = None
        self.window_bytes: int | None = None
        self.streams: list[StreamName] = BOTH
        self.unacked: list[int] = []  # what was sent within a window and may yet be lost
        self.has_seq = 0  # what a lost client comes back with
        self.floor_seq = 1  # what was kept when the present holder began

    @initialize(
        window_bytes=st.none() | st.integers(1, 600),
        streams=st.sampled_from(FILTERS),
        is_attached=st.booleans(),
    )
    def begin(self, window_bytes: int | None, streams: list[StreamName], is_attached: bool) -> None:
        self.window_bytes, self.streams = window_bytes, streams
        if is_attached:
            self.attach(back=0)

    def needs_after(self) -> int:
        """Return up to where the reader has all it wants, or had when it was lost."""
        if self.holder is None:
            return self.has_seq
        return self.unacked[0] - 1 if self.unacked else self.holder.cursor_seq

    def may_read(self) -> bool:
        return self.gate.may_read(self.transcript, self.budget.tail_bytes)

    @rule(stream=st.sampled_from([0, 1]), size=st.integers(1, 2000), times=st.integers(1, 10))
    def command_writes(self, stream: int, size: int, times: int) -> None:
        for _ in range(times):
            if not self.may_read():
                return
            data = b"x" * min(size, chunk_bytes(self.budget.tail_bytes))
            self.transcript.append(stream, data)

    @rule()
    def another_exec_comes_and_writes(self) -> None:
        if len(self.others) < 12:
            self.others.append(make_transcript(self.budget))
        for other in self.others:
            fill(other, self.budget, SMALL.tail_bytes_max)

    @precondition(lambda self: self.others)
    @rule()
    def another_exec_closes(self) -> None:
        self.budget.finish(self.others.pop(0))

    @precondition(lambda self: self.holder is None and self.gate.flow == "block")
    @rule(back=st.integers(0, 3))
    def attach(self, back: int) -> None:
        after = max(0, self.has_seq - back)
        self.floor_seq = self.transcript.first_seq
        self.holder = subscribe(
            self.transcript, streams=self.streams, after=after, window_bytes=self.window_bytes
        )
        self.gate.taken_by(self.holder)
        assert self.gate.held_until_s is None

    @rule()
    def somebody_else_watches(self) -> None:
        self.bystander = subscribe(self.transcript, after="tail")
        if self.holder is not None:
            before = (self.gate.flow, self.gate.holder, self.gate.held_until_s)
            self.gate.taken_by(self.bystander)
            self.gate.lost(self.bystander, NOW_S)
            self.gate.left(self.bystander)
            assert before == (self.gate.flow, self.gate.holder, self.gate.held_until_s)

    @precondition(lambda self: self.holder)
    @rule(most=st.integers(1, 8))
    def reader_takes(self, most: int) -> None:
        assert self.holder is not None
        for _ in range(most):
            item = self.holder.next_item()
            if item is None:
                return
            if isinstance(item, Gap) and self.gate.flow == "block":
                # Only what was gone before anybody was waited for.
                assert item.last_seq < self.floor_seq
            if isinstance(item, Record) and self.window_bytes is not None:
                self.unacked.append(item.seq)

    @precondition(lambda self: self.holder)
    @rule(back=st.integers(0, 4))
    def reader_acknowledges(self, back: int) -> None:
        assert self.holder is not None
        seq = max(0, self.holder.cursor_seq - back)
        self.holder.ack(seq)
        self.unacked = [each for each in self.unacked if each > seq]

    @precondition(lambda self: self.holder)
    @rule()
    def reader_is_lost(self) -> None:
        assert self.holder is not None
        self.gate.lost(self.holder, NOW_S)
        self.has_seq = self.needs_after()
        self.holder, self.unacked = None, []
        if self.gate.flow == "block":
            assert self.gate.held_until_s == NOW_S + HOLD_S

    @precondition(lambda self: self.holder)
    @rule()
    def reader_detaches(self) -> None:
        assert self.holder is not None
        self.gate.left(self.holder)
        self.holder, self.unacked = None, []
        assert self.gate.flow == "drop"

    @precondition(lambda self: self.holder is None)
    @rule()
    def hold_is_over(self) -> None:
        self.gate.open_for_good()

    @invariant()
    def nothing_a_blocking_reader_still_needs_is_dropped(self) -> None:
        if self.gate.flow == "block":
            assert self.transcript.first_seq <= max(self.floor_seq, self.needs_after() + 1)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        """The daemon stops reading in time: a reader that never reads costs one tail."""
        assert self.transcript.cost <= SMALL.tail_bytes_max

    @invariant()
    def the_command_waits_for_nobody_else(self) -> None:
        if self.gate.flow == "drop":
            assert self.gate.held_until_s is None
            assert self.may_read()
            assert self.transcript.protected_seq is None
        elif self.holder is not None and self.needs_after() == self.transcript.last_seq:
            assert self.may_read()

    def teardown(self) -> None:
        """A reader that goes on lets the command go on, whatever came before."""
        if self.holder is None or self.gate.flow == "drop":
            return
        for _ in range(3):
            while self.holder.next_item() is not None or self.holder.released_seq < (
                self.transcript.last_seq
            ):
                self.holder.ack(self.holder.cursor_seq)
            assert self.may_read()
            self.transcript.append(1, b"x")


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=120, stateful_step_count=40)


@pytest.mark.parametrize("window_bytes", [None, 1, 100])
def test_a_command_that_writes_only_what_is_not_wanted_never_waits(
    window_bytes: int | None,
) -> None:
    """Nobody acknowledges what was never sent; the gate must not wait for it."""
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    gate = Gate("block", HOLD_S, NOW_S)
    subscription = subscribe(transcript, streams=["stdout"], window_bytes=window_bytes)
    gate.taken_by(subscription)
    for _ in range(50):
        assert gate.may_read(transcript, budget.tail_bytes)
        transcript.append(1, b"e" * chunk_bytes(budget.tail_bytes))
        assert subscription.next_item() is None


def test_what_is_sent_and_not_acknowledged_holds_back_only_itself_and_what_follows() -> None:
    transcript = make_transcript()
    for stream in (1, 0, 1, 0, 1):
        transcript.append(stream, b"x")
    subscription = subscribe(transcript, streams=["stdout"], window_bytes=10)
    assert subscription.released_seq == 0
    assert seqs(subscription) == [2, 4]
    assert subscription.released_seq == 1
    subscription.ack(2)
    assert subscription.released_seq == 3
    subscription.ack(4)
    assert subscription.released_seq == 5


def test_a_taker_that_stands_further_back_is_protected_at_once() -> None:
    """Another exec's output may shrink the transcript before this one's pipes are read again."""
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    gate = Gate("block", HOLD_S, NOW_S)
    first = subscribe(transcript)
    gate.taken_by(first)
    for _ in range(4):
        transcript.append(0, b"x")
    assert seqs(first) == [1, 2, 3, 4]
    assert gate.may_read(transcript, budget.tail_bytes)
    gate.lost(first, NOW_S)
    second = subscribe(transcript, after=1)
    gate.taken_by(second)
    for _ in range(20):
        fill(make_transcript(budget), budget, SMALL.tail_bytes_max)
    assert seqs(second) == [2, 3, 4]


@pytest.mark.parametrize("window_bytes", [None, 100])
def test_what_a_lost_reader_had_not_acknowledged_is_held_for_it(window_bytes: int | None) -> None:
    """With a window, sent is not arrived; without one it is all that can be known."""
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    gate = Gate("block", HOLD_S, NOW_S)
    reader = subscribe(transcript, window_bytes=window_bytes)
    gate.taken_by(reader)
    for _ in range(4):
        transcript.append(0, b"x")
    assert seqs(reader) == [1, 2, 3, 4]
    if window_bytes is not None:
        reader.ack(1)
    gate.lost(reader, NOW_S)
    gate.may_read(transcript, budget.tail_bytes)
    for _ in range(20):
        fill(make_transcript(budget), budget, SMALL.tail_bytes_max)
    if window_bytes is None:
        assert transcript.first_seq > 2
    else:
        assert seqs(subscribe(transcript, after=1)) == [2, 3, 4]


def test_drop_never_waits() -> None:
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    gate = Gate("drop", HOLD_S, NOW_S)
    assert gate.held_until_s is None
    subscription = subscribe(transcript)
    gate.taken_by(subscription)
    assert gate.holder is None
    for _ in range(100):
        assert gate.may_read(transcript, budget.tail_bytes)
        transcript.append(0, b"x" * 100)
    assert transcript.state == "partial"
    assert isinstance(subscription.next_item(), Gap)


def test_a_blocking_exec_nobody_reads_waits_for_its_reader_and_not_for_ever() -> None:
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    gate = Gate("block", HOLD_S, NOW_S)
    assert gate.held_until_s == NOW_S + HOLD_S
    while gate.may_read(transcript, budget.tail_bytes):
        transcript.append(0, b"x" * chunk_bytes(budget.tail_bytes))
    assert transcript.state == "kept"
    gate.open_for_good()
    assert gate.held_until_s is None
    assert gate.may_read(transcript, budget.tail_bytes)
    gate.taken_by(subscribe(transcript))
    assert gate.holder is None  # for good


def test_one_chunk_is_taken_even_where_the_tail_is_smaller() -> None:
    """Else a blocking command would never write its first byte."""
    transcript = make_transcript()
    gate = Gate("block", HOLD_S, NOW_S)
    subscription = subscribe(transcript)
    gate.taken_by(subscription)
    for _ in range(3):
        assert gate.may_read(transcript, 1)
        transcript.append(0, b"x")
        assert not gate.may_read(transcript, 1)
        subscription.next_item()


@pytest.mark.parametrize("tail_bytes", [Bounds().tail_bytes_min, Bounds().tail_bytes_max])
def test_what_waits_for_a_reader_fits_the_tail(tail_bytes: int) -> None:
    budget = TailBudget(Bounds(tail_bytes_max=tail_bytes, tail_bytes_min=tail_bytes))
    transcript = make_transcript(budget)
    gate = Gate("block", HOLD_S, NOW_S)
    size = chunk_bytes(tail_bytes)
    while gate.may_read(transcript, tail_bytes):
        transcript.append(0, b"x" * size)
    assert tail_bytes - size - RECORD_COST_BYTES < transcript.cost <= tail_bytes
