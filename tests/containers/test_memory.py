"""At a real memory limit the command dies and the daemon lives; with no pid left a start works."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.daemon.looking import planted
from tests.harness import RunnerdProcess
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[[str, dict[str, str]], Path]

MIB: Final = 1 << 20
LIMIT: Final = 300 * MIB

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
            eat(client, f"m{number}", most=100, admission="skip")
        time.sleep(1)
        for number in range(6):
            client.call("exec.cancel", exec_id=f"m{number}", grace_s=0)
        assert client.call("ping") == {}
    assert daemon.stop() == 0
