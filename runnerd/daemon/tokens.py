"""Gate 3: the secret that a hello must carry, where one is configured.

It comes from a file or an inherited descriptor, never from argv or the environment, which others
can read. What stays of it is its SHA-256: the bytes read are wiped at once, so neither a log line
nor a core file nor the memory of a process forked later can have it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import stat
import time
from typing import Final

from .options import ConfigError

TOKEN_BYTES_MAX: Final = 1024
_SHORT_BYTES: Final = 16  # 128 bits, were they random
_FD_S: Final = 10.0  # a descriptor that has not ended by then never will


class Token:
    """What is kept of a token.

    Args:
        secret: The token; wiped by this.

    Attributes:
        is_short: Whether it could be guessed: an operator should know.
    """

    __slots__ = ("_digest", "is_short")

    def __init__(self, secret: bytearray) -> None:
        self.is_short = len(secret) < _SHORT_BYTES
        self._digest = hashlib.sha256(secret).digest()
        secret[:] = bytes(len(secret))

    def matches(self, given: str | None) -> bool:
        """Compare in a time that says nothing about either, not even their lengths."""
        digest = hashlib.sha256((given or "").encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest)


def read_token_file(path: str) -> Token:
    """Read a token from a file that nobody else can read.

    A link is followed, since secrets are mounted as such; it is the file that must be safe.

    Raises:
        ConfigError: If it cannot be read, or others could have.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(f"--token-file: cannot open '{path}': {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--token-file: '{path}' is no regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"--token-file: '{path}' belongs to uid {status.st_uid}, neither to us nor to root"
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                f"--token-file: '{path}' can be used by others (mode "
                f"{stat.S_IMODE(status.st_mode):04o}): chmod 0400 it, or hand it over by --token-fd"
            )
        return _token(fd, f"--token-file: '{path}'")
    finally:
        os.close(fd)


def read_token_fd(fd: int) -> Token:
    """Read a token from an inherited descriptor up to its end, and close it.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return _token(fd, f"--token-fd {fd}:")
    finally:
        _let_go(fd)


def _let_go(fd: int) -> None:
    with contextlib.suppress(OSError):
        if fd == 0:  # a standard descriptor stays open, or the next thing opened would be it
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        else:
            os.close(fd)


def _token(fd: int, what: str) -> Token:
    room = bytearray(TOKEN_BYTES_MAX + 3)  # one too many, and a line's end of two
    try:
        size = _fill(fd, room, what)
        end = size
        while end and room[end - 1] in b"\r\n":
            end -= 1
        if not end:
            raise ConfigError(f"{what} holds no token: it is empty")
        if end > TOKEN_BYTES_MAX:
            raise ConfigError(f"{what} holds more than {TOKEN_BYTES_MAX} bytes")
        secret = room[:end]
        if not all(0x21 <= byte <= 0x7E for byte in secret):
            secret[:] = bytes(end)
            raise ConfigError(f"{what} holds no token: that is one word of visible ASCII")
        return Token(secret)
    finally:
        room[:] = bytes(len(room))


def _fill(fd: int, room: bytearray, what: str) -> int:
    deadline_s, size = time.monotonic() + _FD_S, 0
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while size < len(room):
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise ConfigError(f"{what} did not end within {_FD_S:g} s")
            with memoryview(room) as view:
                got = os.readv(fd, [view[size:]])
            if not got:
                break
            size += got
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error
    return size
