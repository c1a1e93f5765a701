"""Daemons and cgroups for the tests at real limits."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests import needs
from tests.harness import RunnerdProcess, daemons, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V1: Final = Path("/sys/fs/cgroup")


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., RunnerdProcess]]:
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def make_group() -> Iterator[Callable[[str, dict[str, str]], Path]]:
    """Make a cgroup of one controller, set its files; it is emptied and removed at the end."""
    needs.root()
    made: list[Path] = []

    def make(controller: str, files: dict[str, str]) -> Path:
        base = V1 / controller
        if not os.access(base / "cgroup.procs", os.W_OK):
            needs.skip_or_fail(f"needs a writable cgroup v1 {controller} hierarchy")
        group = base / f"runnerd-test-{os.getpid()}-{len(made)}"
        group.mkdir()
        made.append(group)
        for name, text in files.items():
            (group / name).write_text(text)
        return group

    yield make
    for group in made:
        wait_for(functools.partial(is_removed, group))


def is_removed(group: Path) -> bool:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):
        group.rmdir()
        return True
    return False
