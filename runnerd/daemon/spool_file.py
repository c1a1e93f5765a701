"""The spool's file: where it may lie, and how blocks are written, read and given back.

It has no name: its space is the kernel's again once the daemon is gone, however it went.
SpoolFile's methods run in the disk's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import secrets
from pathlib import Path
from typing import Final, Literal, NamedTuple

from runnerd.core.bounds import Bounds
from runnerd.core.spool import SLOT_BYTES, SLOTS_MIN, Piece, Slots

from .linux import is_in_memory, punch_hole

LIBRARY: Final = Path(__file__).parent.parent / "_native" / "spool_io.so"
_JOIN_ABOVE: Final = 64  # parts of a piece: of many small ones the kernel makes slow work


class SpoolPlace(NamedTuple):
    """The file and its slots, or why there is none.

    Attributes:
        file: The file; None where there is no spool.
        directory: Where it lies.
        reason: Why there is none.
        slots: Its slots.
    """

    file: SpoolFile | None
    directory: str | None
    reason: str | None
    slots: Slots | None


def open_spool(
    folder: Path | None, mode: Literal["disk", "any", "off"], bounds: Bounds
) -> SpoolPlace:
    """Make the spool's file.

    Args:
        folder: The state directory, or None where there is none.
        mode: As --spool says.
        bounds: spool_bytes_max and spool_total_bytes_max are used.
    """
    if mode == "off":
        return _nowhere("--spool off")
    if folder is None:
        return _nowhere("there is no state directory")
    most = min(bounds.spool_total_bytes_max, _file_bytes_max())
    slots, each = most // SLOT_BYTES, min(most, bounds.spool_bytes_max) // SLOT_BYTES
    if each < SLOTS_MIN:
        return _nowhere(f"limits leave an exec less than {SLOTS_MIN * SLOT_BYTES} bytes")
    directory = folder / "spool"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = _open_unnamed(directory)
        if mode == "disk" and is_in_memory(fd):
            os.close(fd)
            return _nowhere(f"'{directory}' is memory, not a disk")
    except OSError as error:
        return _nowhere(f"cannot make a file in '{directory}': {error.strerror}")
    try:
        file = SpoolFile(fd)
    except OSError as error:
        os.close(fd)
        return _nowhere(f"its native part cannot be loaded: {error}")
    return SpoolPlace(file, str(directory), None, Slots(slots, each))


def _nowhere(reason: str) -> SpoolPlace:
    return SpoolPlace(None, None, reason, None)


def _file_bytes_max() -> int:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return 2**63 - 1 if soft == resource.RLIM_INFINITY else soft


def _open_unnamed(directory: Path) -> int:
    """Open a file without a name.

    Raises:
        OSError: As open(2) says.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = directory / secrets.token_hex(8)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):
        path.unlink()
    return fd


class SpoolFile:
    """Blocks on their way to and from the file, each batch in one call without the GIL.

    Args:
        fd: Open for reading and writing.

    Raises:
        OSError: If the native library cannot be loaded.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        library = ctypes.CDLL(str(LIBRARY))
        library.spool_setup()
        self._crc = library.spool_crc
        self._crc.restype = ctypes.c_uint
        self._crc.argtypes = (ctypes.c_uint, ctypes.c_char_p, ctypes.c_ulong)
        self._write = library.spool_write
        self._write.restype = ctypes.c_long

    def write(self, pieces: list[Piece]) -> list[int]:
        """Write a batch; returns the checksum of each piece's block up to its end.

        Raises:
            OSError: As pwritev(2) says; what was written of it is not to be read.
        """
        parts: list[bytes] = []
        native = (_Piece * len(pieces))()
        for piece, to_fill in zip(pieces, native, strict=True):
            mine = piece.parts if len(piece.parts) <= _JOIN_ABOVE else [b"".join(piece.parts)]
            parts += mine
            to_fill.at = piece.block.slot * SLOT_BYTES + piece.at
            to_fill.parts, to_fill.crc = len(mine), piece.crc
        pointers = (ctypes.c_char_p * len(parts))(*parts)
        sizes = (ctypes.c_ulong * len(parts))(*map(len, parts))
        failed = self._write(self.fd, ctypes.c_long(len(pieces)), native, pointers, sizes)
        if failed:
            raise OSError(-failed, os.strerror(-failed))
        return [each.crc for each in native]

    def read(self, slot: int, size: int, crc: int) -> bytes:
        """Read a block.

        Args:
            slot: Where it begins, in slots.
            size: How much of it is written.
            crc: The checksum of that.

        Raises:
            OSError: As pread(2) says, or EIO where the disk gave back something else.
        """
        data = os.pread(self.fd, size, slot * SLOT_BYTES)
        if len(data) != size:
            raise OSError(errno.EIO, "a short read")
        if self._crc(0, data, size) != crc:
            raise OSError(errno.EIO, "the disk gave back something else than was written")
        return data

    def give_back(self, slots: list[int], *, all_free: bool) -> None:
        """Give the space of slots back, in order; all of it at once where nothing is in use.

        Raises:
            OSError: As the calls say; EOPNOTSUPP where the file system can do only the latter.
        """
        if all_free:
            os.ftruncate(self.fd, 0)
            return
        first = previous = slots[0]
        for slot in [*slots[1:], -1]:
            if slot != previous + 1:
                punch_hole(self.fd, first * SLOT_BYTES, (previous + 1 - first) * SLOT_BYTES)
                first = slot
            previous = slot


class _Piece(ctypes.Structure):
    _fields_ = (("at", ctypes.c_long), ("parts", ctypes.c_long), ("crc", ctypes.c_ulong))
