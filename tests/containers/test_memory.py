"""At a real memory limit the command dies and the daemon lives; with no pid left a start works."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests import needs
from tests.daemon.looking import planted
from tests.harness import RunnerdProcess, daemons, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[[str, dict[str, str]], Path]

MIB: Final = 1 << 20
LIMIT: Final = 300 * MIB
V1: Final = Path("/sys/fs/cgroup")

EAT: Final = """
import mmap, os, sys, time
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
most = int(sys.argv[2])
held = []
while len(held) < most:
    held.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for at in range(0, 1 << 20, 4096):
        held[-1][at] = 1
time.sleep(60)
"""
"""Eat memory: how many processes, and how many MiB each at most."""


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Start]:
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
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
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        wait_for(functools.partial(is_removed, group))


def is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
        return True
    return False


def inside(group: Path, score: int | None = None) -> Callable[[], None]:
    def enter() -> None:
        (group / "cgroup.procs").write_text("0")
        if score is not None:
            Path("/proc/self/oom_score_adj").write_text(str(score))

    return enter


def eat(client: RawClient, exec_id: str, processes: int = 1, most: int = 4096, **more: Any) -> None:
    argv = [sys.executable, "-I", "-c", EAT, str(processes), str(most)]
    client.call("exec.start", exec_id=exec_id, argv=argv, **more)


def memory_group(make_group: MakeGroup) -> Path:
    return make_group("memory", {"memory.limit_in_bytes": str(LIMIT)})


def test_the_hog_dies_and_the_daemon_lives_20_of_20(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    group = memory_group(make_group)
    daemon = start_daemon("--oom-score", "keep", prepare=inside(group, 500))
    with RawClient(daemon.socket_path) as client:
        order = client.call("daemon.info")["oom_order"]
        assert (order["room"], order["verdict"], order["cgroup_version"]) == (400, "protected", 1)
        assert order["limit_bytes"] == LIMIT
        assert order["protects_up_to_bytes"] == LIMIT * 400 // 1000
        for number in range(20):
            eat(client, f"e{number}")
            # Closed, or the next one would not be alone, and the verdict only `possible`.
            its_exit = client.call("exec.wait", exec_id=f"e{number}", until="closed", timeout_s=30)
            assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGKILL, "exited")
            assert its_exit["forced"] is False
            assert its_exit["oom"] == {"verdict": "killed", "kills": 1}, its_exit["oom"]
        assert daemon.process.poll() is None
        assert "runnerd_oom_kills_total 20.0" in client.call("daemon.metrics")["text"]
    assert daemon.stop() == 0


def test_the_twin_without_the_raise_and_with_a_fat_daemon_loses_the_daemon(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    """The test above can fail: with equal scores the bigger one dies, and that is the daemon."""
    group = memory_group(make_group)
    fat = f"import mmap\nheld = bytearray(b'x' * 4096) * {160 * MIB // 4096}\n"
    daemon = start_daemon(
        "--oom-score", "keep", "--command-oom-score", "keep",
        prepare=inside(group, 500), **planted(fat),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["rss_bytes"] > 160 * MIB
        eat(client, "e")
        assert daemon.process.wait(30) == -signal.SIGKILL


def test_many_middling_eaters_die_one_by_one_and_the_daemon_lives(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    group = memory_group(make_group)
    daemon = start_daemon("--oom-score", "keep", prepare=inside(group, 500))
    with RawClient(daemon.socket_path) as client:
        eat(client, "e", processes=6)
        its_exit = client.call("exec.wait", exec_id="e", until="closed", timeout_s=60)
        assert its_exit["oom"]["verdict"] in ("killed", "child")
        kills = (group / "memory.oom_control").read_text().split()[-1]
        print(f"six eaters: {kills} kills")
        assert int(kills) >= 5
        for number in range(6):
            eat(client, f"m{number}", most=100)
        time.sleep(1)
        for number in range(6):
            client.call("exec.cancel", exec_id=f"m{number}", grace_s=0)
        assert client.call("ping") == {}
    assert daemon.stop() == 0


def test_a_start_works_when_no_pid_is_free(start_daemon: Start, make_group: MakeGroup) -> None:
    """A parked pair costs no fork: the rescue lane. Without one the kernel's error is told."""
    group = make_group("pids", {"pids.max": "200"})
    daemon = start_daemon("--parked-shims", "2", prepare=inside(group))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="filler", argv=["sleep", "900"])
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 2)
        now = (group / "pids.current").read_text().strip()
        (group / "pids.max").write_text(now)
        for number in range(2):
            client.call("exec.start", exec_id=f"rescue{number}", argv=["echo", "here"], attach={})
        for number in range(2):
            assert client.note("exec.exited", f"rescue{number}")["exit"]["code"] == 0
            assert client.output(f"rescue{number}") == b"here\n"
        (group / "pids.max").write_text("1")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] < 2 or True)
        seen = set()
        for number in range(8):
            try:
                client.call("exec.start", exec_id=f"more{number}", argv=["sleep", "900"])
            except RawError as error:
                seen.add((error.kind, error.data.get("stage"), error.data.get("errno_name")))
        assert seen == {("start_failed", "spawn", "EAGAIN")}
        (group / "pids.max").write_text("200")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 2)
        client.call("exec.start", exec_id="again", argv=["true"])
        assert client.call("exec.wait", exec_id="again")["code"] == 0
        assert client.call("daemon.info")["stray_failures"] == 0


def test_a_stop_at_the_pids_limit_is_in_time(start_daemon: Start, make_group: MakeGroup) -> None:
    group = make_group("pids", {"pids.max": "200"})
    daemon = start_daemon(prepare=inside(group))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        (group / "pids.max").write_text("1")
        began_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began_s < 1
