"""Kernel calls the standard library does not offer, by ctypes. Each names its man page."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final

PR_SET_NAME: Final = 15
PR_GET_DUMPABLE: Final = 3
PR_SET_DUMPABLE: Final = 4
PR_SET_CHILD_SUBREAPER: Final = 36
SO_PEERPIDFD: Final = 77  # Linux 6.5; `socket` has no name for it up to 3.13
CAP_SETUID: Final = 7
CAP_SYS_RESOURCE: Final = 24
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_TMPFS_MAGIC: Final = 0x01021994
_RAMFS_MAGIC: Final = 0x858458F6

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int | bytes = 0) -> int:
    """Change or read one attribute of this process.

    Raises:
        OSError: As the call says.

    Source: prctl(2).
    """
    word: object = argument if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    result: int = _LIBC.prctl(option, word, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@contextlib.contextmanager
def as_filesystem_user(uid: int) -> Iterator[None]:
    """Make and open files as another user, where CAP_SETUID allows it; else nothing changes.

    Changing it makes the process dumpable as fs.suid_dumpable says; that is taken back. It is the
    calling thread's own, so nothing else notices. Source: setfsuid(2), PR_SET_DUMPABLE in prctl(2).
    """
    dumpable = prctl(PR_GET_DUMPABLE)
    before = _LIBC.setfsuid(ctypes.c_uint(uid))
    try:
        yield
    finally:
        _LIBC.setfsuid(ctypes.c_uint(before))
        if prctl(PR_GET_DUMPABLE) != dumpable:
            prctl(PR_SET_DUMPABLE, dumpable)


def punch_hole(fd: int, at: int, size: int) -> None:
    """Give back the space of a part of a file; it reads as zeros, and the length stays.

    Raises:
        OSError: As the call says; EOPNOTSUPP where the file system cannot.

    Source: fallocate(2).
    """
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    if _LIBC.fallocate(fd, mode, ctypes.c_int64(at), ctypes.c_int64(size)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_in_memory(fd: int) -> bool:
    """Say whether a file's bytes are memory: it is on tmpfs or ramfs.

    Raises:
        OSError: As the call says.

    Source: fstatfs(2); f_type is the first word.
    """
    found = (ctypes.c_long * 32)()
    if _LIBC.fstatfs(fd, found) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found[0] & 0xFFFFFFFF in (_TMPFS_MAGIC, _RAMFS_MAGIC)


def has_capability(number: int) -> bool:
    """Say whether this process has a capability in its effective set, see capabilities(7)."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"CapEff:"):
                    return bool(int(line.split()[1], 16) >> number & 1)
    except OSError:
        pass
    return False


def set_title(title: str) -> None:
    """Show `title` as this process's command line, so that `pkill -f python` does not hit it.

    The kernel keeps where the arguments lie (proc_pid_stat(5), arg_start and arg_end); they are
    ours to write. A last byte that is not NUL tells the kernel that a title was set, so it shows
    the text up to the first NUL. Nothing happens where the room cannot be found.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start <= 0 or room < 2:
        return
    text = title.encode()[: room - 2]
    ctypes.memmove(start, text + b"\0" * (room - 1 - len(text)) + b".", room)
