"""The spool's file: where it may lie, and how blocks are written, read and given back.

It has no name: its space is the kernel's again once the daemon is gone, however it went.
SpoolFile's methods run in the disk's thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
from pathlib import Path
from typing import Literal, NamedTuple

from runnerd.core.blocks import Batch, Extent
from runnerd.core.bounds import Bounds
from runnerd.core.slots import SLOT_BYTES, SLOTS_MIN, Slots

from .linux import is_in_memory, punch_hole
from .spool_io import load_spool_io


class SpoolPlace(NamedTuple):
    """The file and its slots, or why there is none.

    Attributes:
        file: The file; None where there is no spool.
        directory: Where it lies.
        reason: Why there is none.
        slots: Its slots.
        is_broken: Whether there is none because the disk failed.
    """

    file: SpoolFile | None
    directory: str | None
    reason: str | None
    slots: Slots | None
    is_broken: bool = False


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
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        fd = _open_unnamed(directory)
        if mode == "disk" and is_in_memory(fd):
            os.close(fd)
            return _nowhere(f"'{directory}' is memory, not a disk")
    except OSError as error:
        reason = f"cannot make a file in '{directory}': {error.strerror}"
        return SpoolPlace(None, None, reason, None, is_broken=True)
    return SpoolPlace(SpoolFile(fd), str(directory), None, Slots(slots, each))


def _nowhere(reason: str) -> SpoolPlace:
    return SpoolPlace(None, None, reason, None)


def _file_bytes_max() -> int:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return 2**63 - 1 if soft == resource.RLIM_INFINITY else soft


def _open_unnamed(directory: Path) -> int:
    """Open a file without a name.

    Raises:
        OSError: As open(2) says; ENOTDIR where the directory is a link to one.
    """
    folder_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _open_in(folder_fd)
    finally:
        os.close(folder_fd)


def _open_in(folder_fd: int) -> int:
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    name, flags = secrets.token_hex(8), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
    return fd


class SpoolFile:
    """Blocks on their way to and from the file.

    Args:
        fd: Open for reading and writing.

    Attributes:
        plain_reason: Why the native part is not used; None = it is.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._io, self.plain_reason = load_spool_io()

    def write(self, batch: Batch) -> list[int]:
        """Write a batch; returns the checksum of each piece's block up to its end.

        Raises:
            OSError: As pwritev(2) says; what was written of it is not to be read.
        """
        return self._io.write(self.fd, batch)

    def read(self, extents: list[Extent], crc: int) -> bytes:
        """Read a block.

        Args:
            extents: Where it is.
            crc: The checksum of what is written there.

        Raises:
            OSError: As pread(2) says, or EIO where the disk gave back something else.
        """
        found = [os.pread(self.fd, size, at) for at, size in extents]
        data = found[0] if len(found) == 1 else b"".join(found)
        if len(data) != sum(size for _, size in extents):
            raise OSError(errno.EIO, "a short read")
        if self._io.crc(data) != crc:
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
