"""Daemons and cgroups for the tests at real limits."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests import needs
from tests.containers import engine as engines
from tests.containers import images
from tests.containers.container import Container
from tests.harness import RunnerdProcess, daemons, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.containers.engine import Engine

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


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker Engine of the run's own, with the images; nothing of it is left at the end."""
    needs.root()
    for name in ("dpkg-deb", "setpriv", "gcc", "tini-static"):
        needs.program(name, {"setpriv": "util-linux", "tini-static": "tini"}.get(name, ""))
    engines.sweep_stale()
    try:
        engines.fetch(images.KEPT / "engine")
        running = engines.Engine(images.KEPT / "engine")
    except (engines.EngineError, OSError) as error:
        needs.skip_or_fail(f"needs a Docker Engine: {error}")
    try:
        images.make(running)
        yield running
    finally:
        running.stop()


@pytest.fixture
def container(engine: Engine) -> Iterator[Callable[..., Container]]:
    """Start containers; at the end they are removed, and nothing of them may be left."""
    mounts = engine.mounts()
    made: list[Container] = []

    def start(*args: Any, ready: bool = True, **more: Any) -> Container:
        made.append(Container(engine, *args, **more))
        if ready:
            made[-1].wait_ready()
        return made[-1]

    yield start
    for each in made:
        each.remove()
    assert engine.groups() == []
    wait_for(lambda: engine.mounts() == mounts)
