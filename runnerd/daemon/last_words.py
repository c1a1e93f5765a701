"""last-words.json in the state directory: what a dead daemon's container can still tell.

Written whole to a new file and renamed over the old one, so a reader sees one or the other.
The daemon works without it: a state directory that is missing, read-only or full costs a warning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

NAME = "last-words.json"
EXECS_LISTED = 100
_BYTES_MAX = 64 * 1024  # 100 ids of 128 characters, and what is said of the daemon


class LastWords(msgspec.Struct, kw_only=True):
    """What is written. Times are Unix seconds.

    Attributes:
        schema: 1.
        incarnation: The daemon start that speaks.
        version: Its version.
        pid: Its pid.
        started_at: When it began.
        ready_at: When it answered first, or null.
        stopping_at: When the stop began, or null: it was killed, or the machine went down.
        stopped_at: When it was about to leave, or null.
        cause: What began the stop.
        code: The exit code that was fixed.
        live_execs: Ids of the execs live at the stop, at most 100.
        live_total: How many.
    """

    schema: int = 1
    incarnation: str
    version: str
    pid: int
    started_at: float
    ready_at: float | None = None
    stopping_at: float | None = None
    stopped_at: float | None = None
    cause: str | None = None
    code: int | None = None
    live_execs: list[str] = []
    live_total: int = 0


def read_last_words(folder: Path) -> LastWords | None:
    """Return what the incarnation before left, or None where there is nothing readable."""
    try:
        return msgspec.json.decode(_read_plain(folder / NAME), type=LastWords)
    except (OSError, msgspec.DecodeError):
        return None


def _read_plain(path: Path) -> bytes:
    # A command of our own user can put there what nobody ever writes to, or what never ends.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(fd, _BYTES_MAX)
    finally:
        os.close(fd)


def write_last_words(folder: Path, words: LastWords) -> str | None:
    """Write them; returns None, or why it could not be done."""
    fresh = folder / f".{NAME}.{words.pid}"
    try:
        # Never what is there already: it may be another name of something precious.
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, msgspec.json.encode(words) + b"\n")
        finally:
            os.close(fd)
        fresh.rename(folder / NAME)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        return f"cannot write '{folder / NAME}': {error.strerror}"
    return None
