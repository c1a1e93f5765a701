"""Nothing is lost that is not counted, and all transcripts together stay within their budget."""

import hashlib
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from runnerd.core.bounds import RECORD_COST_BYTES, Bounds
from runnerd.core.budget import TailBudget
from runnerd.core.flow import chunk_bytes
from runnerd.core.transcript import Transcript

from .core_parts import SMALL, fill, kept_records, make_transcript

TOTAL = SMALL.transcript_total_bytes_max


class Reader:
    """A cursor that keeps what it was given, and counts what it was told it missed."""

    def __init__(self) -> None:
        self.seq = 0
        self.ends = [0, 0]
        self.got_bytes = [0, 0]
        self.missed_bytes = [0, 0]

    def read(self, writer: "Writer", most: int) -> None:
        transcript = writer.transcript
        for _ in range(most):
            if self.seq + 1 < transcript.first_seq:
                offsets = transcript.first_offsets()
                for stream in (0, 1):
                    self.missed_bytes[stream] += offsets[stream] - self.ends[stream]
                self.ends = [*offsets]
                self.seq = transcript.first_seq - 1
            record = transcript.record_after(self.seq)
            if record is None:
                return
            assert record.seq == self.seq + 1
            assert record.offset == self.ends[record.stream]
            end = record.offset + len(record.data)
            assert record.data == writer.written[record.stream][record.offset : end]
            self.seq = record.seq
            self.ends[record.stream] = end
            self.got_bytes[record.stream] += len(record.data)


class Writer:
    """A transcript beside the plain truth about it."""

    def __init__(self, budget: TailBudget) -> None:
        self.transcript = make_transcript(budget, sha256=True)
        self.written = [b"", b""]
        self.given: list[int] = []  # every sequence given, in order
        self.first_seq_protected = 0  # what was dropped already when the protection began
        self.readers: list[Reader] = []
        self.is_finished = False

    def check(self) -> None:
        transcript = self.transcript
        records = kept_records(transcript)
        kept = [b"", b""]
        for record in records:
            assert record.offset == transcript.dropped_bytes[record.stream] + len(
                kept[record.stream]
            )
            kept[record.stream] += record.data
        for stream in (0, 1):
            total, dropped = transcript.total_bytes[stream], transcript.dropped_bytes[stream]
            assert total == len(self.written[stream]) == len(kept[stream]) + dropped
            assert kept[stream] == self.written[stream][dropped:]
        assert [each.seq for each in records] == [
            *range(transcript.first_seq, transcript.last_output_seq + 1)
        ]
        assert transcript.cost == sum(len(each.data) + RECORD_COST_BYTES for each in records)
        assert self.given == [*range(1, transcript.last_seq + 1)]
        if transcript.protected_seq is not None:
            allowed = max(self.first_seq_protected, transcript.protected_seq + 1)
            assert transcript.first_seq <= allowed


class TranscriptsMachine(RuleBasedStateMachine):
    """Several execs write, are read, exit, close and are forgotten under one small budget."""

    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.budget = TailBudget(SMALL)
        self.all: list[Writer] = []
        self.forgotten: list[Writer] = []
        self.closing_order: list[Writer] = []
        self.was_protected = False
        self.may_protect = False

    @initialize(may_protect=st.booleans())
    def begin(self, may_protect: bool) -> None:
        self.may_protect = may_protect

    @property
    def live(self) -> int:
        return sum(not each.is_finished for each in self.all)

    @precondition(lambda self: len(self.all) < 10)
    @rule(target=writers)
    def add(self) -> Writer:
        writer = Writer(self.budget)
        self.all.append(writer)
        return writer

    @rule(
        writer=writers,
        stream=st.sampled_from([0, 1]),
        size=st.integers(1, chunk_bytes(SMALL.tail_bytes_max)) | st.just(4 * RECORD_COST_BYTES),
        times=st.integers(1, 12),
    )
    def write(self, writer: Writer, stream: int, size: int, times: int) -> None:
        if writer not in self.all or writer.transcript.exited_seq:
            return
        for _ in range(times):
            last = writer.transcript.last_seq
            data = bytes((len(writer.written[stream]) + at) % 251 for at in range(size))
            writer.written[stream] += data
            seq = writer.transcript.append(stream, data)
            assert seq == last + 1
            writer.given.append(seq)
        if writer.transcript.protected_seq is None:
            assert writer.transcript.cost <= self.budget.tail_bytes

    @rule(writer=writers)
    def exit(self, writer: Writer) -> None:
        if writer in self.all and not writer.transcript.exited_seq:
            writer.given.append(writer.transcript.mark_exited())

    @rule(writer=writers)
    def close(self, writer: Writer) -> None:
        if writer in self.all and writer.transcript.exited_seq and not writer.is_finished:
            writer.given.append(writer.transcript.mark_closed())
            writer.is_finished = True
            self.closing_order.append(writer)
            self.budget.finish(writer.transcript)

    @rule(writer=writers)
    def forget(self, writer: Writer) -> None:
        if writer in self.all:
            self.all.remove(writer)
            self.forgotten.append(writer)
            if writer in self.closing_order:
                self.closing_order.remove(writer)
            self.budget.remove(writer.transcript)

    @precondition(lambda self: self.may_protect)
    @rule(writer=writers, back=st.integers(0, 8))
    def protect(self, writer: Writer, back: int) -> None:
        transcript = writer.transcript
        if writer in self.all:
            self.was_protected = True
            writer.first_seq_protected = transcript.first_seq
            transcript.protected_seq = max(0, transcript.last_output_seq - back)

    @rule(writer=writers)
    def unprotect(self, writer: Writer) -> None:
        writer.transcript.protected_seq = None

    @rule(writer=writers, reader=st.integers(0, 2), most=st.integers(1, 10))
    def read(self, writer: Writer, reader: int, most: int) -> None:
        if len(writer.readers) <= reader:
            writer.readers.append(Reader())
        writer.readers[min(reader, len(writer.readers) - 1)].read(writer, most)

    @invariant()
    def every_byte_is_kept_or_counted_as_dropped(self) -> None:
        for writer in self.all:
            writer.check()

    @invariant()
    def what_is_used_is_what_all_cost(self) -> None:
        counted = [*self.all, *self.forgotten]  # of these what a waiting reader is still owed
        assert self.budget.used_bytes == sum(each.transcript.cost for each in counted)

    @invariant()
    def all_together_stay_within_the_budget(self) -> None:
        share = max(SMALL.tail_bytes_min, TOTAL // max(1, self.live))
        assert self.budget.tail_bytes == min(share, SMALL.tail_bytes_max)
        if not self.was_protected:
            assert self.budget.used_bytes <= max(TOTAL, self.live * SMALL.tail_bytes_min)

    @invariant()
    def the_oldest_finished_went_first(self) -> None:
        if not self.was_protected:
            states = [each.transcript.state == "evicted" for each in self.closing_order]
            had_output = [
                is_evicted
                for is_evicted, each in zip(states, self.closing_order, strict=True)
                if is_evicted or each.transcript.cost
            ]
            assert had_output == sorted(had_output, reverse=True)

    def teardown(self) -> None:
        for writer in self.all:
            for reader in writer.readers:
                reader.read(writer, 10**6)
                for stream in (0, 1):
                    assert (
                        reader.got_bytes[stream] + reader.missed_bytes[stream]
                        == writer.transcript.total_bytes[stream]
                    )
            for stream in (0, 1):
                whole = hashlib.sha256(writer.written[stream]).hexdigest()
                assert writer.transcript.sha256(stream) == whole


TestTranscripts = TranscriptsMachine.TestCase
TestTranscripts.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("live", [1, 2, 3, 5, 8, 20])
def test_live_tails_shrink_alike(live: int) -> None:
    budget = TailBudget(SMALL)
    transcripts = [make_transcript(budget) for _ in range(live)]
    for _ in range(3):
        for transcript in transcripts:
            fill(transcript, budget, SMALL.tail_bytes_max)
    share = min(SMALL.tail_bytes_max, max(SMALL.tail_bytes_min, TOTAL // live))
    assert budget.tail_bytes == share
    record = chunk_bytes(share) + RECORD_COST_BYTES
    for transcript in transcripts:
        assert share - record < transcript.cost <= share


@pytest.mark.parametrize("live", [1, 8, 129, 512, 1024])
def test_a_record_is_never_dropped_by_its_own_arrival(live: int) -> None:
    """However many are live, a reader that is quick sees what a fast writer writes."""
    budget = TailBudget(Bounds())
    transcripts = [make_transcript(budget) for _ in range(live)]
    for transcript in transcripts[:2]:
        for stream in (0, 1, 0, 1, 0, 0):
            transcript.append(stream, b"x" * chunk_bytes(budget.tail_bytes))
        assert len(kept_records(transcript)) >= 3


def test_a_full_tail_is_read_in_whole_chunks_while_few_are_live() -> None:
    assert chunk_bytes(Bounds().tail_bytes_max) == 64 * 1024


def test_finished_tails_go_before_any_live_one_shrinks() -> None:
    budget = TailBudget(SMALL)
    finished = [make_transcript(budget) for _ in range(2)]
    live = make_transcript(budget)
    for transcript in (live, *finished):
        fill(transcript, budget, SMALL.tail_bytes_max * 2)
    kept_live = live.cost
    for transcript in finished:
        transcript.mark_exited()
        transcript.mark_closed()
        budget.finish(transcript)
    kept: list[list[bool]] = []
    late = [make_transcript(budget) for _ in range(3)]
    for _ in range(4):
        for transcript in late:
            transcript.append(0, b"x" * RECORD_COST_BYTES)
            kept.append([each.cost > 0 for each in finished])
    in_order = [[True, True], [False, True], [False, False]]
    assert [each for each, _ in itertools.groupby(kept)] == in_order
    assert live.cost == kept_live


def test_a_finished_tail_that_somebody_is_waited_for_is_passed_over() -> None:
    budget = TailBudget(SMALL)
    waited_for, other, live = (make_transcript(budget) for _ in range(3))
    for transcript in (waited_for, other):
        transcript.append(0, b"x" * chunk_bytes(budget.tail_bytes))
        transcript.mark_exited()
        budget.finish(transcript)
    waited_for.protected_seq = 0
    for _ in range(15):
        fill(make_transcript(budget), budget, TOTAL)
    fill(live, budget, TOTAL)
    states = [waited_for.state, other.state]
    waited_for.protected_seq = None
    fill(live, budget, TOTAL)
    states.append(waited_for.state)
    assert states == ["kept", "evicted", "evicted"]


def test_the_states_in_words() -> None:
    budget = TailBudget(SMALL)
    transcript = make_transcript(budget)
    states = [transcript.state]
    transcript.append(0, b"a")
    states.append(transcript.state)
    fill(transcript, budget, SMALL.tail_bytes_max * 2)
    states.append(transcript.state)
    transcript.evict()
    states.append(transcript.state)
    assert states == ["kept", "kept", "partial", "evicted"]
    empty = make_transcript(budget)
    empty.evict()
    assert empty.state == "kept"  # all of nothing


def test_sequences_end_with_exited_and_closed() -> None:
    transcript = make_transcript()
    assert transcript.append(0, b"a") == 1
    with pytest.raises(AssertionError):
        transcript.mark_closed()
    assert transcript.mark_exited() == 2
    with pytest.raises(AssertionError):
        transcript.append(0, b"b")
    with pytest.raises(AssertionError):
        transcript.mark_exited()
    assert transcript.mark_closed() == 3
    with pytest.raises(AssertionError):
        transcript.mark_closed()
    assert (transcript.last_seq, transcript.last_output_seq) == (3, 1)


def test_a_long_life_keeps_its_numbers_and_no_trace_of_what_is_gone() -> None:
    """The list behind a transcript is compacted now and then; no reader may notice."""
    budget = TailBudget(SMALL)
    writer = Writer(budget)
    for at in range(1, 1001):
        writer.written[at % 2] += b"%d," % at
        writer.given.append(writer.transcript.append(at % 2, b"%d," % at))
        if at % 7 == 0:
            writer.check()
    assert writer.transcript.first_seq > 900
    assert len(writer.transcript._records) < 200


def test_an_empty_chunk_is_no_record() -> None:
    with pytest.raises(AssertionError):
        make_transcript().append(0, b"")


def test_no_hash_is_made_where_none_was_asked_for() -> None:
    transcript = make_transcript()
    transcript.append(0, b"a")
    assert transcript.sha256(0) is None


def test_what_all_records_up_to_one_cost_does_not_depend_on_what_is_kept() -> None:
    budget = TailBudget(Bounds())
    transcript: Transcript = make_transcript(budget)
    costs = [0]
    for size in (1, 10, 100, 1000):
        transcript.append(0, b"x" * size)
        costs.append(costs[-1] + size + RECORD_COST_BYTES)
    assert [transcript.cost_up_to(seq) for seq in range(6)] == [*costs, costs[-1]]
    transcript.trim(transcript.cost - costs[2])
    assert [transcript.cost_up_to(seq) for seq in range(2, 6)] == [*costs[2:], costs[-1]]
    assert transcript.cost_up_to(0) == costs[2]  # what is dropped weighs on nobody


def test_the_tail_begins_at_a_whole_record_and_holds_no_more_than_asked() -> None:
    transcript = make_transcript()
    assert transcript.tail(100) == (0, 0)
    for size in (10, 20, 30):
        transcript.append(0, b"x" * size)
    asked = {1: 3, 29: 3, 30: 2, 49: 2, 50: 1, 59: 1, 60: 0, 10**9: 0}
    assert {size: transcript.tail(size).after_seq for size in asked} == asked
    transcript.mark_exited()
    transcript.mark_closed()
    assert transcript.tail(30) == (2, 0)
    transcript.trim(0)
    assert transcript.tail(60) == (3, 0)  # nothing is kept, and nothing is missed
