"""The state directory: made for us alone, and not used where others could write in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runnerd.daemon.state import LOCK_NAME, StateDirectory, StateUnusableError, find_state
from tests import needs


def why_not(path: Path) -> str:
    with pytest.raises(StateUnusableError) as caught:
        StateDirectory(str(path))
    return str(caught.value)


def test_it_is_made_for_us_alone(tmp_path: Path) -> None:
    assert StateDirectory(str(tmp_path / "state")).path == tmp_path / "state"
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_its_parent_is_not_made(tmp_path: Path) -> None:
    assert "cannot make" in why_not(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_where_others_can_write_it_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    assert f"can be written by others (mode {mode:04o})" in why_not(tmp_path / "state")
    assert not list((tmp_path / "state").iterdir())


def test_somebody_elses_is_not_used(tmp_path: Path) -> None:
    needs.root()
    (tmp_path / "state").mkdir(0o755)
    os.chown(tmp_path / "state", 1234, 1234)
    assert "belongs to uid 1234" in why_not(tmp_path / "state")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "state").symlink_to("real")
    assert "is a symbolic link" in why_not(tmp_path / "state")
    assert not list((tmp_path / "real").iterdir())


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_lock_that_is_no_file_is_no_lock(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / LOCK_NAME
    if kind == "link":
        lock.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    tmp_path.chmod(0o700)
    if kind == "fifo":
        assert "is no plain file" in why_not(tmp_path)
    else:
        assert "cannot write" in why_not(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_its_place_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert "Not a directory" in why_not(tmp_path / "state")


def test_a_second_one_is_refused_as_long_as_the_first_is_held(tmp_path: Path) -> None:
    first = StateDirectory(str(tmp_path / "state"))
    assert "another runnerd uses" in why_not(tmp_path / "state")
    first.close()
    StateDirectory(str(tmp_path / "state")).close()


def test_the_default_is_looked_for_and_the_reasons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runnerd.daemon.state.DEFAULT", str(tmp_path / "none" / "here"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found, why = find_state(None)
    assert found is not None
    assert found.path == tmp_path / "runnerd"
    assert why is None
    found.close()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert find_state(None)[0] is None
    monkeypatch.delenv("XDG_STATE_HOME")
    found, why = find_state(None)
    assert found is None
    assert why is not None
    assert str(tmp_path / "none") in why
    assert find_state(str(tmp_path / "x" / "y"))[0] is None
