"""The part of one transcript that is on disk: its blocks, and the slots they lie in. No I/O.

The blocks follow one another without a hole, so that what is kept is always the newest part of
the sequence. Their bytes fill the transcript's slots in turn, and records and blocks cross from
one slot into the next: of what a transcript may have on disk nothing is wasted but the headers.
A slot is let go as soon as no block reaches into it.

The index of the blocks is in memory, about 400 bytes for 256 KiB; the file is unlinked and
nothing of it is ever read by another daemon.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import Final

from runnerd.protocol.answers import SpoolState

from .blocks import Batch, Block, Extent, add_extent
from .bounds import MIB
from .slots import SLOT_BYTES, Holder, Slots

BATCH_BYTES: Final = 4 * MIB  # handed over at once, about, where the disk lags
LAGS_MAX: Final = 8
LAG_FORGIVEN_BYTES: Final = 64 * MIB  # written since the last lag: the disk keeps up on the whole
_SLOTS_AHEAD: Final = 4  # kept free of what a reader is waited for, or the disk would wait too

_start = attrgetter("start")
_last_seq = attrgetter("last_seq")


class Spool:
    """The part of one transcript that is on disk.

    Attributes:
        state: off = there is no spool; on; degraded = there was, and it is given up.
        reason: Why it is off or degraded.
        blocks: Oldest first, without a hole between them.
        last_seq: Every record up to here was written, or was dropped.
        end_cost: What all those cost in memory.
        end_offsets: Where each stream stands after them.
        batch: What is being written.
        lags: How often in a row the disk was too slow; a row ends with LAG_FORGIVEN_BYTES.
    """

    def __init__(self, slots: Slots | None) -> None:
        self.state: SpoolState = "off" if slots is None else "on"
        self.reason: str | None = None
        self.blocks: list[Block] = []
        self.last_seq = 0
        self.end_cost = 0
        self.end_offsets = (0, 0)
        self.batch: Batch | None = None
        self.lags = 0
        self._slots = slots
        self._held: list[int] = []  # its slots, in the order in which they are filled
        self._begin = 0  # where the first of them begins among all it ever had on disk
        self._end = 0  # where what is written ends
        self._since_lag_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether records are written to it."""
        return self.state == "on"

    @property
    def slot_count(self) -> int:
        """How many slots it has, those on their way included."""
        return len(self._held)

    # ------------------------------------------------------------------ writing

    def begin_batch(self) -> Batch:
        """Begin one, after what is written."""
        assert self.batch is None
        self.batch = Batch(self._end)
        return self.batch

    def reserve(self, holder: Holder, start: int, size: int) -> list[Extent] | None:
        """Return where the next bytes go; None if there is no room and none can be made."""
        assert self._slots is not None
        while self._begin + len(self._held) * SLOT_BYTES < start + size:
            slot = self._slots.take(holder)  # this may let go of the oldest
            if slot is None:
                return None
            self._held.append(slot)
        return self.extents(start, size)

    def extents(self, start: int, size: int) -> list[Extent]:
        """Return where in the file some of its bytes are; its slots reach that far."""
        found: list[Extent] = []
        end = start + size
        while start < end:
            index, within = divmod(start - self._begin, SLOT_BYTES)
            assert index >= 0
            step = min(SLOT_BYTES - within, end - start)
            add_extent(found, self._held[index] * SLOT_BYTES + within, step)
            start += step
        return found

    def written(self, batch: Batch, crcs: list[int]) -> None:
        """A batch is on disk."""
        for piece, crc in zip(batch.pieces, crcs, strict=True):
            block = piece.block
            block.last_seq, block.end_offsets = piece.last_seq, piece.end_offsets
            block.used_bytes, block.crc = piece.end, crc
            if not piece.at:
                self.blocks.append(block)
        self._since_lag_bytes += batch.size
        last = batch.pieces[-1]
        self.last_seq, self.end_offsets = last.last_seq, last.end_offsets
        self.end_cost = batch.end_cost
        self._end = batch.end
        self.batch = None
        self._let_go()

    def count_lag(self) -> bool:
        """The disk was too slow again; says whether it is so too often."""
        if self._since_lag_bytes >= LAG_FORGIVEN_BYTES:
            self.lags = 0
        self._since_lag_bytes = 0
        self.lags += 1
        return self.lags >= LAGS_MAX

    # ------------------------------------------------------------------ dropping

    def drop_first(self) -> bool:
        """Let go of the oldest block; says whether that made a slot free, to be used at once."""
        self.blocks.pop(0).is_dropped = True
        return self._let_go()

    def _let_go(self) -> bool:
        """Give back the slots before the oldest block, but the one that is being filled."""
        blocks = self.blocks or self._new_blocks()
        keep_from = blocks[0].start if blocks else self._end
        count = (keep_from - self._begin) // SLOT_BYTES
        self._begin += count * SLOT_BYTES
        self._give_back(self._held[:count], bulk=False)
        del self._held[:count]
        return count > 0

    def drop_all(self) -> None:
        """Let go of all blocks, and of what is on its way: that is not written yet, then."""
        for block in self.blocks:
            block.is_dropped = True
        self.blocks = []
        self.cancel()

    def cancel(self) -> None:
        """Forget what is on its way."""
        for block in self._new_blocks():
            block.is_dropped = True
        self.batch = None
        if self.blocks:
            count = -((self._begin - self._end) // SLOT_BYTES)  # rounded up
        else:
            count = self._begin = self._end = 0
        self._give_back(self._held[count:], bulk=True)
        del self._held[count:]

    def _new_blocks(self) -> list[Block]:
        return [] if self.batch is None else self.batch.new_blocks()

    def _give_back(self, slots: list[int], *, bulk: bool) -> None:
        if self._slots is not None:
            self._slots.give_back(slots, bulk=bulk)

    def finish(self, holder: Holder) -> None:
        """Its exec is closed."""
        if self._slots is not None:
            self._slots.finish(holder)

    def end(self) -> None:
        """Its exec is forgotten: nothing more is written."""
        self.state = "off" if self._slots is None else "degraded"
        self.cancel()

    def remove(self, holder: Holder) -> None:
        """It has no slots any more and wants none."""
        if self._slots is not None:
            self._slots.remove(holder)

    # ------------------------------------------------------------------ finding

    def block_with(self, seq: int) -> Block:
        """Return the block that holds a record; it has to be on disk."""
        return self.blocks[bisect_left(self.blocks, seq, key=_last_seq)]

    def has_room_after(self, seq: int) -> bool:
        """Say whether more can be written without dropping anything after `seq`."""
        if seq >= self.last_seq or self._slots is None or not self.blocks:
            return True
        to_free = len(self._held) + _SLOTS_AHEAD - self._slots.share
        if to_free <= 0:
            return True
        keep_from = self._begin + to_free * SLOT_BYTES
        return self.blocks[bisect_left(self.blocks, keep_from, key=_start) - 1].last_seq <= seq
