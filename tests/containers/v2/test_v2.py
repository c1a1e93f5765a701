"""A whole cgroup v2: whom the kernel kills at a limit, group kills, and an exec's memory leaf."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.containers.test_memory import eat, inside
from tests.containers.v2.conftest import ROOT
from tests.daemon.looking import log_lines, planted, shim_of
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[..., Path]

MIB: Final = 1 << 20
LIMIT: Final = 160 * MIB
SCORE: Final = 500
WAIT_S: Final = 200.0  # the processor is emulated
FORKS: Final = """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    if os.fork() == 0:
                        time.sleep(900)
                except OSError:
                    pass
                time.sleep(0.02)
    except OSError:
        pass
    time.sleep(0.02)
"""


def ended(client: RawClient, exec_id: str) -> dict[str, Any]:
    its_exit: dict[str, Any] = client.call(
        "exec.wait", exec_id=exec_id, until="closed", timeout_s=WAIT_S
    )
    return its_exit


def eaten(client: RawClient, exec_id: str, **more: Any) -> dict[str, Any]:
    """Return the exit of one that takes more memory than there is."""
    eat(client, exec_id, **more)
    its_exit = ended(client, exec_id)
    assert (its_exit["signal"], its_exit["reason"], its_exit["forced"]) == (
        signal.SIGKILL,
        "exited",
        False,
    )
    return its_exit


def leaf_of(pid: int) -> Path:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return ROOT / next(line[4:] for line in lines if line.startswith("0::"))


def folders() -> list[str]:
    return [each for each, _, _ in os.walk(ROOT) if Path(each).name.startswith("runnerd-")]


def wait_until_no_leaf_is_left(client: RawClient) -> None:
    def is_tidy() -> bool:
        (folder,) = folders()
        leaves = [each for each in Path(folder).iterdir() if each.is_dir()]
        parked: int = client.call("daemon.info")["parked_shims"]
        return len(leaves) == parked

    wait_for(is_tidy, 30)


def apart(make_group: MakeGroup, start_daemon: Start, **files: str | int) -> RunnerdProcess:
    """Start a daemon in one cgroup, its leaves in another, as a spawner does that delegates."""
    box = make_group("rd-box", memory__max=LIMIT, **files)
    (box / "cgroup.subtree_control").write_text("+memory +pids")
    own, leaves = make_group("daemon", box), make_group("leaves", box)
    return start_daemon("--oom-score", "keep", "--cgroups", str(leaves), prepare=inside(own, SCORE))


def test_in_its_own_cgroup_the_hog_dies_and_the_daemon_lives(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    box = make_group("rd-box", memory__max=LIMIT)
    daemon = start_daemon("--oom-score", "keep", prepare=inside(box, SCORE))
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        # Where processes are no controller can be given on: no memory of its own for a leaf.
        assert (info["kill_leaves"], info["memory_leaves"]) == (True, False)
        order = info["oom_order"]
        assert (order["cgroup_version"], order["limit_bytes"]) == (2, LIMIT)
        assert (order["verdict"], order["protects_up_to_bytes"]) == (
            "protected",
            LIMIT * (900 - SCORE) // 1000,
        )
        for number in range(2):
            assert eaten(client, f"e{number}")["oom"] == {"verdict": "killed", "kills": 1}
        client.call("exec.start", exec_id="other", argv=["sleep", "900"])
        assert eaten(client, "beside")["oom"] == {"verdict": "possible", "kills": 1}
        client.call("exec.cancel", exec_id="other", grace_s=0)
        assert ended(client, "other")["oom"]["verdict"] in ("none", "child")
        wait_until_no_leaf_is_left(client)
    assert daemon.process.poll() is None
    assert daemon.stop() == 0
    assert folders() == []


def test_the_twin_with_equal_scores_and_a_fat_daemon_loses_the_daemon(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    box = make_group("rd-box", memory__max=LIMIT)
    fat = f"held = bytearray(b'x' * 4096) * {90 * MIB // 4096}\n"
    daemon = start_daemon(
        "--oom-score", "keep", "--command-oom-score", "keep",
        prepare=inside(box, SCORE), **planted(fat),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        eat(client, "e")
        assert daemon.process.wait(WAIT_S) == -signal.SIGKILL


def test_a_memory_leaf_says_who_was_killed_whoever_runs_beside(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    daemon = apart(make_group, start_daemon)
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        assert (info["kill_leaves"], info["memory_leaves"]) == (True, True)
        assert info["oom_order"]["limit_bytes"] == LIMIT  # though it is the one above its own
        other = client.call("exec.start", exec_id="other", argv=["sleep", "900"])["pid"]
        assert leaf_of(other).parent.parent == ROOT / "rd-box/leaves"
        assert leaf_of(shim_of(daemon, other)) == ROOT / "rd-box/daemon"
        for number in range(3):
            its_exit = eaten(client, f"e{number}")
            assert its_exit["oom"] == {"verdict": "killed", "kills": 1}
            assert its_exit["peak_tasks"] == 1
        client.call("exec.cancel", exec_id="other", grace_s=0)
        its_exit = ended(client, "other")
        assert its_exit["oom"] == {"verdict": "none", "kills": 0}
        wait_until_no_leaf_is_left(client)
    assert daemon.process.poll() is None


def test_a_limit_set_on_one_leaf_is_that_execs_alone(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    daemon = apart(make_group, start_daemon)
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", 'read word; exec "$@"', "sh", sys.executable, "-I", "-S", "-c"]
        argv.append("held = [bytearray(b'x' * 4096) * 256 for _ in range(400)]")
        pid = client.call("exec.start", exec_id="e", argv=argv, stdin="pipe")["pid"]
        (leaf_of(pid) / "memory.max").write_text(str(30 * MIB))
        client.call("exec.write", exec_id="e", data="Cg==", eof=True)
        its_exit = ended(client, "e")
        assert its_exit["oom"]["verdict"] == "killed"
        assert its_exit["peak_rss_bytes"] < 45 * MIB


def test_a_fork_storm_is_gone_and_its_tasks_were_counted(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    daemon = apart(make_group, start_daemon)
    with RawClient(daemon.socket_path) as client:
        argv = [sys.executable, "-I", "-S", "-c", FORKS]
        pid = client.call("exec.start", exec_id="storm", argv=argv)["pid"]
        leaf = leaf_of(pid)
        (leaf / "pids.max").write_text("80")
        wait_for(lambda: len((leaf / "cgroup.procs").read_text().split()) >= 70, 60)
        answer = client.call("exec.cancel", exec_id="storm", grace_s=0)
        assert answer["outcome"] == "ended"
        its_exit = ended(client, "storm")
        assert 70 <= its_exit["peak_tasks"] <= 81
        wait_for(lambda: not leaf.exists(), 30)


@pytest.mark.parametrize("above", [False, True])
def test_a_group_kill_is_warned_of_and_the_warning_is_true(
    start_daemon: Start, make_group: MakeGroup, above: bool
) -> None:
    files: dict[str, str | int] = {"memory__oom__group": 1}
    if above:
        daemon = apart(make_group, start_daemon, **files)
    else:
        box = make_group("rd-box", memory__max=LIMIT, **files)
        daemon = start_daemon("--oom-score", "keep", prepare=inside(box, SCORE))
    with RawClient(daemon.socket_path) as client:
        order = client.call("daemon.info")["oom_order"]
        assert (order["group_kill"], order["verdict"]) == (True, "group_kill")
        assert any("oom.group" in line["warning"] for line in log_lines(daemon, "boot_warning"))
        eat(client, "e")
        assert daemon.process.wait(WAIT_S) == -signal.SIGKILL  # whatever the scores


def test_what_a_killed_daemon_left_of_its_cgroups_goes_with_the_next(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    box = make_group("rd-box")
    daemon = start_daemon(prepare=inside(box))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
    (left,) = folders()
    daemon.process.kill()
    daemon.process.wait(WAIT_S)
    start_daemon(prepare=inside(box))
    wait_for(lambda: left not in folders(), 30)
    assert len(folders()) == 1
