"""Output beyond memory's tail is on disk: each byte is given once, in order, or said lost."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runnerd.core import blocks, spool, transcript
from runnerd.core.blocks import BLOCK_BYTES, HEADER, Batch, Block, BlockCache, Extent, Record
from runnerd.core.bounds import KIB, MIB, RECORD_COST_BYTES, Bounds
from runnerd.core.budget import TailBudget
from runnerd.core.flow import Gap, Gate, Subscription, Terminal, chunk_bytes
from runnerd.core.slots import SLOT_BYTES, SLOTS_MIN, Slots
from runnerd.core.spool import BATCH_BYTES, LAGS_MAX
from runnerd.core.transcript import Transcript

from .core_parts import NOW_S, SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runnerd.core.transcript import StreamName

SMALL_SLOT = 350  # any record lies in two at most
SMALL_BLOCK = 700


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few records, so that a test goes past each edge within a few hundred bytes."""
    monkeypatch.setattr(spool, "SLOT_BYTES", SMALL_SLOT)
    monkeypatch.setattr(transcript, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(transcript, "BATCH_BYTES", 2 * SMALL_BLOCK)


class FakeDisk:
    """The edge: what was handed over, in order, until it is told to do the oldest of it."""

    def __init__(self, budget: TailBudget, cache_bytes: int = 3 * SMALL_BLOCK) -> None:
        self.budget = budget
        self.cache = BlockCache(cache_bytes)
        self.file = bytearray()
        self.queue: list[
            tuple[Transcript, Batch] | tuple[Transcript, Block, list[Extent], int]
        ] = []
        self.reads = 0

    def hand_over(self) -> None:
        while self.budget.wanting:
            each = next(iter(self.budget.wanting))
            del self.budget.wanting[each]
            if each.wants_writing(self.budget.tail_bytes):
                batch = each.take_batch()
                if batch is not None:
                    self.queue.append((each, batch))

    def want(self, its: Transcript, block: Block) -> None:
        if not any(len(each) == 4 and each[1] is block for each in self.queue):
            extents = its.spool.extents(block.start, block.used_bytes)
            self.queue.append((its, block, extents, block.crc))

    def work(self, *, fails: bool = False) -> None:
        """Do the oldest piece of work; one that fails may have done half of it."""
        if not self.queue:
            return
        first = self.queue.pop(0)
        if len(first) == 2:
            its, batch = first
            crcs = []
            data = b""
            for piece in batch.pieces:
                written = b"".join(piece.parts)
                crcs.append(zlib.crc32(written, piece.crc))
                data += written
            for at, size in batch.extents:
                self.put(at, b"\xff" * size if fails else data[:size])
                data = data[size:]
            assert not data
            if not fails:
                its.written(batch, crcs)
            elif its.spool.batch is batch:
                its.degrade("cannot write", is_readable=True)
            return
        reader, block, extents, crc = first
        self.reads += 1
        if block.is_dropped:
            return
        if fails:
            reader.degrade("cannot read", is_readable=False)
            return
        data = b"".join(self.file[at : at + size] for at, size in extents)
        assert zlib.crc32(data) == crc
        self.cache.put(block, data)

    def put(self, at: int, data: bytes) -> None:
        self.file += bytes(max(0, at + len(data) - len(self.file)))
        self.file[at : at + len(data)] = data


class Reader:
    """What one subscriber was given; each byte is held against what was written."""

    def __init__(
        self, disk: FakeDisk, its: Transcript, streams: list[StreamName], after: int
    ) -> None:
        self.subscription = Subscription(1, its, streams=streams, after=after)
        self.disk = disk
        self.wanted = {{"stdout": 0, "stderr": 1}[each] for each in streams}
        self.ends: list[int | None] = [0, 0] if after == 0 else [None, None]
        self.seq = after
        self.got = [0, 0]
        self.lost = [0, 0]

    def read(self, written: list[bytearray], most: int) -> bool:
        """Take up to `most`; False where it waits for a block."""
        for _ in range(most):
            item = self.subscription.next_item()
            if isinstance(item, Block):
                self.disk.want(self.subscription.transcript, item)
                return False
            if item is None or isinstance(item, Terminal):
                return True
            if isinstance(item, Gap):
                self.take_gap(item)
            else:
                self.take(item, written)
        return True

    def take(self, record: Record, written: list[bytearray]) -> None:
        assert record.seq > self.seq
        assert record.stream in self.wanted
        assert self.ends[record.stream] in {None, record.offset}
        end = record.offset + len(record.data)
        assert record.data == written[record.stream][record.offset : end]
        self.seq, self.ends[record.stream] = record.seq, end
        self.got[record.stream] += len(record.data)

    def take_gap(self, gap: Gap) -> None:
        assert self.seq < gap.first_seq <= gap.last_seq
        self.seq = gap.last_seq
        for stream in self.wanted:
            lost, known = gap.lost_bytes[stream], self.ends[stream]
            if known is not None:
                assert lost == gap.next_offsets[stream] - known
            self.lost[stream] += lost or 0
            self.ends[stream] = gap.next_offsets[stream]


class Writer:
    """A transcript beside the plain truth about it."""

    def __init__(self, budget: TailBudget) -> None:
        self.its = Transcript(budget)
        budget.add(self.its)
        self.written = [bytearray(), bytearray()]
        self.ends: list[tuple[int, int]] = [(0, 0)]  # of the streams, after each sequence
        self.gate = Gate("drop", 30.0, NOW_S)
        self.readers: list[Reader] = []
        self.is_blocking = False
        self.is_finished = False

    def write(self, stream: int, size: int) -> None:
        data = bytes((len(self.written[stream]) * 7 + at) % 251 for at in range(size))
        self.written[stream] += data
        self.its.append(stream, data)
        self.ends.append((len(self.written[0]), len(self.written[1])))

    def check(self) -> None:
        its, kept = self.its, self.its.spool
        first = its.first_seq
        assert tuple(its.dropped_bytes) == self.ends[first - 1]
        assert its.first_seq <= its.mem_first_seq
        seq = kept.blocks[0].first_seq if kept.blocks else its.mem_first_seq
        assert its.first_seq == min(seq, its.mem_first_seq)
        for block in kept.blocks:
            assert block.first_seq == seq
            assert block.start_offsets == self.ends[seq - 1]
            assert block.end_offsets == self.ends[block.last_seq]
            assert 0 < block.used_bytes <= SMALL_BLOCK
            seq = block.last_seq + 1
        if kept.blocks:
            assert seq == kept.last_seq + 1 >= its.mem_first_seq
        if self.is_blocking and self.gate.flow == "block":
            assert first <= self.gate.position + 1


class SpoolMachine(RuleBasedStateMachine):
    """Execs write, a disk works late and fails, readers come and go under small budgets."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(20, 10)
        self.budget = TailBudget(SMALL, self.slots)
        self.disk = FakeDisk(self.budget)
        self.all: list[Writer] = []
        self.forgotten: list[Writer] = []

    @initialize()
    def begin(self) -> None:
        self.add()

    def pick(self, at: int) -> Writer:
        return self.all[at % len(self.all)]

    @precondition(lambda self: len(self.all) < 4)
    @rule()
    def add(self) -> None:
        self.all.append(Writer(self.budget))

    @rule(
        at=st.integers(0, 3),
        stream=st.sampled_from([0, 1]),
        size=st.integers(1, chunk_bytes(SMALL.tail_bytes_max)),
        times=st.integers(1, 15),
    )
    def write(self, at: int, stream: int, size: int, times: int) -> None:
        writer = self.pick(at)
        for _ in range(times):
            if writer.its.exited_seq:
                return
            tail = self.budget.tail_bytes
            if writer.is_blocking and not writer.gate.may_read(writer.its, tail):
                return
            writer.write(stream, min(size, chunk_bytes(tail)))
            self.disk.hand_over()

    @rule(times=st.integers(1, 6))
    def disk_works(self, times: int) -> None:
        for _ in range(times):
            self.disk.work()
            self.disk.hand_over()

    @rule()
    def disk_fails(self) -> None:
        if self.disk.queue and len(self.disk.queue[0]) == 4:
            for writer in [*self.all, *self.forgotten]:
                writer.is_blocking = writer.is_blocking and writer.its is not self.disk.queue[0][0]
        self.disk.work(fails=True)
        self.disk.hand_over()

    @rule(
        at=st.integers(0, 3),
        streams=st.sampled_from([["stdout", "stderr"], ["stdout"], ["stderr"]]),
        after=st.integers(0, 30),
    )
    def attach(self, at: int, streams: list[StreamName], after: int) -> None:
        writer = self.pick(at)
        after = min(after, writer.its.last_output_seq)
        writer.readers.append(Reader(self.disk, writer.its, streams, after))

    @rule(at=st.integers(0, 3))
    def block(self, at: int) -> None:
        writer = self.pick(at)
        if not writer.its.last_seq and not writer.is_blocking:
            reader = Reader(self.disk, writer.its, ["stdout", "stderr"], 0)
            writer.gate = Gate("block", 30.0, NOW_S)
            writer.gate.taken_by(reader.subscription)
            writer.readers.append(reader)
            writer.is_blocking = True

    @rule(at=st.integers(0, 3))
    def lose_patience(self, at: int) -> None:
        self.pick(at).gate.spills = True

    @rule(at=st.integers(0, 3), reader=st.integers(0, 5), most=st.integers(1, 12))
    def read(self, at: int, reader: int, most: int) -> None:
        writer = self.pick(at)
        if writer.readers:
            writer.readers[reader % len(writer.readers)].read(writer.written, most)
            writer.gate.may_read(writer.its, self.budget.tail_bytes)
            self.budget.read_on(writer.its)
            self.disk.hand_over()

    @precondition(lambda self: self.forgotten)
    @rule(at=st.integers(0, 3), most=st.integers(1, 12))
    def read_what_is_owed(self, at: int, most: int) -> None:
        writer = self.forgotten[at % len(self.forgotten)]
        for reader in writer.readers:
            reader.read(writer.written, most)
        writer.gate.may_read(writer.its, self.budget.tail_bytes)
        self.budget.read_on(writer.its)

    @rule(at=st.integers(0, 3))
    def finish(self, at: int) -> None:
        writer = self.pick(at)
        if not writer.its.exited_seq:
            writer.its.mark_exited()
            writer.its.mark_closed()
            self.budget.finish(writer.its)
            writer.is_finished = True
            self.disk.hand_over()

    @precondition(lambda self: len(self.all) > 1)
    @rule(at=st.integers(0, 3))
    def forget(self, at: int) -> None:
        writer = self.pick(at)
        if writer.is_finished:
            self.all.remove(writer)
            self.budget.remove(writer.its)
            self.forgotten.append(writer)
            if writer.its.protected_seq is None:
                assert (writer.its.cost, writer.its.slot_count) == (0, 0)
                for reader in writer.readers:
                    assert reader.read(writer.written, 10**6)  # nothing of it is on disk any more

    @invariant()
    def the_books_are_right(self) -> None:
        counted = [*self.all, *self.forgotten]  # of these what a waiting reader is still owed
        for writer in counted:
            writer.check()
        assert self.budget.used_bytes == sum(each.its.cost for each in counted)
        assert self.disk.cache.used_bytes <= 3 * SMALL_BLOCK
        taken = [
            range(at, at + size)
            for each in counted
            for block in each.its.spool.blocks
            for at, size in each.its.spool.extents(block.start, block.used_bytes)
        ]
        taken.sort(key=lambda each: each.start)
        assert all(one.stop <= next_.start for one, next_ in itertools.pairwise(taken))
        assert self.slots.used == sum(each.its.slot_count for each in counted)

    def teardown(self) -> None:
        """Everybody reads to the end, and what they have and miss is everything."""
        for writer in [*self.all, *self.forgotten]:
            for reader in writer.readers:
                for _ in range(2000):
                    if reader.read(writer.written, 10**6):
                        break
                    while self.disk.queue:
                        self.disk.work()
                assert reader.seq <= writer.its.last_output_seq
                for stream in reader.wanted:
                    assert reader.ends[stream] in {None, len(writer.written[stream])}
                    if reader.ends[stream] == reader.got[stream] + reader.lost[stream]:
                        continue
                    assert reader.subscription.cursor_seq >= 1  # began later, told so
        for writer in self.forgotten:
            writer.gate.may_read(writer.its, self.budget.tail_bytes)
            self.budget.read_on(writer.its)
            assert (writer.its.cost, writer.its.slot_count) == (0, 0)
        assert not {each.its for each in self.forgotten} & set(self.slots.holders())


TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(max_examples=150, stateful_step_count=50)


ROOMY = msgspec.structs.replace(SMALL, transcript_total_bytes_max=96 * RECORD_COST_BYTES)


def make(slots: Slots | None = None, bounds: Bounds = SMALL) -> tuple[Writer, FakeDisk]:
    budget = TailBudget(bounds, slots or Slots(40, 40))
    return Writer(budget), FakeDisk(budget)


def spool_all(writer: Writer, disk: FakeDisk, records: int, size: int = 100) -> None:
    for at in range(records):
        writer.write(at % 2, size)
        disk.hand_over()
        while disk.queue:
            disk.work()
            disk.hand_over()


def read_to_end(reader: Reader, writer: Writer, disk: FakeDisk) -> None:
    while not reader.read(writer.written, 10**6):
        while disk.queue:
            disk.work()


def test_short_output_never_gets_to_the_disk() -> None:
    writer, disk = make()
    writer.write(0, 100)
    disk.hand_over()
    assert not disk.queue
    assert writer.its.slot_count == 0


def test_what_memory_lets_go_of_is_read_from_disk() -> None:
    writer, disk = make()
    spool_all(writer, disk, 40)
    assert writer.its.state == "kept"
    assert writer.its.mem_first_seq > 20
    reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
    read_to_end(reader, writer, disk)
    assert (reader.got, reader.lost) == ([2000, 2000], [0, 0])


def test_fifty_readers_read_each_block_once() -> None:
    writer, disk = make()
    spool_all(writer, disk, 60)
    readers = [Reader(disk, writer.its, ["stdout", "stderr"], 0) for _ in range(50)]
    while waiting := [each for each in readers if not each.read(writer.written, 1)]:
        if len(waiting) == len(readers):
            while disk.queue:
                disk.work()
        if all(each.seq == writer.its.last_seq for each in readers):
            break
    for _ in range(100):
        for reader in readers:
            reader.read(writer.written, 1)
        while disk.queue:
            disk.work()
    assert {tuple(each.got) for each in readers} == {(3000, 3000)}
    assert disk.reads <= len(writer.its.spool.blocks) + 1
    assert disk.cache.used_bytes <= 3 * SMALL_BLOCK


def test_a_full_spool_goes_round_and_the_oldest_is_lost() -> None:
    writer, disk = make(Slots(8, 8))
    spool_all(writer, disk, 100)
    assert writer.its.slot_count <= 8
    assert 1 < writer.its.first_seq < writer.its.mem_first_seq
    reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
    read_to_end(reader, writer, disk)
    assert [sum(pair) for pair in zip(reader.got, reader.lost, strict=True)] == [5000, 5000]
    assert reader.lost == writer.its.dropped_bytes


def test_finished_spools_go_before_live_ones_the_oldest_first() -> None:
    budget = TailBudget(ROOMY, Slots(16, 8))
    disk = FakeDisk(budget)
    writers = [Writer(budget) for _ in range(3)]
    for writer in writers[:2]:
        spool_all(writer, disk, 24)
        writer.its.mark_exited()
        writer.its.mark_closed()
        budget.finish(writer.its)
        disk.hand_over()
        while disk.queue:
            disk.work()
    had = [bool(each.its.spool.blocks) for each in writers[:2]]
    spool_all(writers[2], disk, 8)
    assert had == [True, True]
    assert [bool(each.its.spool.blocks) for each in writers] == [False, True, True]
    assert writers[0].its.state == "partial"  # its memory's tail is still there


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_degraded_transcript_is_its_tail_and_says_so(is_readable: bool) -> None:
    writer, disk = make()
    spool_all(writer, disk, 40)
    told: list[Transcript] = []
    disk.budget.on_degraded = told.append
    writer.its.degrade("it broke", is_readable=is_readable)
    assert (writer.its.spool.state, writer.its.spool.reason) == ("degraded", "it broke")
    assert told == [writer.its]
    assert writer.its.first_seq == writer.its.mem_first_seq > 1
    assert writer.its.slot_count == 0
    spool_all(writer, disk, 40)
    assert writer.its.cost <= disk.budget.tail_bytes
    reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
    read_to_end(reader, writer, disk)
    assert [sum(pair) for pair in zip(reader.got, reader.lost, strict=True)] == [4000, 4000]


def test_a_disk_that_lags_costs_what_is_on_it_and_at_last_the_spool() -> None:
    """Nobody waits for it: memory stays within its bound while nothing is ever written."""
    writer, disk = make()
    for _ in range(1000):
        writer.write(0, 100)
        disk.hand_over()  # and it never works
        assert writer.its.cost <= SMALL.transcript_total_bytes_max // 2 + 100 + RECORD_COST_BYTES
    assert (writer.its.spool.state, writer.its.spool.lags) == ("degraded", LAGS_MAX)
    while disk.queue:
        disk.work()  # what comes back late changes nothing
    writer.check()
    assert writer.its.slot_count == 0


def test_a_disk_that_keeps_up_on_the_whole_is_never_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "LAG_FORGIVEN_BYTES", 2000)
    writer, disk = make()
    for _ in range(3 * LAGS_MAX):
        spool_all(writer, disk, 30)
        writer.its.lag(disk.budget.tail_bytes)
        assert (writer.its.spool.state, writer.its.spool.lags) == ("on", 1)
    for _ in range(LAGS_MAX - 1):
        writer.its.lag(disk.budget.tail_bytes)
    assert writer.its.spool.state == "degraded"


def test_a_blocking_reader_that_keeps_up_is_never_held_for_a_disk_that_does_not() -> None:
    """What a lag costs is a later replay's beginning, for those who read it already."""
    writer, disk = make()
    reader = block_gate(writer, disk)
    for _ in range(300):
        assert writer.gate.may_read(writer.its, disk.budget.tail_bytes)
        writer.write(0, 100)
        disk.hand_over()  # and it never works
        assert reader.read(writer.written, 10**6)
    assert writer.its.spool.lags > 0
    assert writer.its.first_seq > 1
    assert (reader.got[0], reader.lost) == (len(writer.written[0]), [0, 0])


def test_after_a_lag_what_is_left_is_written_at_once() -> None:
    writer, disk = make()
    while not writer.its.spool.lags:
        disk.hand_over()  # and it never works
        writer.write(0, 100)
    assert writer.its in disk.budget.wanting


def test_commands_that_wait_for_lost_readers_wait_for_the_disk_and_do_not_lose_it() -> None:
    """Together they are over the total: nothing of theirs could be let go, so it is no lag."""
    budget = TailBudget(SMALL, Slots(120, 40))
    disk = FakeDisk(budget)
    writers = [Writer(budget) for _ in range(3)]
    for writer in writers:
        writer.gate.lost(block_gate(writer, disk).subscription, NOW_S)

    def write_round() -> bool:
        size = chunk_bytes(budget.tail_bytes)
        for writer in writers:
            writer.gate.spills = True
        open_now = [each for each in writers if each.gate.may_read(each.its, budget.tail_bytes)]
        for writer in open_now:
            writer.write(0, size)
            disk.hand_over()
        return bool(open_now)

    while write_round():
        pass  # the disk does not work
    record = chunk_bytes(budget.tail_bytes) + RECORD_COST_BYTES
    assert 0 < budget.used_bytes - SMALL.transcript_total_bytes_max <= len(writers) * record
    stood = [each.its.last_seq for each in writers]
    for _ in range(100):
        disk.work()
        disk.hand_over()
        write_round()
    assert [each.its.spool.lags for each in writers] == [0, 0, 0]
    assert [each.its.spool.state for each in writers] == ["on", "on", "on"]
    for writer, before in zip(writers, stood, strict=True):
        assert writer.its.last_seq > 2 * before
        assert writer.its.first_seq == 1


def close(writer: Writer, disk: FakeDisk) -> None:
    writer.its.mark_exited()
    writer.its.mark_closed()
    disk.budget.finish(writer.its)
    disk.hand_over()


def test_finished_tails_go_to_the_disk_before_their_memory_is_needed() -> None:
    _, disk = make(bounds=ROOMY)
    writers = [Writer(disk.budget) for _ in range(40)]
    for writer in writers:
        writer.write(0, 100)
        writer.write(1, 200)
        close(writer, disk)
        while disk.queue:
            disk.work()
        assert disk.budget.used_bytes <= ROOMY.transcript_total_bytes_max * 3 // 4
    moved = [each.its.cost == 0 for each in writers]
    assert moved == sorted(moved, reverse=True)  # the oldest
    assert {True, False} == set(moved)
    for writer in writers:
        assert writer.its.state == "kept"
        reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
        read_to_end(reader, writer, disk)
        assert (reader.got, reader.lost) == ([100, 200], [0, 0])


def test_a_disk_that_is_not_done_in_time_holds_no_memory_of_finished_ones() -> None:
    _, disk = make(bounds=ROOMY)
    writers = [Writer(disk.budget) for _ in range(80)]
    for writer in writers:
        writer.write(0, 300)
        close(writer, disk)  # and it never works
        assert disk.budget.used_bytes <= ROOMY.transcript_total_bytes_max
    states = [each.its.state for each in writers]
    assert states == ["evicted"] * states.count("evicted") + ["kept"] * states.count("kept")
    while disk.queue:
        disk.work()
    for writer in writers:
        writer.check()
    assert disk.budget.slots is not None
    assert disk.budget.slots.used == sum(each.its.slot_count for each in writers)


def test_without_a_disk_finished_tails_stay_until_the_memory_is_full() -> None:
    budget = TailBudget(ROOMY)
    writers = [Writer(budget) for _ in range(40)]
    for writer in writers:
        writer.write(0, 300)
        writer.its.mark_exited()
        writer.its.mark_closed()
        budget.finish(writer.its)
    kept = sum(each.its.state == "kept" for each in writers)
    assert kept == ROOMY.transcript_total_bytes_max // (300 + RECORD_COST_BYTES)


@pytest.mark.parametrize("sizes", [[65536], [4096], [65536, 1000, 4096, 33333]])
def test_64_million_bytes_fit_64_mib_of_disk_whole(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real slots and blocks
    bounds = Bounds()
    slots = Slots(bounds.spool_total_bytes_max // SLOT_BYTES, bounds.spool_bytes_max // SLOT_BYTES)
    writer, disk = make(slots, bounds)
    written = 0
    for wanted in itertools.cycle(sizes):
        size = min(wanted, 64 * 10**6 - written)
        if not size:
            break
        writer.its.append(written & 1, bytes(size))
        written += size
        disk.hand_over()
        while disk.queue:
            its, batch = disk.queue.pop()[:2]
            assert isinstance(batch, Batch)
            its.written(batch, [0] * len(batch.pieces))
            disk.hand_over()
    assert writer.its.first_seq == 1
    assert writer.its.slot_count == slots.used <= slots.share
    assert sum(writer.its.total_bytes) == 64 * 10**6


def test_a_batch_that_was_cancelled_changes_nothing_when_it_is_written() -> None:
    writer, disk = make()
    for _ in range(6):
        writer.write(0, 100)
    disk.hand_over()
    assert disk.queue
    writer.its.lag(disk.budget.tail_bytes)
    assert disk.budget.slots is not None
    assert disk.budget.slots.used == 0
    disk.work()
    assert not writer.its.spool.blocks
    writer.check()


def test_a_block_read_before_a_record_was_added_to_it_is_read_again() -> None:
    writer, disk = make()
    spool_all(writer, disk, 12)
    reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
    read_to_end(reader, writer, disk)
    spool_all(writer, disk, 30)
    read_to_end(reader, writer, disk)
    assert reader.got == [2100, 2100]


def block_gate(writer: Writer, disk: FakeDisk) -> Reader:
    reader = Reader(disk, writer.its, ["stdout", "stderr"], 0)
    writer.gate = Gate("block", 30.0, NOW_S)
    writer.gate.taken_by(reader.subscription)
    return reader


def write_while_open(writer: Writer, disk: FakeDisk) -> None:
    tail = disk.budget.tail_bytes
    while writer.gate.may_read(writer.its, tail):
        writer.write(0, chunk_bytes(tail))
        disk.hand_over()
        while disk.queue:
            disk.work()
            disk.hand_over()


def test_a_blocking_reader_that_takes_nothing_holds_the_command_once_the_spool_is_full() -> None:
    writer, disk = make(Slots(16, 16))
    reader = block_gate(writer, disk)
    write_while_open(writer, disk)
    in_memory = writer.its.last_seq
    assert writer.its.cost <= disk.budget.tail_bytes  # a pipe's pace, as long as it may be quick
    writer.gate.spills = True
    write_while_open(writer, disk)
    assert writer.its.last_seq > 2 * in_memory
    assert writer.its.first_seq == 1
    read_to_end(reader, writer, disk)
    assert (reader.got[0], reader.lost) == (len(writer.written[0]), [0, 0])
    assert writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    assert not writer.gate.spills


def test_what_a_reader_is_waited_for_stays_on_disk_when_its_exec_is_forgotten() -> None:
    slots = Slots(16, 16)
    writer, disk = make(slots)
    reader = block_gate(writer, disk)
    writer.gate.spills = True
    write_while_open(writer, disk)
    close(writer, disk)
    disk.budget.remove(writer.its)
    assert slots.used == writer.its.slot_count > 0
    read_to_end(reader, writer, disk)
    assert (reader.got[0], reader.lost) == (len(writer.written[0]), [0, 0])
    writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    disk.budget.read_on(writer.its)
    assert (slots.used, slots.holders(), disk.budget.used_bytes) == (0, [], 0)


def test_what_is_owed_of_a_forgotten_exec_goes_once_nobody_is_waited_for() -> None:
    """Or once the disk cannot be read: then the memory's part alone is owed."""
    slots = Slots(16, 16)
    writer, disk = make(slots)
    block_gate(writer, disk)
    writer.gate.spills = True
    write_while_open(writer, disk)
    writer.write(0, 100)  # and this is not written any more
    close(writer, disk)
    disk.budget.remove(writer.its)
    assert slots.holders() == [writer.its]  # who is told that the disk hangs
    writer.its.degrade("cannot read", is_readable=False)
    disk.budget.read_on(writer.its)
    assert (slots.used, slots.holders()) == (0, [])
    assert disk.budget.used_bytes == writer.its.cost > 0
    writer.gate.open_for_good()
    writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    disk.budget.read_on(writer.its)
    assert disk.budget.used_bytes == 0


def test_a_write_that_fails_drops_nothing_a_blocking_reader_has_not_been_sent() -> None:
    writer, disk = make(Slots(8, 8))
    reader = block_gate(writer, disk)
    writer.gate.spills = True
    for _ in range(12):
        writer.write(0, 100)
        disk.hand_over()
        disk.work()
    writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    writer.its.degrade("cannot write", is_readable=True)
    assert writer.its.first_seq == 1
    assert not writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    read_to_end(reader, writer, disk)
    assert (reader.got[0], reader.lost) == (1200, [0, 0])
    assert writer.gate.may_read(writer.its, disk.budget.tail_bytes)
    for _ in range(20):
        writer.gate.may_read(writer.its, disk.budget.tail_bytes)
        writer.write(0, 100)
        read_to_end(reader, writer, disk)
    assert writer.its.slot_count == 0  # let go of once nobody is waited for


def test_what_was_written_and_dropped_since_is_as_protected_as_anything() -> None:
    """A reader that comes back may stand before what the disk has lost and memory still has."""
    writer, disk = make()
    spool_all(writer, disk, 40)
    assert writer.its.drop_blocks()
    first = writer.its.mem_first_seq
    assert first <= writer.its.spool.last_seq
    writer.its.protected_seq = first - 1
    assert writer.its.trim(0) == 0
    assert writer.its.first_seq == first
    writer.its.protected_seq = first
    assert writer.its.trim(0) > 0
    assert writer.its.first_seq == first + 1


def test_a_shut_window_has_nothing_read_from_disk() -> None:
    writer, disk = make()
    spool_all(writer, disk, 40)
    subscription = Subscription(1, writer.its, streams=["stdout", "stderr"], window_bytes=150)
    block = subscription.next_item()
    assert isinstance(block, Block)
    disk.want(writer.its, block)
    disk.work()
    assert isinstance(subscription.next_item(), Record)
    assert subscription.next_item() is None
    disk.cache.drop(block)
    assert subscription.next_item() is None
    subscription.ack(1)
    assert subscription.next_item() is block


def test_a_cursor_within_a_block_knows_its_offsets_once_that_is_read() -> None:
    writer, disk = make(Slots(8, 8))
    spool_all(writer, disk, 30)
    first = writer.its.spool.blocks[0].first_seq
    reader = Reader(disk, writer.its, ["stdout"], first + 1)
    reader.read(writer.written, 1)
    disk.work()
    reader.read(writer.written, 1)
    at = reader.ends[0]
    assert at is not None
    spool_all(writer, disk, 60)
    read_to_end(reader, writer, disk)
    assert reader.lost[0] > 0
    assert at + reader.lost[0] + reader.got[0] - 100 == len(writer.written[0])


def test_a_slot_holds_a_record_and_a_block_four_whole_chunks() -> None:
    assert 64 * KIB + HEADER.size <= SLOT_BYTES
    assert 4 * (64 * KIB + HEADER.size) <= BLOCK_BYTES
    assert SLOT_BYTES % 4096 == 0
    assert SLOTS_MIN * SLOT_BYTES >= MIB
    assert blocks.CACHE_BYTES == 2 * MIB
    assert BATCH_BYTES == 4 * MIB


def blocks_of(writers: list[Writer]) -> Iterator[int]:
    for writer in writers:
        yield writer.its.slot_count


def test_live_spools_shrink_alike() -> None:
    budget = TailBudget(SMALL, Slots(12, 8))
    disk = FakeDisk(budget)
    writers = [Writer(budget) for _ in range(3)]
    for _ in range(3):
        for writer in writers:
            spool_all(writer, disk, 40)
    assert max(blocks_of(writers)) <= 4


def test_a_tail_reaches_what_is_on_disk() -> None:
    """Of every length: the newest whole records that fit, wherever they lie."""
    budget = TailBudget(SMALL, Slots(10, 5))
    disk, writer = FakeDisk(budget), Writer(budget)
    sizes = [40 + 13 * (at % 7) for at in range(60)]
    for at, size in enumerate(sizes):
        writer.write(at % 3 % 2, size)
        disk.hand_over()
        while disk.queue:
            disk.work()
    kept = len(sizes) - writer.its.first_seq + 1
    assert writer.its.mem_first_seq - writer.its.first_seq > 10
    total = sum(sizes[-kept:])
    for asked in range(0, total + 200, 7):
        suffixes = (sum(sizes[len(sizes) - count :]) for count in range(kept + 1))
        after_seq, begins_at = writer.its.tail(asked)
        reader = Reader(disk, writer.its, ["stdout", "stderr"], after_seq)
        reader.subscription = Subscription(
            1, writer.its, streams=["stdout", "stderr"], after=after_seq, begins_at=begins_at
        )
        reader.ends = [None, None]
        while not reader.read(writer.written, 1000):
            while disk.queue:
                disk.work()
        assert sum(reader.got) == max(each for each in suffixes if each <= asked), asked
        assert reader.lost == [0, 0]


def test_a_live_exec_that_writes_no_more_gives_others_what_is_beyond_its_share() -> None:
    budget = TailBudget(ROOMY, Slots(12, 12))
    disk = FakeDisk(budget)
    first, second = Writer(budget), Writer(budget)
    spool_all(first, disk, 100)
    assert first.its.slot_count >= 11
    spool_all(second, disk, 100)
    assert second.its.spool.state == "on"
    assert second.its.slot_count >= 5
    assert 5 <= first.its.slot_count <= 7
    first.check()
    second.check()
