"""Records as they lie on disk: in blocks, each with a checksum. No I/O.

What a transcript has on disk is one stream of bytes: records, each behind its header, without a
hole. A block is a run of whole records in it, and what is read at once. Where the stream lies in
the file is the business of core/spool.py.

Each block's checksum is in memory, so that a disk that gives back something else than it was
given is found out.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Final, NamedTuple

from .bounds import CHUNK_BYTES, KIB, MIB

HEADER: Final = struct.Struct("<QQIB")  # sequence, offset in its stream, bytes of data, stream
BLOCK_BYTES: Final = 4 * CHUNK_BYTES + 4 * KIB  # four whole chunks and their headers
CACHE_BYTES: Final = 2 * MIB

Extent = tuple[int, int]  # where in the file, and how many bytes


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
    """Records that follow one another on disk.

    Attributes:
        start: Where it begins among all that its transcript ever had on disk, in bytes.
        first_seq, last_seq: Which records, both included.
        used_bytes: How long it is; at most BLOCK_BYTES.
        crc: The checksum of that.
        start_offsets, end_offsets: Where each stream stands before and after it.
        data: What is written, while it is in the cache; may be short of what was added since.
        is_dropped: Whether its place may belong to somebody else by now.
    """

    __slots__ = (
        "crc",
        "data",
        "end_offsets",
        "first_seq",
        "is_dropped",
        "last_seq",
        "start",
        "start_offsets",
        "used_bytes",
    )

    def __init__(self, start: int, first_seq: int, start_offsets: tuple[int, int]) -> None:
        self.start = start
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
        at: Where in the block; 0 = the block is new.
        crc: The block's checksum up to there.
        parts: Headers and data in turn.
        end: Where it ends in the block.
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
        start, end: Where it is among all that its transcript ever had on disk, in bytes.
        pieces: In order.
        extents: Where in the file, in order; as long together as the pieces.
        end_cost: What all records up to its last one cost in memory.
    """

    __slots__ = ("end", "end_cost", "extents", "pieces", "start")

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.pieces: list[Piece] = []
        self.extents: list[Extent] = []
        self.end_cost = 0

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.end - self.start

    def place(self, extents: list[Extent]) -> None:
        """Go on there."""
        for at, size in extents:
            self.end += size
            add_extent(self.extents, at, size)

    def new_blocks(self) -> list[Block]:
        """Return the blocks that it begins."""
        return [piece.block for piece in self.pieces if not piece.at]


def add_extent(extents: list[Extent], at: int, size: int) -> None:
    """Add one; it becomes part of the last where it goes on from there."""
    if extents:
        last_at, last_size = extents[-1]
        if last_at + last_size == at:
            extents[-1] = (last_at, last_size + size)
            return
    extents.append((at, size))


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
