"""What is kept of transcripts on disk: blocks of records, and the slots they lie in. No I/O.

All transcripts share one file, cut into slots of one size. A block is a run of records of one
exec in one slot; a transcript's blocks follow one another without a hole, so that what it keeps
is always the newest part of its sequence. A slot let go is used again, the lowest first: the file
stays as small as it can, and a transcript that goes round in its share overwrites the same pages.

The index of the blocks is here, in memory, about 400 bytes for 256 KiB; the file is unlinked and
nothing of it is ever read by another daemon. Each block's checksum is part of the index, so a
disk that gives back something else than it was given is found out.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from runnerd.protocol.answers import SpoolState

from .bounds import CHUNK_BYTES, KIB, MIB

HEADER: Final = struct.Struct("<QQIB")  # sequence, offset in its stream, bytes of data, stream
SLOT_BYTES: Final = 4 * CHUNK_BYTES + 4 * KIB  # four whole chunks and their headers, whole pages
BATCH_BYTES: Final = 4 * MIB  # handed over at once, about, where the disk lags
CACHE_BYTES: Final = 2 * MIB
SLOTS_MIN: Final = 4  # an exec's share; with less, what is written is dropped before it is read
LAGS_MAX: Final = 8


class Record(NamedTuple):
    """One chunk of output.

    Attributes:
        seq: Its number, from 1.
        stream: 0 = stdout, 1 = stderr.
        offset: Where it begins in its stream, in bytes.
        data: 1 to 64 KiB.
        end_cost: What all records up to and with this one cost in memory, in bytes; 0 for one
            that was read from disk.
    """

    seq: int
    stream: int
    offset: int
    data: bytes
    end_cost: int


class Block:
    """Records that follow one another in one slot.

    Attributes:
        slot: Where: from slot * SLOT_BYTES.
        first_seq, last_seq: Which records, both included.
        used_bytes: How much of the slot is written.
        crc: The CRC-32 of that.
        start_offsets, end_offsets: Where each stream stands before and after it.
        data: What is written, while it is in the cache; may be short of what was added since.
        is_dropped: Whether its slot may belong to somebody else by now.
    """

    __slots__ = (
        "crc",
        "data",
        "end_offsets",
        "first_seq",
        "is_dropped",
        "last_seq",
        "slot",
        "start_offsets",
        "used_bytes",
    )

    def __init__(self, slot: int, first_seq: int, start_offsets: tuple[int, int]) -> None:
        self.slot = slot
        self.first_seq = first_seq
        self.last_seq = first_seq - 1
        self.used_bytes = 0
        self.crc = 0
        self.start_offsets = start_offsets
        self.end_offsets = start_offsets
        self.data: bytes | None = None
        self.is_dropped = False


class Piece:
    """The part of a batch that goes into one block, from `at` on. Filled, then left alone.

    Attributes:
        block: Which; unchanged until the piece is written.
        at: Where in its slot.
        crc: The block's checksum up to there.
        parts: Headers and data in turn.
        end: Where it ends in the slot.
        last_seq, end_offsets: As the block's will be.
    """

    __slots__ = ("at", "block", "crc", "end", "end_offsets", "last_seq", "parts")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.at = self.end = block.used_bytes
        self.crc = block.crc
        self.parts: list[bytes] = []
        self.last_seq = block.last_seq
        self.end_offsets = block.end_offsets

    def add(self, record: Record) -> None:
        """Add a record that fits."""
        size = len(record.data)
        self.parts += (HEADER.pack(record.seq, record.offset, size, record.stream), record.data)
        self.end += HEADER.size + size
        self.last_seq = record.seq
        end = record.offset + size
        first, second = self.end_offsets
        self.end_offsets = (first, end) if record.stream else (end, second)


class Batch:
    """Records on their way to the disk.

    Attributes:
        pieces: In order.
        end_cost: What all records up to its last one cost in memory.
    """

    __slots__ = ("end_cost", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end_cost = 0


class Holder(Protocol):
    """A transcript, as the slots see it."""

    @property
    def slot_count(self) -> int:
        """How many slots it has, those on their way included."""

    def drop_oldest_block(self) -> bool:
        """Let go of its oldest block; False where it has none or somebody is waited for."""

    def drop_blocks(self) -> bool:
        """Let go of all; False where it has none or somebody is waited for."""

    def degrade(self, reason: str, *, is_readable: bool) -> None:
        """Give its spool up for good."""


class Slots:
    """Who has which slots, and who loses some where there are no more.

    A live exec may have its full number while few have any; with many, all shrink alike. Closed
    execs' go before any of a live one, the oldest closed first.

    Args:
        count: How many there are.
        each_max: The most one exec may have.

    Attributes:
        freed: Slots let go of in bulk, for the edge to give the space back.
        on_freed: Called when there are some.
    """

    def __init__(self, count: int, each_max: int) -> None:
        self._free = list(range(count))
        self._count = count
        self._each_max = min(each_max, count)
        self._live: dict[Holder, None] = {}
        self._finished: dict[Holder, None] = {}
        self.freed: set[int] = set()
        self.on_freed: Callable[[], None] = lambda: None

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._count - len(self._free)

    @property
    def share(self) -> int:
        """How many a live exec may have now."""
        return max(1, min(self._each_max, self._count // max(1, len(self._live))))

    def take(self, holder: Holder) -> int | None:
        """Give a slot to a live exec, or to one that has just closed; None if none can be had."""
        if holder not in self._finished:
            self._live[holder] = None
        if holder.slot_count >= self.share and not holder.drop_oldest_block():
            return None
        if not self._free and not self._make_room(holder):
            return None
        slot = heapq.heappop(self._free)
        self.freed.discard(slot)
        return slot

    def _make_room(self, holder: Holder) -> bool:
        for finished in list(self._finished):
            if finished is not holder and finished.drop_blocks():
                return True
        share = self.share
        for live in list(self._live):
            if live is not holder and live.slot_count > share and live.drop_oldest_block():
                return True
        return holder.drop_oldest_block()

    def give_back(self, slots: list[int], *, bulk: bool) -> None:
        """Take slots back.

        Args:
            slots: Which.
            bulk: Whether the space they take is not wanted again at once.
        """
        for slot in slots:
            heapq.heappush(self._free, slot)
        if bulk and slots:
            self.freed.update(slots)
            self.on_freed()

    def take_freed(self) -> list[int]:
        """Return the slots whose space can be given back, in order; each once."""
        freed, self.freed = sorted(self.freed), set()
        return freed

    def holders(self) -> list[Holder]:
        """Return everybody who has had a slot and may have some."""
        return [*self._finished, *self._live]

    def finish(self, holder: Holder) -> None:
        """Its exec is closed."""
        if self._live.pop(holder, 0) is None:
            self._finished[holder] = None

    def remove(self, holder: Holder) -> None:
        """It has no slots any more and wants none."""
        self._live.pop(holder, None)
        self._finished.pop(holder, None)


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
        lags: How often the disk was too slow.
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

    @property
    def is_on(self) -> bool:
        """Whether records are written to it."""
        return self.state == "on"

    @property
    def slot_count(self) -> int:
        """How many slots it has, those on their way included."""
        return len(self.blocks) + len(self._new_blocks())

    def _new_blocks(self) -> list[Block]:
        pieces = [] if self.batch is None else self.batch.pieces
        return [piece.block for piece in pieces if not piece.at]

    def written(self, batch: Batch, crcs: list[int]) -> None:
        """A batch is on disk."""
        for piece, crc in zip(batch.pieces, crcs, strict=True):
            block = piece.block
            if block.is_dropped:
                continue
            block.last_seq, block.end_offsets = piece.last_seq, piece.end_offsets
            block.used_bytes, block.crc = piece.end, crc
            if not piece.at:
                self.blocks.append(block)
        last = batch.pieces[-1]
        self.last_seq, self.end_offsets = last.last_seq, last.end_offsets
        self.end_cost = batch.end_cost
        self.batch = None

    def drop_first(self) -> None:
        """Let go of the oldest block; its slot is wanted again at once."""
        self._drop([self.blocks.pop(0)], bulk=False)

    def drop_all(self) -> None:
        """Let go of all blocks, and of what is on its way: that is not written yet, then."""
        dropped = self.blocks + self._new_blocks()
        self.blocks, self.batch = [], None
        self._drop(dropped, bulk=True)

    def cancel(self) -> None:
        """Forget what is on its way."""
        dropped, self.batch = self._new_blocks(), None
        self._drop(dropped, bulk=True)

    def _drop(self, dropped: list[Block], *, bulk: bool) -> None:
        for block in dropped:
            block.is_dropped = True
        if self._slots is not None:
            self._slots.give_back([block.slot for block in dropped], bulk=bulk)

    def take_slot(self, holder: Holder) -> int | None:
        """Get a slot for one more block."""
        return None if self._slots is None else self._slots.take(holder)

    def finish(self, holder: Holder) -> None:
        """Its exec is closed."""
        if self._slots is not None:
            self._slots.finish(holder)

    def remove(self, holder: Holder) -> None:
        """Let go of everything."""
        self.drop_all()
        self.state = "off" if self._slots is None else "degraded"
        if self._slots is not None:
            self._slots.remove(holder)

    def block_with(self, seq: int) -> Block:
        """Return the block that holds a record; it has to be on disk."""
        low, high = 0, len(self.blocks) - 1
        while low < high:
            middle = (low + high) // 2
            if self.blocks[middle].last_seq < seq:
                low = middle + 1
            else:
                high = middle
        return self.blocks[low]

    def has_room_after(self, seq: int) -> bool:
        """Say whether more can be written without dropping anything after `seq`."""
        if seq >= self.last_seq or self._slots is None or not self.blocks:
            return True
        to_drop = min(self.slot_count + 2 - self._slots.share, len(self.blocks))
        return to_drop <= 0 or self.blocks[to_drop - 1].last_seq <= seq


class BlockCache:
    """Blocks read lately, for all readers together.

    Args:
        bytes_max: What they may take.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[Block, int] = OrderedDict()
        self.used_bytes = 0

    def put(self, block: Block, data: bytes) -> None:
        """Keep what was read; the oldest go for it."""
        self.drop(block)
        block.data = data
        self._blocks[block] = len(data)
        self.used_bytes += len(data)
        while self.used_bytes > self._bytes_max:
            self.drop(next(iter(self._blocks)))

    def drop(self, block: Block) -> None:
        """Let go of one, if it is there."""
        self.used_bytes -= self._blocks.pop(block, 0)
        block.data = None
