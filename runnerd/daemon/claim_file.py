"""claim.json in the state directory: whose the sandbox is, for the incarnations to come.

It is a file of its own and not a row of the journal, since it has to outlive more: a loss of power,
a journal that was damaged and begun anew, a Python without sqlite3. It is written beside its place,
synced, renamed and synced again, so whoever reads it finds one claim or the other, whole.

A file that is there and cannot be read still says that the sandbox was claimed: it is never taken
for nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from runnerd.core.claim import UNKNOWN, Standing
from runnerd.protocol.fields import OWNER_CHARS_MAX
from runnerd.protocol.sandbox_answers import Claim

NAME: Final = "claim.json"
_FRESH: Final = ".claim.json.new"
_SCHEMA: Final = 1
_BYTES_MAX: Final = 64 * 1024
_YEAR_9999: Final = 253402300799.0
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError)


class ClaimRecord(msgspec.Struct, kw_only=True):
    """What is written.

    Attributes:
        schema: 1.
        owner: As claimed.
        claimed_at: Unix seconds.
        incarnation: The daemon start that was asked.
        fence: The fence it was claimed with: the owner's before it stay shut out, too.
        nonce: As the claim gave it, or null.
    """

    schema: int = _SCHEMA
    owner: Annotated[str, Meta(min_length=1, max_length=OWNER_CHARS_MAX)]
    claimed_at: Annotated[float, Meta(ge=0, le=_YEAR_9999)]
    incarnation: Annotated[str, Meta(max_length=64)]
    fence: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    nonce: str | None = None


class _Any(msgspec.Struct):
    """What a file of any version has."""

    schema: int


class FoundClaim(NamedTuple):
    """What is in the state directory.

    Attributes:
        standing: The claim, UNKNOWN where it cannot be read; None = there is none.
        reason: Why no claim can be written, or None.
        warning: What an operator should know, or None.
        is_left_alone: Whether the file is a newer version's, and not to be written.
    """

    standing: Standing | None = None
    reason: str | None = None
    warning: str | None = None
    is_left_alone: bool = False


def find_claim(folder: Path) -> FoundClaim:
    """Read the claim, and try whether one could be written. For boot: it may wait for the disk."""
    found = read_claim(folder)
    return found if found.is_left_alone else found._replace(reason=_why_not(folder))


def read_claim(folder: Path) -> FoundClaim:
    """Read the claim; see find_claim."""
    path = folder / NAME
    try:
        return FoundClaim(_read(path))
    except FileNotFoundError:
        return FoundClaim()
    except _NewerError as error:
        reason = f"'{path}' has schema {error} and this runnerd knows {_SCHEMA}; it is left alone"
        warning = f"claimed, by whom is not known: {reason}"
        return FoundClaim(Standing(UNKNOWN), reason, warning, is_left_alone=True)
    except (OSError, *_UNREADABLE) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        warning = f"claimed, by whom is not known: '{path}' cannot be read ({why})"
        return FoundClaim(Standing(UNKNOWN), warning=warning)


class _NewerError(Exception):
    """The file is a newer version's; says which."""


def _read(path: Path) -> Standing:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "no plain file of ours")
        data = file.read(_BYTES_MAX)
    # Whatever a newer version has put in, it says first of all which one that is.
    schema = msgspec.json.decode(data, type=_Any).schema
    if schema > _SCHEMA:
        raise _NewerError(schema)
    record = msgspec.json.decode(data, type=ClaimRecord)
    claim = Claim(
        owner=record.owner,
        claimed_at=record.claimed_at,
        incarnation=record.incarnation,
        fence=record.fence,
    )
    return Standing(claim, record.nonce)


def _why_not(folder: Path) -> str | None:
    """Try what a claim needs, but for the syncs; returns why that fails."""
    try:
        _write_fresh(folder, bytes(512), sync=False)
        (folder / _FRESH).unlink()
    except OSError as error:
        return f"cannot write in '{folder}': {error.strerror}"
    return None


def write_claim(folder: Path, standing: Standing) -> None:
    """Write a claim so that it outlives a loss of power. For the thread: it waits for the disk.

    Raises:
        OSError: As the disk says; what was there before is there, or the new one, whole.
    """
    claim = standing.claim
    assert claim.owner is not None
    assert claim.claimed_at is not None
    assert claim.incarnation is not None
    assert claim.fence is not None
    record = ClaimRecord(
        owner=claim.owner,
        claimed_at=claim.claimed_at,
        incarnation=claim.incarnation,
        fence=claim.fence,
        nonce=standing.nonce,
    )
    _write_fresh(folder, msgspec.json.encode(record) + b"\n", sync=True)
    (folder / _FRESH).rename(folder / NAME)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _write_fresh(folder: Path, data: bytes, *, sync: bool) -> None:
    fresh = folder / _FRESH
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()  # of a daemon that was killed in between
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
