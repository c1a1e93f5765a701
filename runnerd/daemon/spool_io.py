"""How a batch is written and summed: by spool_io.so in one call, else in Python.

Both write the same bytes; only the checksums differ, and those are never kept. In Python each
checksum and each write gives the GIL up and has to wait for it again, so that a command which
writes without end outruns a disk that could keep up (DECISIONS.md has the figures); nothing else
is different.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
from collections import deque
from pathlib import Path
from typing import Final, Protocol
from zlib import crc32

from runnerd.core.blocks import Batch

LIBRARY: Final = Path(__file__).parent.parent / "_native" / "spool_io.so"
_JOIN_ABOVE: Final = 64  # parts of a piece: of many small ones the kernel makes slow work
_IOV_MAX: Final = 1024  # writev(2)
_LAYOUT: Final = 2  # of what spool_io.c takes

_Part = bytes | memoryview


class SpoolIo(Protocol):
    """Writes and sums; methods of it are called in the disk's thread."""

    def crc(self, data: bytes) -> int:
        """Return the checksum of a block."""

    def write(self, fd: int, batch: Batch) -> list[int]:
        """Write a batch; returns the checksum of each piece's block up to its end.

        Raises:
            OSError: As pwritev(2) says; what was written of it is not to be read.
        """


def load_spool_io() -> tuple[SpoolIo, str | None]:
    """Return the native part, or the one in Python and why it is that."""
    try:
        return NativeIo(), None
    except (OSError, AttributeError) as error:
        return PlainIo(), str(error)


def _parts_of(batch: Batch) -> list[list[bytes]]:
    each = [piece.parts for piece in batch.pieces]
    return [parts if len(parts) <= _JOIN_ABOVE else [b"".join(parts)] for parts in each]


class _Piece(ctypes.Structure):
    _fields_ = (("parts", ctypes.c_ulong), ("crc", ctypes.c_ulong))


class _Extent(ctypes.Structure):
    _fields_ = (("at", ctypes.c_long), ("size", ctypes.c_ulong))


class NativeIo:
    """By spool_io.so, without the GIL from the beginning of a batch to its end.

    Raises:
        OSError: If it cannot be loaded.
        AttributeError: If it is not what it should be.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(LIBRARY))
        if library.spool_setup() != _LAYOUT:
            raise OSError(f"'{LIBRARY}' is of another build")
        self._crc = library.spool_crc
        self._crc.restype = ctypes.c_uint
        self._crc.argtypes = (ctypes.c_uint, ctypes.c_char_p, ctypes.c_ulong)
        self._write = library.spool_write
        self._write.restype = ctypes.c_long

    def crc(self, data: bytes) -> int:
        """See SpoolIo."""
        return int(self._crc(0, data, len(data)))

    def write(self, fd: int, batch: Batch) -> list[int]:
        """See SpoolIo."""
        by_piece = _parts_of(batch)
        parts = list(itertools.chain.from_iterable(by_piece))
        pieces = (_Piece * len(by_piece))()
        for piece, mine, its in zip(pieces, by_piece, batch.pieces, strict=True):
            piece.parts, piece.crc = len(mine), its.crc
        extents = (_Extent * len(batch.extents))()
        for extent, (at, size) in zip(extents, batch.extents, strict=True):
            extent.at, extent.size = at, size
        pointers = (ctypes.c_char_p * len(parts))(*parts)
        sizes = (ctypes.c_ulong * len(parts))(*map(len, parts))
        count = ctypes.c_ulong(len(pieces))
        failed = self._write(fd, pieces, count, extents, pointers, sizes)
        if failed:
            raise OSError(-failed, os.strerror(-failed))
        return [each.crc for each in pieces]


class PlainIo:
    """In Python."""

    def crc(self, data: bytes) -> int:
        """See SpoolIo."""
        return crc32(data)

    def write(self, fd: int, batch: Batch) -> list[int]:
        """See SpoolIo."""
        by_piece = _parts_of(batch)
        parts: deque[_Part] = deque(itertools.chain.from_iterable(by_piece))
        for at, size in batch.extents:
            _write_extent(fd, parts, at, size)
        return [
            functools.reduce(lambda crc, part: crc32(part, crc), each, piece.crc)
            for each, piece in zip(by_piece, batch.pieces, strict=True)
        ]


def _write_extent(fd: int, parts: deque[_Part], at: int, size: int) -> None:
    """Write the first of the parts, as many bytes as asked for, and take them out."""
    while size:
        group: list[_Part] = []
        to_come = size
        for part in itertools.islice(parts, _IOV_MAX):
            group.append(part if len(part) <= to_come else memoryview(part)[:to_come])
            to_come -= len(group[-1])
            if not to_come:
                break
        done = os.pwritev(fd, group, at)
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        at, size = at + done, size - done
        while parts and done >= len(parts[0]):
            done -= len(parts.popleft())
        if done:
            parts[0] = memoryview(parts[0])[done:]
