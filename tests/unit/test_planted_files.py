"""What a command of our own user puts in the state directory is not followed and not believed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from runnerd.core.bounds import Bounds
from runnerd.daemon import journal_file
from runnerd.daemon.last_words import NAME, LastWords, read_last_words, write_last_words
from runnerd.daemon.listening import Listener, SocketError
from runnerd.daemon.spool_file import open_spool

WORDS = LastWords(incarnation="i", version="0", pid=7, started_at=1.0)
PRECIOUS = b"do not write here"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", [NAME, f".{NAME}.7"])
def test_last_words_are_written_through_no_link(
    tmp_path: Path, precious: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    link(precious, tmp_path / name)
    assert write_last_words(tmp_path, WORDS) is None
    assert precious.read_bytes() == PRECIOUS
    assert read_last_words(tmp_path) == WORDS


def test_last_words_that_never_end_are_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to, a file without end, a link to a device."""
    path = tmp_path / NAME
    os.mkfifo(path)
    assert read_last_words(tmp_path) is None
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    assert read_last_words(tmp_path) is None
    path.unlink()
    path.symlink_to("/dev/zero")
    assert read_last_words(tmp_path) is None


def test_the_spool_lies_behind_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "spool").symlink_to(elsewhere)
    place = open_spool(tmp_path, "any", Bounds())
    assert place.file is None
    assert place.reason is not None
    assert "Not a directory" in place.reason


def test_a_lock_that_is_a_link_is_said_and_left_alone(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "s.lock").symlink_to(precious)
    with pytest.raises(SocketError, match="cannot make the lock"):
        Listener(str(tmp_path / "s"))
    assert precious.read_bytes() == PRECIOUS
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("rows", "each"), [(1, 2 << 20), (80, 900_000)])
def test_a_journal_that_would_fill_the_memory_is_moved_aside(
    tmp_path: Path, rows: int, each: int
) -> None:
    file, _ = journal_file.open_journal(tmp_path, pasts_max=100, wall_s=1.0)
    file.close()
    with sqlite3.connect(tmp_path / journal_file.NAME) as connection:
        for number in range(1, rows + 1):
            connection.execute("INSERT INTO execs VALUES(?, zeroblob(?))", (number, each))
    connection.close()
    file, kept = journal_file.open_journal(tmp_path, pasts_max=100, wall_s=1.0)
    file.close()
    assert kept.moved is not None
    assert "too big" in kept.moved or "more than we ever write" in kept.moved
    assert kept.pasts == []
