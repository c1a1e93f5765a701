"""Tests that run in the guest (../guest.py) and nowhere else: they need all of a cgroup v2."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.harness import RunnerdProcess, daemons, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path("/sys/fs/cgroup")

if os.environ.get("RUNNERD_GUEST") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def only_in_the_guest() -> None:
    assert os.environ.get("RUNNERD_GUEST") == "1"


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., RunnerdProcess]]:
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def make_group() -> Iterator[Callable[..., Path]]:
    """Make a cgroup, with files of it set; all are emptied and removed at the end."""
    (ROOT / "cgroup.subtree_control").write_text("+memory +pids")
    made: list[Path] = []

    def make(name: str, parent: Path = ROOT, **files: str | int) -> Path:
        group = parent / name
        group.mkdir()
        made.append(group)
        for file, text in files.items():
            (group / file.replace("__", ".")).write_text(str(text))
        return group

    yield make
    for group in made:
        if group.parent == ROOT:
            remove(group)


def remove(group: Path) -> None:
    (group / "cgroup.kill").write_text("1")

    def is_gone() -> bool:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        return not group.exists()

    wait_for(is_gone, 30)
