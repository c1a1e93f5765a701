"""The audit file: appended to, never read, and rotated by others. For the audit's own thread."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence

from runnerd.core.audit import Settled, audit_line, lost_line
from runnerd.core.redaction import Redaction

from .options import ConfigError


class AuditFile:
    """One file at a path; whoever rotates it moves it away, and a new one is begun.

    Args:
        path: Absolute.
        redaction: What is hidden.

    Raises:
        ConfigError: If it cannot be opened, or is not safe.
    """

    def __init__(self, path: str, redaction: Redaction) -> None:
        self._path = path
        self._redaction = redaction
        try:
            self._fd: int | None = self._open()
        except OSError as error:
            raise ConfigError(f"--audit: cannot open '{path}': {error.strerror}") from error

    def append(self, batch: Sequence[Settled], lost: int) -> None:
        """Write these lines, all or none.

        Args:
            batch: What is to be told.
            lost: How many before it could not be; told first.

        Raises:
            OSError: If it cannot be written.
        """
        lines = [lost_line(time.time(), lost)] if lost else []
        lines += [audit_line(each, self._redaction) for each in batch]
        data = b"".join(lines)
        self._follow()
        assert self._fd is not None
        before = os.fstat(self._fd).st_size
        written = os.write(self._fd, data)
        if written != len(data):
            # Nobody is to find half a line, and whoever is told that it failed finds none of it.
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow(self) -> None:
        """Begin a new file where the one we write is no longer at the path: one stat(2)."""
        if self._fd is not None:
            held = os.fstat(self._fd)
            try:
                named = os.stat(self._path, follow_symlinks=False)
            except FileNotFoundError:
                named = None
            if named is not None and (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                return
            os.close(self._fd)
            self._fd = None  # should the next fail, it is tried again for the next lines
        self._fd = self._open()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
        status = os.fstat(fd)
        reason = None
        if not stat.S_ISREG(status.st_mode):
            reason = "it is no regular file"
        elif status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            reason = "others could write it"
        if reason is not None:
            os.close(fd)
            raise OSError(errno.EPERM, reason)
        return fd
