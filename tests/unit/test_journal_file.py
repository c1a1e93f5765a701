"""The journal's file: what is written is read again, and what is not ours is not believed."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd.core.past import PackedPast, Past, look_into, pack_past
from runnerd.daemon.journal_file import (
    ASIDE,
    NAME,
    VERSION,
    JournalError,
    JournalFile,
    Kept,
    open_journal,
)

WALL_S = 1_700_000_000.0


def past(number: int, exec_id: str | None = None, pid: int | None = None) -> Past:
    return Past(
        exec_id=exec_id or f"e{number}",
        number=number,
        incarnation="i",
        nonce="n",
        digest=b"d" * 32,
        accepted_at=WALL_S,
        pid=pid,
        oom_score_adj=900,
        journaled=True,
        exit=None,
        closed=None,
        transcript="kept",
        argv=["true"],
        cwd="/",
        user=None,
        labels={"a": "b"},
    )


def packed(*pasts: Past) -> list[PackedPast]:
    return [look_into(pack_past(each)) for each in pasts]


def opened(folder: Path, pasts_max: int = 100) -> tuple[JournalFile, Kept]:
    return open_journal(folder, pasts_max=pasts_max, wall_s=WALL_S)


def left_by(folder: Path, pasts_max: int = 100) -> Kept:
    """What the next incarnation finds."""
    file, kept = opened(folder, pasts_max)
    file.close()
    return kept


def put(folder: Path, *pasts: Past, **meta: int) -> None:
    file, _ = opened(folder)
    file.write({each.number: each for each in pasts}, meta, anew=False)
    file.close()


def edit(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(folder / NAME)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_new_journal_knows_nothing(tmp_path: Path) -> None:
    assert left_by(tmp_path) == Kept(pasts=[], starts=0, fence=None, dropped=0)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_what_was_written_is_found(tmp_path: Path) -> None:
    put(tmp_path, past(1), past(2), fence=7, dropped=1)
    put(tmp_path, past(2, pid=44))
    kept = left_by(tmp_path)
    assert kept == Kept(pasts=packed(past(1), past(2, pid=44)), starts=2, fence=7, dropped=1)


def test_what_was_committed_outlives_the_process(tmp_path: Path) -> None:
    """The writer is a process of its own that ends without any tear-down."""
    pid = os.fork()
    if not pid:
        file, _ = opened(tmp_path)
        file.write({1: past(1)}, {}, anew=False)
        file.write({2: past(2), 3: past(3)}, {"fence": 3}, anew=False)
        os._exit(0)
    os.waitpid(pid, 0)
    assert left_by(tmp_path) == Kept(packed(past(1), past(2), past(3)), 3, 3, 0)


@given(
    st.lists(
        st.dictionaries(st.integers(1, 30), st.booleans(), min_size=1, max_size=5), max_size=10
    )
)
@settings(max_examples=50, deadline=None)
def test_rows_come_and_go_and_the_count_of_starts_only_grows(
    tmp_path_factory: pytest.TempPathFactory, batches: list[dict[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    file, _ = opened(folder)
    expected: dict[int, Past] = {}
    for batch in batches:
        rows = {number: past(number) if stays else None for number, stays in batch.items()}
        file.write(rows, {}, anew=False)
        for number, row in rows.items():
            expected.pop(number, None)
            if row is not None:
                expected[number] = row
    file.close()
    kept = left_by(folder)
    assert kept.pasts == packed(*(expected[number] for number in sorted(expected)))
    assert kept.starts == max((number for batch in batches for number in batch), default=0)


def test_written_anew_it_holds_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, past(1), past(2), past(9))
    file, _ = opened(tmp_path)
    file.write({2: past(2, pid=5)}, {"fence": 4}, anew=True)
    file.close()
    assert left_by(tmp_path) == Kept(packed(past(2, pid=5)), 9, 4, 0)


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    file.write({1: past(1)}, {}, anew=False)
    with pytest.raises(OverflowError):
        file.write({2: past(2), 2**63: past(3)}, {"fence": 1}, anew=True)
    file.write({4: past(4)}, {}, anew=False)
    file.close()
    assert left_by(tmp_path).pasts == packed(past(1), past(4))


def test_beyond_the_bound_only_the_newest_are_known_and_the_rest_is_said_to_be_dropped(
    tmp_path: Path,
) -> None:
    put(tmp_path, *map(past, range(1, 11)))
    kept = left_by(tmp_path, pasts_max=4)
    assert [each.number for each in kept.pasts] == [7, 8, 9, 10]
    assert kept.dropped == 6
    assert len(left_by(tmp_path).pasts) == 4  # the others have left the file as well


def test_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path, past(1))
    edit(tmp_path, f"PRAGMA user_version={VERSION + 1}")
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(JournalError, match=f"has version {VERSION + 1}"):
        opened(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before
    assert not list(tmp_path.glob(ASIDE + "*"))


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA application_id=1",
        "CREATE TRIGGER t AFTER INSERT ON execs BEGIN DELETE FROM execs; END",
        "CREATE TABLE more(x)",
        "DROP TABLE meta",
        "UPDATE execs SET past=x'00'",
        "UPDATE execs SET past='text'",
        "UPDATE execs SET number=5",
    ],
)
def test_what_is_not_ours_is_moved_aside_and_a_new_one_begun(
    tmp_path: Path, statement: str
) -> None:
    put(tmp_path, past(1))
    edit(tmp_path, statement)
    kept = left_by(tmp_path)
    assert kept.pasts == []
    assert kept.moved is not None
    assert f"{ASIDE}{int(WALL_S)}" in kept.moved
    assert (tmp_path / f"{ASIDE}{int(WALL_S)}").exists()
    assert left_by(tmp_path).moved is None


@pytest.mark.parametrize("damage", ["no database at all" * 100, "torn"])
def test_a_damaged_file_is_moved_aside_and_one_such_is_kept(tmp_path: Path, damage: str) -> None:
    for wall_s in (WALL_S, WALL_S + 60):
        put(tmp_path, *map(past, range(1, 100)))
        if damage == "torn":
            content = (tmp_path / NAME).read_bytes()
            (tmp_path / NAME).write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
        else:
            (tmp_path / NAME).write_text(damage)
        file, kept = open_journal(tmp_path, pasts_max=100, wall_s=wall_s)
        file.close()
        assert kept.moved is not None
    assert [path.name for path in tmp_path.glob(ASIDE + "*")] == [f"{ASIDE}{int(WALL_S + 60)}"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    put(tmp_path, past(1))
    (tmp_path / "folder" / NAME).symlink_to(tmp_path / NAME)
    with pytest.raises(JournalError, match="no plain file"):
        opened(tmp_path / "folder")
    (tmp_path / "folder" / NAME).unlink()
    os.link(tmp_path / NAME, tmp_path / "folder" / NAME)
    with pytest.raises(JournalError, match="no plain file"):
        opened(tmp_path / "folder")


def test_one_that_somebody_else_has_open_is_not_used(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    file.write({1: past(1)}, {}, anew=False)
    pid = os.fork()
    if not pid:
        try:
            opened(tmp_path)
        except JournalError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    file.close()


def test_the_file_and_its_log_stay_small_whatever_is_written(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    for number in range(1, 20_000):
        file.write({number: past(number), number - 50: None}, {"dropped": number}, anew=False)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    file.close()
    assert size < 4 * 1024 * 1024
    assert (tmp_path / NAME).stat().st_size < 100_000


@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed", "folder replaced"])
def test_a_file_that_nobody_will_find_again_is_not_written(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    file, _ = opened(folder)
    file.write({1: past(1)}, {}, anew=False)
    if how.startswith("folder"):
        folder.rename(tmp_path / "moved")
    else:
        (folder / NAME).rename(tmp_path / "moved")
    if how == "folder replaced":
        folder.mkdir()
    if how.endswith("replaced"):
        (folder / NAME).write_bytes(b"")
    for number in (2, 3):
        with pytest.raises(file.errors):
            file.write({number: past(number)}, {}, anew=number == 3)
    file.close()
