"""The spool's file: where it may lie, and how blocks are written, read and given back.

It has no name: its space is the kernel's again once the daemon is gone, however it went.
Everything below `open_spool` runs in the disk's thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import zlib
from pathlib import Path
from typing import Final, Literal, NamedTuple

from runnerd.core.bounds import Bounds
from runnerd.core.spool import SLOT_BYTES, SLOTS_MIN, Piece, Slots

from .linux import is_in_memory, punch_hole

_JOIN_ABOVE: Final = 64  # parts of a piece; well under IOV_MAX, 1024, writev(2)


class SpoolPlace(NamedTuple):
    """The file and its slots, or why there is none.

    Attributes:
        fd: Open for reading and writing, without a name; None where there is no spool.
        directory: Where it lies.
        reason: Why there is none.
        slots: Its slots.
    """

    fd: int | None
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
    return SpoolPlace(fd, str(directory), None, Slots(slots, each))


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


def write_pieces(fd: int, pieces: list[Piece]) -> list[int]:
    """Write a batch; returns the checksum of each piece's block up to its end.

    Raises:
        OSError: As the call says; what was written of it is not to be read.
    """
    return [_write_piece(fd, piece) for piece in pieces]


def _write_piece(fd: int, piece: Piece) -> int:
    parts = piece.parts if len(piece.parts) <= _JOIN_ABOVE else [b"".join(piece.parts)]
    crc = piece.crc
    for part in parts:
        crc = zlib.crc32(part, crc)
    at = piece.block.slot * SLOT_BYTES + piece.at
    rest = piece.end - piece.at
    written = os.pwritev(fd, parts, at)
    if written != rest:
        # The call itself says why there is not more room, if it is asked once more.
        whole = b"".join(parts)
        if os.pwrite(fd, whole[written:], at + written) != rest - written:
            raise OSError(errno.EIO, "a short write")
    return crc


def read_block(fd: int, slot: int, size: int, crc: int) -> bytes:
    """Read a block.

    Args:
        fd: The spool's file.
        slot: Where it begins, in slots.
        size: How much of it is written.
        crc: The checksum of that.

    Raises:
        OSError: As the call says, or EIO where the disk gave back something else.
    """
    data = os.pread(fd, size, slot * SLOT_BYTES)
    if len(data) != size:
        raise OSError(errno.EIO, "a short read")
    if zlib.crc32(data) != crc:
        raise OSError(errno.EIO, "the disk gave back something else than was written")
    return data


def give_back(fd: int, slots: list[int], *, all_free: bool) -> None:
    """Give the space of slots back, in order; where the file system cannot, only of all of them.

    Raises:
        OSError: As the calls say.
    """
    if all_free:
        os.ftruncate(fd, 0)
        return
    first = previous = slots[0]
    for slot in [*slots[1:], -1]:
        if slot != previous + 1:
            punch_hole(fd, first * SLOT_BYTES, (previous + 1 - first) * SLOT_BYTES)
            first = slot
        previous = slot
