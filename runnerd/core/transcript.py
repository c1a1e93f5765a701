"""The numbered records of one exec. No I/O.

Rule 1: one sequence from 1 over output chunks, then `exited`, then `closed`. A sequence is never
given twice and never skipped.
Rule 2: readers are cursors into the transcript, never queues of their own: fifty cost what one
does. A reader that asks for what is no longer kept is told what it missed.
Rule 3: bytes are counted so that total = kept + dropped holds to the byte, at every moment.

What is dropped is always the oldest. `protected_seq` holds back the dropping: nothing after it
goes, since a blocking subscriber has not taken it; whoever sets it stops the reading in time
(core/flow.py), so that it cannot make a transcript grow without end.

Memory holds the newest records, the spool (core/spool.py) an older run that overlaps with them or
ends where they begin: what is kept is one run up to the newest. While the spool is on, memory
lets go only of what is written; what is not is handed over in batches. A disk that fails or lags
costs what was on it and nothing else: from then on it is as if there had been no spool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from .blocks import BLOCK_BYTES, HEADER, Batch, Block, Piece, Record
from .bounds import RECORD_COST_BYTES
from .spool import BATCH_BYTES, Spool

if TYPE_CHECKING:
    from .budget import TailBudget

StreamName = Literal["stdout", "stderr"]
STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")

_DROPPED: Final = Record(0, 0, 0, b"", 0)
_PENDING_TAILS: Final = 16


class Tail(NamedTuple):
    """Where the newest part of a transcript begins.

    Attributes:
        after_seq: After this sequence,
        begins_at: and not before so many bytes of output, both streams together.
    """

    after_seq: int
    begins_at: int


class Transcript:
    """The records of one exec.

    Args:
        budget: The budget it belongs to.
        sha256: Whether to hash each stream.
        exec_id: Whose it is, for the log.

    Attributes:
        first_seq: The oldest record kept, in memory or on disk.
        mem_first_seq: The oldest one in memory.
        dropped_bytes: Where each stream's kept part begins: all dropped bytes lie before it.
        spool: What is on disk.
        moves_out: Whether memory is to keep nothing that the disk has: its exec is closed, and
            the memory is wanted for others.
        on_room: Called when the pipes may be readable again, or readers be told of a gap.
    """

    def __init__(self, budget: TailBudget, *, sha256: bool = False, exec_id: str = "") -> None:
        self.exec_id = exec_id
        self.spool = Spool(budget.slots)
        self.moves_out = False
        self.on_room: Callable[[], None] = lambda: None
        self._budget = budget
        self._records: list[Record] = []
        self._head = 0  # index of the oldest record in memory; the list is compacted now and then
        self.first_seq = self.mem_first_seq = 1
        self.last_seq = 0
        self.last_output_seq = 0
        self.exited_seq = 0
        self.closed_seq = 0
        self.total_bytes = [0, 0]
        self.dropped_bytes = [0, 0]
        self._mem_offsets = [0, 0]
        self.end_cost = 0
        self.start_cost = 0
        self.protected_seq: int | None = None
        self._hashes = [hashlib.sha256(), hashlib.sha256()] if sha256 else None

    @property
    def cost(self) -> int:
        """What is kept in memory costs this many bytes."""
        return self.end_cost - self.start_cost

    @property
    def state(self) -> Literal["kept", "partial", "evicted"]:
        """Whether all output is kept, some, or none because the space was needed."""
        if self.last_output_seq and self.first_seq > self.last_output_seq:
            return "evicted"
        return "partial" if self.first_seq > 1 else "kept"

    def append(self, stream: int, data: bytes) -> int:
        """Add one chunk and drop what no longer fits.

        Args:
            stream: 0 = stdout, 1 = stderr.
            data: Not empty.

        Returns:
            The record's sequence.
        """
        assert data
        assert not self.exited_seq, "output after exited"
        self.last_seq = self.last_output_seq = self.last_seq + 1
        cost = len(data) + RECORD_COST_BYTES
        self.end_cost += cost
        offset = self.total_bytes[stream]
        self._records.append(Record(self.last_seq, stream, offset, data, self.end_cost))
        self.total_bytes[stream] = offset + len(data)
        if self._hashes is not None:
            self._hashes[stream].update(data)
        self._budget.grew(self, cost)
        return self.last_seq

    def mark_exited(self) -> int:
        """Give `exited` its number: the highest but for `closed`."""
        assert not self.exited_seq
        self.last_seq += 1
        self.exited_seq = self.last_seq
        return self.last_seq

    def mark_closed(self) -> int:
        """Give `closed` its number: the highest."""
        assert self.exited_seq
        assert not self.closed_seq
        self.last_seq += 1
        self.closed_seq = self.last_seq
        return self.last_seq

    def record_after(self, seq: int) -> Record | None:
        """Return the oldest record in memory with a higher sequence, or None."""
        at = self._head + max(0, seq + 1 - self.mem_first_seq)
        return self._records[at] if at < len(self._records) else None

    def tail(self, size: int) -> Tail:
        """Return where the last `size` bytes of output begin, both streams together.

        Less than that where the record before them does not fit, or no more is kept.
        """
        begins_at = sum(self.total_bytes) - size
        if self.first_seq < self.mem_first_seq and begins_at < sum(self._mem_offsets):
            # Where its records begin is known once the block is read: the reader passes over some.
            block = next(each for each in self.spool.blocks if sum(each.end_offsets) > begins_at)
            return Tail(block.first_seq - 1, begins_at)
        before = self.last_output_seq
        for record in reversed(self._records[self._head :]):
            size -= len(record.data)
            if size < 0:
                break
            before = record.seq - 1
        return Tail(before, 0)

    def cost_up_to(self, seq: int) -> int:
        """Return what all records up to and with `seq` cost, in memory or not."""
        if seq < self.mem_first_seq:
            return self.start_cost
        at = self._head + seq - self.mem_first_seq
        return self._records[at].end_cost if at < len(self._records) else self.end_cost

    def first_offsets(self) -> tuple[int, int]:
        """Return where each stream's kept part begins: all dropped bytes lie before it."""
        return self.dropped_bytes[0], self.dropped_bytes[1]

    def sha256(self, stream: int) -> str | None:
        """Return the hex digest of a whole stream so far, where asked for."""
        return None if self._hashes is None else self._hashes[stream].hexdigest()

    def may_grow(self, taken_seq: int, cost: int, tail_bytes: int) -> bool:
        """Say whether a record can be taken without dropping anything after `taken_seq`.

        Args:
            taken_seq: What is up to here may be dropped.
            cost: What the record may cost.
            tail_bytes: What the tail may cost now.
        """
        spool = self.spool
        if spool.is_on:
            unwritten = self.end_cost - max(spool.end_cost, self.cost_up_to(taken_seq))
            most = tail_bytes if self._budget.is_over else pending_bytes(tail_bytes)
            fits = not unwritten or unwritten + cost <= most
            return fits and spool.has_room_after(taken_seq)
        on_disk = bool(spool.blocks) and spool.last_seq > taken_seq
        return not on_disk and self.fits_tail(taken_seq, cost, tail_bytes)

    @property
    def free_cost(self) -> int:
        """What is in memory and nobody is waited for costs this many bytes."""
        if self.protected_seq is None:
            return self.cost
        return self.cost_up_to(self.protected_seq) - self.start_cost

    def fits_tail(self, taken_seq: int, cost: int, tail_bytes: int) -> bool:
        """Say whether memory's tail can hold everything after `taken_seq` and a record more."""
        waiting = self.end_cost - self.cost_up_to(taken_seq)
        return not waiting or waiting + cost <= tail_bytes

    # ------------------------------------------------------------------ dropping

    def trim(self, cost_max: int) -> int:
        """Let go of the oldest records in memory until the rest costs at most `cost_max`.

        Returns:
            The cost freed. Less than asked where `protected_seq` forbids it, or where the rest
            is to be written first.
        """
        before = self.start_cost
        while self.cost > cost_max and self._head < len(self._records):
            record = self._records[self._head]
            if not self._may_let_go(record.seq):
                break
            self._mem_offsets[record.stream] = record.offset + len(record.data)
            self.start_cost = record.end_cost
            self.mem_first_seq = record.seq + 1
            self._records[self._head] = _DROPPED
            self._head += 1
        if self._head > 64 and self._head * 2 > len(self._records):
            del self._records[: self._head]
            self._head = 0
        self._reckon()
        return self.start_cost - before

    def _may_let_go(self, seq: int) -> bool:
        spool = self.spool
        written = seq <= spool.last_seq
        if written and spool.blocks and spool.blocks[0].first_seq <= seq:
            return True
        if self.protected_seq is not None and seq > self.protected_seq:
            return False
        if written:
            return True
        # Not written and not going to be: what is on disk before it would leave a hole.
        return not spool.is_on and (not spool.blocks or self.drop_blocks())

    def _reckon(self) -> None:
        blocks = self.spool.blocks
        if blocks and blocks[0].first_seq < self.mem_first_seq:
            self.first_seq = blocks[0].first_seq
            self.dropped_bytes[:] = blocks[0].start_offsets
        else:
            self.first_seq = self.mem_first_seq
            self.dropped_bytes[:] = self._mem_offsets

    def evict(self) -> int:
        """Let go of everything that nobody is waited for, for space; returns the cost freed.

        What is on disk stays there: memory is what is short. What was to get there and has not
        in time is lost.
        """
        freed = self.trim(0)
        spool = self.spool
        in_time = spool.batch is not None and not self.moves_out
        if self.cost and spool.is_on and not spool.blocks and not in_time:
            spool.cancel()
            spool.state, spool.reason = "off", "evicted before anything was written"
            freed += self.trim(0)
        return freed

    # ------------------------------------------------------------------ the spool

    @property
    def slot_count(self) -> int:
        """See Holder."""
        return self.spool.slot_count

    def _is_free(self, block: Block) -> bool:
        return self.protected_seq is None or block.last_seq <= self.protected_seq

    @property
    def is_finished(self) -> bool:
        """See Holder."""
        return self.closed_seq > 0

    def drop_oldest(self) -> bool:
        """See Holder."""
        blocks, is_free = self.spool.blocks, False
        while not is_free and blocks and self._is_free(blocks[0]):
            is_free = self.spool.drop_first()
        self._reckon()
        return is_free

    def drop_blocks(self) -> bool:
        """See Holder."""
        blocks = self.spool.blocks
        if not self.slot_count or (blocks and not self._is_free(blocks[-1])):
            return False
        self.spool.drop_all()
        self._reckon()
        return True

    def wants_writing(self, tail_bytes: int) -> bool:
        """Say whether there is enough for a batch, or the rest of what was begun."""
        spool = self.spool
        if not spool.is_on or spool.batch is not None:
            return False
        unwritten = self.end_cost - spool.end_cost
        return unwritten > tail_bytes // 2 or (
            unwritten > 0 and self.is_finished and (bool(spool.blocks) or self.moves_out)
        )

    def take_batch(self) -> Batch | None:
        """Hand over the oldest records that are not written, about BATCH_BYTES at most.

        Returns:
            None where there is no room, because what is there is waited for.
        """
        spool = self.spool
        batch = spool.begin_batch()
        piece = Piece(spool.blocks[-1]) if spool.blocks else None
        offsets, seq = spool.end_offsets, spool.last_seq
        while batch.size < BATCH_BYTES:
            record = self.record_after(seq)
            if record is None:
                break
            size = HEADER.size + len(record.data)
            extents = spool.reserve(self, batch.end, size)
            if extents is None:
                break
            if piece is None or piece.end + size > BLOCK_BYTES:
                piece = Piece(Block(batch.end, record.seq, offsets))
            if not piece.parts:
                batch.pieces.append(piece)
            piece.add(record)
            batch.place(extents)
            offsets, seq, batch.end_cost = piece.end_offsets, record.seq, record.end_cost
        if batch.pieces:
            return batch
        spool.cancel()
        if not spool.blocks:
            self.degrade("there is no room for it beside what others wait for", is_readable=True)
        return None

    def written(self, batch: Batch, crcs: list[int]) -> None:
        """A batch is on disk; one that was cancelled meanwhile changes nothing."""
        if self.spool.batch is batch:
            self.spool.written(batch, crcs)
            self._budget.settle(self)
            self.on_room()

    def degrade(self, reason: str, *, is_readable: bool) -> None:
        """Give the spool up for good.

        Args:
            reason: Why, as a clause.
            is_readable: Whether what is on disk can still be read: then what somebody is waited
                for stays until it was.
        """
        spool = self.spool
        if spool.is_on:
            spool.state, spool.reason = "degraded", reason
            spool.cancel()
            self._budget.on_degraded(self)
        if is_readable:
            self.drop_blocks()
        else:
            spool.drop_all()
        self._reckon()
        self._budget.settle(self)
        self.on_room()

    def lag(self, tail_bytes: int) -> None:
        """The disk is too slow for it: begin anew from what the tail may keep, or give it up."""
        spool = self.spool
        if spool.count_lag():
            self.degrade("the disk is too slow", is_readable=True)
            return
        spool.cancel()
        spool.state = "off"
        self._budget.used_bytes -= self.trim(tail_bytes)
        spool.state = "on"
        if not spool.blocks:
            spool.last_seq, spool.end_cost = self.mem_first_seq - 1, self.start_cost
            spool.end_offsets = (self._mem_offsets[0], self._mem_offsets[1])

    def forget(self) -> int:
        """Its exec is forgotten: let go of all but what somebody is waited for; again at any time.

        Returns:
            The cost freed.
        """
        self.spool.end()
        self.drop_blocks()
        freed = self.trim(0)
        if not self.slot_count:
            self.spool.remove(self)
        return freed


def pending_bytes(tail_bytes: int) -> int:
    """Return how much not yet written a waiting command may have; 4 MiB for a full tail."""
    return _PENDING_TAILS * tail_bytes
