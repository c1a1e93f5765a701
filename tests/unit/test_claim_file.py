"""claim.json: whole or not there, and never taken for nobody's because it cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.core.claim import UNKNOWN, Standing
from runnerd.daemon import claim_file
from runnerd.daemon.claim_file import NAME, find_claim, write_claim
from runnerd.protocol.sandbox_answers import Claim

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM = Claim(owner="spawner 'ä'", claimed_at=1.7e9, incarnation="i", fence=2**63 - 1)
STANDING = Standing(CLAIM, "n")


def text(**changes: object) -> bytes:
    record = {"schema": 1, "owner": "o", "claimed_at": 5.0, "incarnation": "i", "fence": 1}
    return json.dumps(record | changes).encode()


def test_what_is_written_is_found_again_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    assert find_claim(tmp_path) == (None, None, None, False)
    for standing in (Standing(CLAIM), STANDING):
        write_claim(tmp_path, standing)
        assert find_claim(tmp_path) == (standing, None, None, False)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        text()[:-5],
        b"\xff\xfe",
        b"[" * 60_000,
        b"x" * 100_000,
        text(schema="1"),
        text(owner=""),
        text(owner="x" * 257),
        text(owner=None),
        text(claimed_at=1e300),
        text(claimed_at="now"),
        text(fence=0),
        text(fence=2**63),
        text(nonce=1),
    ],
    ids=range(16),
)
def test_what_is_damaged_is_somebodys_until_the_next_claim(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    found = find_claim(tmp_path)
    assert (found.standing, found.reason) == (Standing(UNKNOWN), None)
    assert "cannot be read" in str(found.warning)
    assert (tmp_path / NAME).read_bytes() == content
    write_claim(tmp_path, STANDING)
    assert find_claim(tmp_path).standing == STANDING


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_file_of_ours_is_not_followed(tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "real").write_bytes(text())
        (tmp_path / NAME).symlink_to("real")
    elif kind == "folder":
        (tmp_path / NAME).mkdir()
    else:
        os.mkfifo(tmp_path / NAME)
    assert find_claim(tmp_path).standing == Standing(UNKNOWN)


def test_a_newer_versions_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(text(schema=2, owner=["another", "form"]))
    found = find_claim(tmp_path)
    assert (found.standing, found.is_left_alone) == (Standing(UNKNOWN), True)
    assert "has schema 2 and this runnerd knows 1; it is left alone" in str(found.reason)
    assert found.reason is not None
    assert found.reason in str(found.warning)


def test_fields_of_a_later_release_of_the_same_schema_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(text(more=1))
    standing = find_claim(tmp_path).standing
    assert standing is not None
    assert standing.claim.owner == "o"


def test_what_lies_at_the_place_it_is_written_first_is_taken_away(tmp_path: Path) -> None:
    """Of a daemon killed while writing, or put there by somebody: never written through."""
    target = tmp_path / "target"
    target.write_bytes(b"untouched")
    (tmp_path / claim_file._FRESH).symlink_to(target)
    write_claim(tmp_path, STANDING)
    assert target.read_bytes() == b"untouched"
    assert find_claim(tmp_path).standing == STANDING


CALLS = ["open", "write", "fsync", "rename"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_the_one_before_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    write_claim(tmp_path, STANDING)
    newer = Standing(Claim(owner="newer", claimed_at=6.0, incarnation="j", fence=7))
    owner = Path if call == "rename" else os
    real: Callable[..., object] = getattr(owner, call)
    left = nth

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing)
        try:
            write_claim(tmp_path, newer)
        except OSError:
            pass
        else:
            assert left > 0  # it was never called so often
    found = find_claim(tmp_path)
    assert found.standing in (STANDING, newer)
    assert found.standing == newer or left <= 0
    assert [path.name for path in tmp_path.iterdir()] in ([NAME], [claim_file._FRESH, NAME])


def test_it_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(fd: int) -> None:
        calls.append("folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "file")
        fsync(fd)

    def watched_rename(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write_claim(tmp_path, STANDING)
    assert calls == ["file", "rename", "folder"]
