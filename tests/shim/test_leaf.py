"""A cgroup for the command: its child is made there, and the shim kills all of it at once."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.shimwire import Empty, Exited, Killed, LeafRefused, Parked
from tests.shim import seccomp
from tests.shim.harness import Shim, is_alive, job, spawn_shim, wait_until
from tests.shim.needs import need_v2_cgroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shim.conftest import Start

SYS_CLONE3 = 435  # on every architecture


@pytest.fixture
def leaf() -> Iterator[Path]:
    folder = need_v2_cgroup() / f"rd-shim-leaf-{os.getpid()}"
    folder.mkdir()
    yield folder

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    wait_until(is_removed, "an empty leaf")


def members(leaf: Path) -> set[int]:
    return set(map(int, (leaf / "cgroup.procs").read_text().split()))


def handing(folder: Path) -> Callable[[], None]:
    """What a shim is given it as: descriptor 5."""

    def prepare() -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(fd, 5)

    return prepare


@pytest.fixture
def shim(start: Start, leaf: Path) -> Shim:
    return start(prepare=handing(leaf))


def test_the_child_is_made_in_it_alone(shim: Shim, leaf: Path) -> None:
    (child,) = members(leaf)
    pid = shim.start(job("sleep", "99")).pid
    assert members(leaf) == {pid} == {child}
    shim.end(0)
    assert shim.wait_for(Exited).value == 9
    assert [each.pid for each in shim.wait_for(Killed).processes] == [pid]
    shim.wait_for(Empty)
    assert not shim.heard(LeafRefused)
    assert not members(leaf)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_without_clone3_the_child_enters_it(start: Start, leaf: Path, number: int) -> None:
    def prepare() -> None:
        handing(leaf)()
        seccomp.refuse(number, SYS_CLONE3)

    shim = start(prepare=prepare)
    text, _ = shim.output(job("grep", "^0::", "/proc/self/cgroup"))
    assert text.decode().strip().endswith("/" + leaf.name)
    assert not shim.heard(LeafRefused)


def test_a_refusal_is_told_and_the_command_runs(start: Start, leaf: Path) -> None:
    """A leaf that was removed can neither be forked into nor entered."""

    def prepare() -> None:
        gone = leaf / "gone"
        gone.mkdir()
        handing(gone)()
        gone.rmdir()

    shim = start(prepare=prepare)
    text, _ = shim.output(job("echo", "here"))
    assert text == b"here\n"
    assert shim.heard(LeafRefused) == [LeafRefused(errno.ENOENT)]


@pytest.mark.parametrize("path", ["/dev/null", "/tmp", "/sys/fs/cgroup/pids"])
def test_what_is_no_cgroup_v2_is_closed(start: Start, path: str) -> None:
    if not Path(path).exists():
        path = "/"

    def prepare() -> None:
        os.dup2(os.open(path, os.O_RDONLY), 5)

    shim = start(prepare=prepare)
    assert str(Path(f"/proc/{shim.pid}/fd/5").readlink()) != path  # a socket of its own, by now
    text, _ = shim.output(job("echo", "here"))
    assert text == b"here\n"
    assert not shim.heard(LeafRefused)


def test_the_command_has_none_of_its_files(shim: Shim) -> None:
    text, _ = shim.output(job("ls", "-l", "/proc/self/fd"))
    assert b"cgroup" not in text


def test_who_left_the_tree_is_killed_with_the_leaf(shim: Shim, leaf: Path) -> None:
    """A process of somebody else's below, put into the leaf: no walk of the tree can find it."""
    shim.start(job("sleep", "99"))
    stranger = os.fork()
    if stranger == 0:
        (leaf / "cgroup.procs").write_text("0")
        time.sleep(99)
        os._exit(0)
    wait_until(lambda: stranger in members(leaf), "the stranger in the leaf")
    shim.end(0)
    shim.wait_for(Empty)
    try:
        wait_until(lambda: not is_alive(stranger), "the end of the stranger")
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


def test_a_fork_bomb_ends_at_once_and_is_counted(shim: Shim, leaf: Path) -> None:
    script = "for i in $(seq 100); do (while :; do sleep 0.01; done) & done; wait"
    shim.start(job("sh", "-c", script))
    wait_until(lambda: len(members(leaf)) > 100)
    before = members(leaf)
    shim.end(0)
    killed = shim.wait_for(Killed)
    shim.wait_for(Empty)
    assert killed.total >= 100
    assert not any(is_alive(pid) for pid in before)


def test_a_hang_up_kills_the_leaf_without_a_daemon(shim_program: Path, leaf: Path) -> None:
    shim = spawn_shim(shim_program)
    try:
        assert isinstance(shim.next(), Parked)
        shim.start(job("sh", "-c", "trap : TERM; sleep 98 & while :; do wait; done"))
    finally:
        shim.close()
    assert not members(leaf)
