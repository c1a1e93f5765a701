"""The rescue lane: with no pid, descriptor or memory left, a sandbox can be looked at and ended.

`ping`, `exec.list`, `exec.cancel` and `daemon.stop` need none, and one start with `admission: skip`
takes what is held back for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests import needs
from tests.containers.test_memory import EAT, LIMIT, MIB, inside
from tests.daemon.looking import last_words, living, shim_of
from tests.harness import RunnerdProcess, descendants, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[[str, dict[str, str]], Path]

ANSWER_S: Final = 2.0
STORM: Final = ["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 900"]
"""Every process of it makes two more, and none stays to be found."""
STORMS: Final = 10


def threads(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


def refused(client: RawClient, exec_id: str, **fields: Any) -> tuple[str, Any, Any]:
    """Start something that cannot be started now; returns kind, stage and errno name."""
    with pytest.raises(RawError) as caught:
        client.call("exec.start", exec_id=exec_id, argv=["sleep", "900"], **fields)
    return caught.value.kind, caught.value.data.get("stage"), caught.value.data.get("errno_name")


def rescue(client: RawClient, exec_id: str = "rescue") -> None:
    """Run a command by what is held back, and see its output."""
    argv = ["sh", "-c", "read word; echo got $word; echo err >&2"]
    client.call(
        "exec.start",
        exec_id=exec_id,
        argv=argv,
        attach={},
        admission="skip",
        stdin="pipe",
    )
    client.call("exec.write", exec_id=exec_id, data="YWJjCg==", eof=True)
    assert client.note("exec.exited", exec_id)["exit"]["code"] == 0
    assert client.output(exec_id) == b"got abc\n"
    assert client.output(exec_id, "stderr") == b"err\n"


def check_lane(daemon: RunnerdProcess, client: RawClient, live: str) -> None:
    """What needs nothing works: look, and end one exec."""
    before = threads(daemon.pid)
    assert client.call("ping") == {}
    assert live in {each["exec_id"] for each in client.call("exec.list")["execs"]}
    answer = client.call("exec.cancel", exec_id=live, grace_s=0)
    assert answer["outcome"] == "ended"
    assert threads(daemon.pid) == before


# ---------------------------------------------------------------------------------------- pids


def full_of_pids(start_daemon: Start, make_group: MakeGroup) -> tuple[Path, RunnerdProcess]:
    group = make_group("pids", {"pids.max": "200"})
    return group, start_daemon(prepare=inside(group))


def test_one_pair_is_kept_for_a_rescue(start_daemon: Start, make_group: MakeGroup) -> None:
    """Other starts leave the last parked pair alone; a rescue takes it; then the truth is told."""
    group, daemon = full_of_pids(start_daemon, make_group)
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        (group / "pids.max").write_text("1")
        for number in range(2):
            client.call("exec.start", exec_id=f"parked{number}", argv=["sleep", "900"])
        for number in range(4):
            told = refused(client, f"more{number}")
            assert told == ("start_failed", "spawn", "EAGAIN")
        assert client.call("daemon.info")["parked_shims"] == 1
        argv = ["echo", "here"]
        client.call("exec.start", exec_id="rescue", argv=argv, attach={}, admission="skip")
        assert client.note("exec.exited", "rescue")["exit"]["code"] == 0
        assert client.output("rescue") == b"here\n"
        again = refused(client, "second", admission="skip")
        assert again == ("start_failed", "spawn", "EAGAIN")
        check_lane(daemon, client, "e")
        (group / "pids.max").write_text("200")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        client.call("exec.start", exec_id="after", argv=["true"])
        assert client.call("exec.wait", exec_id="after")["code"] == 0
        assert client.call("daemon.info")["stray_failures"] == 0


@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_stop_at_the_pids_limit_is_in_time(
    start_daemon: Start, make_group: MakeGroup, how: str
) -> None:
    group, daemon = full_of_pids(start_daemon, make_group)
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        (group / "pids.max").write_text("1")
        began_s = time.monotonic()
        if how == "request":
            client.call("daemon.stop")
        assert (daemon.stop() if how == "signal" else daemon.process.wait(10)) == 0
        assert time.monotonic() - began_s < 1


def test_no_path_of_the_lane_makes_a_thread(start_daemon: Start, tmp_path: Path) -> None:
    """As the kernel was asked: the daemon clones nobody but shims, by vfork."""
    strace = needs.program("strace")
    calls = tmp_path / "calls"
    daemon = start_daemon(wrapper=(strace, "-D", "-o", str(calls), "-e", "trace=process"))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        seen = len(calls.read_text().splitlines())
        rescue(client)
        check_lane(daemon, client, "e")
        client.call("daemon.stop")
    assert daemon.process.wait(10) == 0
    after = calls.read_text().splitlines()[seen:]
    made = [line for line in after if line.startswith(("clone", "fork", "vfork"))]
    assert made, "strace saw no shim being started"
    assert all("CLONE_VFORK" in line or line.startswith("vfork") for line in made), made


# --------------------------------------------------------------------------------- descriptors


def take_descriptors(pid: int) -> None:
    """Leave a process what it has: no number below the new limit is free."""
    used = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, 4096))


def give_descriptors(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))


def test_without_descriptors_a_rescue_works(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        for exec_id in ("e", "lost"):
            client.call("exec.start", exec_id=exec_id, argv=["sleep", "900"])
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        take_descriptors(daemon.pid)
        assert refused(client, "more") == ("start_failed", "spawn", "EMFILE")
        rescue(client)
        rescue(client, "another")  # what the first was lent is back after its end
        check_lane(daemon, client, "e")
        give_descriptors(daemon.pid)
        client.call("exec.start", exec_id="after", argv=["true"])
        assert client.call("exec.wait", exec_id="after")["code"] == 0
        take_descriptors(daemon.pid)
        client.call("daemon.stop")
    assert daemon.process.wait(10) == 0
    words = last_words(daemon.log_path.parent / "state")
    assert words["cause"] == "daemon.stop"
    assert words["stopped_at"] is not None


def test_without_descriptors_a_tree_without_its_shim_is_ended(start_daemon: Start) -> None:
    """The daemon looks at it with what is held back."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "setsid sleep 901 & sleep 902; :"]
        pid = client.call("exec.start", exec_id="e", argv=argv, grace_s=0)["pid"]
        tree = wait_for(lambda: found if len(found := descendants(pid)) == 2 else None)
        shim = shim_of(daemon, pid)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        take_descriptors(daemon.pid)
        os.kill(shim, signal.SIGKILL)
        wait_for(lambda: not living(tree | {pid}), 3)
        its_exit = client.call("exec.wait", exec_id="e", until="closed", timeout_s=5)
        assert its_exit["reason"] == "internal"
        give_descriptors(daemon.pid)


# -------------------------------------------------------------------------------------- memory


def test_without_address_space_the_lane_works(start_daemon: Start) -> None:
    """No arena, no stack for a new process: every mmap of the daemon's own is refused."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        rescue(client, "warm")
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (1 * MIB, resource.RLIM_INFINITY))
        rescue(client)
        check_lane(daemon, client, "e")
        client.call("daemon.stop")
    assert daemon.process.wait(10) == 0


def test_at_the_memory_limit_the_lane_works(start_daemon: Start, make_group: MakeGroup) -> None:
    """A command holds all but a little of the cgroup's memory; the rescue needs less than that."""
    group = make_group("memory", {"memory.limit_in_bytes": str(LIMIT)})
    daemon = start_daemon("--oom-score", "keep", prepare=inside(group, 500))
    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        used = int((group / "memory.usage_in_bytes").read_text())
        most = (LIMIT - used) // MIB - 16
        eat = EAT.replace("time.sleep", "print('full', flush=True); time.sleep")
        argv = ["python3", "-I", "-c", eat, "1", str(most)]
        client.call("exec.start", exec_id="hog", argv=argv, attach={})
        client.note("exec.output", "hog", 30)
        usage = group / "memory.usage_in_bytes"
        (group / "memory.limit_in_bytes").write_text(str(int(usage.read_text()) + MIB))
        rescue(client)
        check_lane(daemon, client, "hog")
    assert daemon.stop() == 0


# --------------------------------------------------------------------------------------- storm


def forks_refused(group: Path) -> int:
    """Return how often the limit has been met: a count, where pids.current is a moment's."""
    return int((group / "pids.events").read_text().split()[1])


def start_storm(client: RawClient, group: Path, exec_id: str) -> float:
    """Start one and wait until it meets the limit; returns when its deadline is."""
    before = forks_refused(group)
    client.call("exec.start", exec_id=exec_id, argv=STORM, deadline_s=2.0, grace_s=0.2)
    deadline_s = time.monotonic() + 2.0
    wait_for(lambda: forks_refused(group) > before)
    return deadline_s


def members(group: Path) -> set[int]:
    return set(map(int, (group / "cgroup.procs").read_text().split()))


def test_a_fork_storm_is_watched_ended_and_over_10_of_10(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    """Under a limit of 64 pids the list answers, the deadline ends all of it, and starts work."""
    group = make_group("pids", {"pids.max": "64"})
    daemon = start_daemon(prepare=inside(group))
    slowest_s = longest_s = 0.0
    with RawClient(daemon.socket_path) as client:
        for number in range(STORMS):
            wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
            exec_id = f"storm{number}"
            deadline_s = start_storm(client, group, exec_id)
            argv = ["echo", "here"]
            client.call("exec.start", exec_id=f"r{number}", argv=argv, admission="skip", attach={})
            rescued = client.note("exec.exited", f"r{number}")["exit"]
            assert rescued["code"] == 0, rescued
            while time.monotonic() < deadline_s:
                began_s = time.monotonic()
                listed = client.call("exec.list", usage=True)["execs"]
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                assert exec_id in {each["exec_id"] for each in listed}
            client.call("exec.wait", exec_id=exec_id, until="closed", timeout_s=10)
            longest_s = max(longest_s, time.monotonic() - deadline_s)
            left, known = members(group), descendants(daemon.pid)
            # Who left while we looked is not left: a shim whose exec is closed, say.
            assert left & members(group) <= {daemon.pid} | known
            client.call("exec.start", exec_id=f"next{number}", argv=["true"])
            assert client.call("exec.wait", exec_id=f"next{number}")["code"] == 0
        assert client.call("daemon.info")["stray_failures"] == 0
    print(f"slowest list {slowest_s:.3f} s, gone {longest_s:.3f} s after the deadline")
    assert slowest_s < ANSWER_S
    assert longest_s < 3.0
    with contextlib.suppress(OSError):
        assert daemon.stop() == 0
