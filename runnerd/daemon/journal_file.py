"""The journal's SQLite file: its format, what is checked as it is opened, and how it is written.

Rule 1: WAL and synchronous=OFF: what was committed outlives this process, not a loss of power.
Rule 2: the exclusive locking mode: nobody else opens the file, and there is no shared memory file,
which on a full disk could end the process by SIGBUS.
Rule 3: a file that is not ours in every byte of its schema is moved aside, one from a newer
version is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from runnerd.core.past import PackedPast, Past, look_into, pack_past

NAME: Final = "journal.sqlite"
ASIDE: Final = "journal.corrupt-"
VERSION: Final = 1
APPLICATION_ID: Final = 0x72756E64  # "rund", as file(1) could know it
_SIDE_FILES: Final = ("-wal", "-shm", "-journal")
_CHECKPOINT_PAGES: Final = 256  # 1 MiB of 4 KiB pages: what a checkpoint may take is bounded by it

_ROW_BYTES_MAX: Final = 1024 * 1024  # the longest of ours is 40 kB
_LOADED_BYTES_MAX: Final = 64 * 1024 * 1024  # 16,384 of ours are 9 MB, 1,024 of the longest 40 MB

_SCHEMA: Final = (
    "CREATE TABLE execs(number INTEGER PRIMARY KEY, past BLOB NOT NULL)",
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
)
_SETTINGS: Final = (
    "PRAGMA locking_mode=EXCLUSIVE",  # before anything is read: see rule 2
    "PRAGMA trusted_schema=OFF",
    "PRAGMA cell_size_check=ON",
    "PRAGMA temp_store=MEMORY",
    "PRAGMA cache_size=-256",  # KiB: a row is written once or twice and never read
)
_WRITING: Final = (
    "PRAGMA synchronous=OFF",
    f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}",
    f"PRAGMA journal_size_limit={2 * _CHECKPOINT_PAGES * 4096}",
)
_LOADED: Final = (
    "SELECT ifnull(sum(length(past)), 0) FROM (SELECT past FROM execs ORDER BY number DESC LIMIT ?)"
)
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
_PUT: Final = "INSERT OR REPLACE INTO execs VALUES(?,?)"
_META: Final = "INSERT OR REPLACE INTO meta VALUES(?,?)"


class JournalError(Exception):
    """There is a journal that cannot be used; says why."""


class _DamagedError(Exception):
    """The file is not what this version wrote."""


class Kept(NamedTuple):
    """What earlier incarnations left.

    Attributes:
        pasts: The newest, in order of acceptance.
        starts: Starts accepted so far.
        fence: The highest fence seen, or None.
        dropped: The highest number of acceptance of which nothing is known any more.
        moved: Why a damaged file was moved aside and a new one begun, or None.
    """

    pasts: list[PackedPast]
    starts: int
    fence: int | None
    dropped: int
    moved: str | None = None


class JournalFile:
    """The open file. Used by one thread at a time.

    Args:
        connection: Opened and checked by open_journal.
        top: The highest number ever used.
        path: Where the file is to be found again.

    Attributes:
        errors: What may be raised without a defect of ours: the disk, the file, the memory.
    """

    errors: Final = (sqlite3.Error, OSError, MemoryError)

    def __init__(self, connection: sqlite3.Connection, top: int, path: Path) -> None:
        self._connection = connection
        self._top = top
        self._path = path
        self._identity = _identity(path)

    def check(self) -> None:
        """See whether the next incarnation would find the file.

        Raises:
            OSError: Somebody has taken it away; ENOENT or, where another is there, ESTALE.
        """
        if _identity(self._path) != self._identity:
            raise OSError(errno.ESTALE, "the journal has been replaced", str(self._path))

    def write(
        self, rows: Mapping[int, Past | bytes | None], meta: Mapping[str, int], *, anew: bool
    ) -> None:
        """Write all of it or nothing.

        Args:
            rows: By number, packed already or not; None takes a row away.
            meta: Numbers by name: `fence` and `dropped` as in Kept, where they have changed.
            anew: Whether the rows replace everything that is there.

        Raises:
            sqlite3.Error, OSError, MemoryError: See `errors`; nothing was changed. OSError also
                where the next incarnation would not find the file: somebody has taken it away.
        """
        self.check()
        put = [
            (number, past if isinstance(past, bytes) else pack_past(past))
            for number, past in rows.items()
            if past is not None
        ]
        execute = self._connection.execute
        if len(put) == len(rows) == 1 and not meta and not anew:
            execute(_PUT, put[0])
            self._top = max(self._top, put[0][0])
            return
        gone = [(number,) for number, past in rows.items() if past is None]
        top = max(self._top, *rows) if rows else self._top
        execute("BEGIN IMMEDIATE")
        try:
            if anew:
                execute("DELETE FROM execs")
            self._connection.executemany(_PUT, put)
            self._connection.executemany("DELETE FROM execs WHERE number=?", gone)
            if anew or (top,) in gone:
                # Else the highest row says how many starts there were.
                execute(_META, ("starts", top))
            self._connection.executemany(_META, meta.items())
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # some errors have rolled it back already
                execute("ROLLBACK")
            raise
        self._top = top

    def close(self) -> None:
        """Leave one file that holds everything."""
        self._connection.close()


def open_journal(folder: Path, *, pasts_max: int, wall_s: float) -> tuple[JournalFile, Kept]:
    """Open the journal, or begin one.

    Args:
        folder: The state directory.
        pasts_max: How many of the newest pasts are kept.
        wall_s: Unix seconds, for the name of a damaged file.

    Raises:
        JournalError: If there can be none; what is there was left alone.
    """
    path = folder / NAME
    try:
        try:
            return _open(path, pasts_max)
        except _DamagedError as error:
            aside = _move_aside(folder, wall_s)
            opened, kept = _open(path, pasts_max)
            return opened, kept._replace(moved=f"{error}; it is kept as '{aside.name}'")
    except (_DamagedError, OSError, sqlite3.Error) as error:
        raise JournalError(f"cannot use '{path}': {_words(error)}") from error


def _open(path: Path, pasts_max: int) -> tuple[JournalFile, Kept]:
    for name in (path.name, *(path.name + side for side in _SIDE_FILES)):
        _check_file(path.parent / name)
    # Handed over to the writer's thread once this one is done with it.
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _ROW_BYTES_MAX)
        for statement in _SETTINGS:
            connection.execute(statement)
        _check_format(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        for statement in _WRITING:
            connection.execute(statement)
        kept = _load(connection, pasts_max)
        os.chmod(path, 0o600)
        file = JournalFile(connection, kept.starts, path)
    except BaseException as error:
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        if isinstance(error, sqlite3.DatabaseError) and _is_damage(error):
            raise _DamagedError(f"'{path.name}' is damaged: {_words(error)}") from error
        raise
    return file, kept


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _check_file(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise JournalError(f"'{path}' is no plain file with one name; it is left alone")
    if status.st_uid != os.geteuid():
        raise JournalError(f"'{path}' belongs to uid {status.st_uid}; it is left alone")


def _check_format(connection: sqlite3.Connection) -> None:
    version = _number(connection, "PRAGMA user_version")
    application = _number(connection, "PRAGMA application_id")
    schema = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema ORDER BY name")]
    if not version and not application and not schema:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
        return
    if application != APPLICATION_ID:
        raise _DamagedError(f"'{NAME}' is not a journal of runnerd")
    if version > VERSION:
        raise JournalError(
            f"'{NAME}' has version {version} and this runnerd knows {VERSION}; it is left alone"
        )
    if version != VERSION or schema != list(_SCHEMA):
        raise _DamagedError(f"'{NAME}' has a schema that is not ours")


def _load(connection: sqlite3.Connection, pasts_max: int) -> Kept:
    # Every page of the table is read here, so damage shows now and not at some later write.
    if _number(connection, _LOADED, pasts_max) > _LOADED_BYTES_MAX:
        raise _DamagedError(f"'{NAME}' holds more than we ever write")
    newest = connection.execute(
        "SELECT number, past FROM execs ORDER BY number DESC LIMIT ?", (pasts_max,)
    ).fetchall()
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    pasts: list[PackedPast] = []
    for number, packed in reversed(newest):
        try:
            past = look_into(packed)
        except (msgspec.DecodeError, TypeError) as error:
            raise _DamagedError(f"'{NAME}' has a row that is not ours: {error}") from error
        if past.number != number:
            raise _DamagedError(f"'{NAME}' has row {number} for exec number {past.number}")
        pasts.append(past)
    if len(pasts) == pasts_max:
        with contextlib.suppress(sqlite3.OperationalError):  # the first write will say so
            connection.execute("DELETE FROM execs WHERE number<?", (pasts[0].number,))
    dropped = meta.get("dropped", 0)
    if len(pasts) == pasts_max:
        dropped = max(dropped, pasts[0].number - 1)
    starts = max([meta.get("starts", 0), *(past.number for past in pasts[-1:])])
    return Kept(pasts, starts, meta.get("fence"), dropped)


def _number(connection: sqlite3.Connection, statement: str, *words: int) -> int:
    found: int = connection.execute(statement, words).fetchone()[0]
    return found


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # The first byte of an extended code is its primary one, sqlite.org/rescode.html.
    return (error.sqlite_errorcode & 0xFF) in _DAMAGE


def _move_aside(folder: Path, wall_s: float) -> Path:
    for old in folder.glob(ASIDE + "*"):
        old.unlink()
    aside = folder / f"{ASIDE}{int(wall_s)}"
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            (folder / (NAME + side)).rename(folder / (aside.name + side))
    (folder / NAME).rename(aside)
    return aside


def _words(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
