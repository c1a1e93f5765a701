"""Cases from the field: an exec's status is the kernel's own, told once, and never made up."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import pytest

from runnerd.daemon.memory import Cgroup, find_cgroup, oom_order
from runnerd.protocol.framing import Encoding
from tests import needs
from tests.cases.looking import SLACK, records
from tests.harness import RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEMORY: Final = Path("/sys/fs/cgroup/memory")
HOG: Final = 'b"".join([b"x" * (400 << 20)])'


class MemoryCgroup:
    """A memory cgroup of the test's own, removed afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start processes inside: this one enters, and is back outside at the end."""
        back = find_cgroup().folder
        assert back is not None
        (self.folder / "cgroup.procs").write_text("0")
        try:
            yield
        finally:
            (back / "cgroup.procs").write_text("0")

    @property
    def kills(self) -> int:
        text = (self.folder / "memory.oom_control").read_text()
        return int(text.rpartition("oom_kill ")[2].split()[0])


@pytest.fixture
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A cgroup limited to 128 MiB."""
    needs.root()
    if not (MEMORY / "memory.limit_in_bytes").exists():
        needs.skip_or_fail("needs the memory controller of cgroup v1")
    folder = MEMORY / f"rd-case-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        needs.skip_or_fail(f"cannot make a memory cgroup: {error.strerror}")
    (folder / "memory.limit_in_bytes").write_text(str(128 << 20))
    yield MemoryCgroup(folder)
    for pid in (folder / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.fixture
def limited_daemon(
    memory_cgroup: MemoryCgroup, start_daemon: Callable[..., RunnerdProcess]
) -> RunnerdProcess:
    """A daemon inside that cgroup, its score as in a container."""
    with memory_cgroup.entered():
        return start_daemon()


def test_c114_what_the_counter_says_and_what_it_does_not(
    memory_cgroup: MemoryCgroup, limited_daemon: RunnerdProcess
) -> None:
    """A killed child, a killed command and none differ; among several execs it is `possible`."""
    greedy = [sys.executable, "-c", HOG]
    with limited_daemon.connect() as client:
        child = client.run(["sh", "-c", f"{sys.executable} -c '{HOG}'; echo rc=$?; exit 0"])
        assert (child.exit.code, child.stdout) == (0, b"rc=137\n")
        assert (child.exit.oom.kills, child.exit.oom.verdict) == (1, "child")
        assert child.exit.reason == "exited"

        wait_for(lambda: client.info().live_execs == 0)  # else it would not be alone
        killed = client.run(greedy).exit
        assert (killed.code, killed.signal, killed.reason) == (None, 9, "exited")
        assert (killed.oom.kills, killed.oom.verdict, killed.forced) == (1, "killed", False)

        quiet = client.run(["true"]).exit
        assert (quiet.code, quiet.oom.kills, quiet.oom.verdict) == (0, 0, "none")

        with client.start(["sleep", "1000.114"], attach=False):
            beside = client.run(greedy).exit
            assert (beside.signal, beside.oom.verdict) == (9, "possible")
        assert memory_cgroup.kills == 3


def test_c115_only_the_greedy_tree_dies(limited_daemon: RunnerdProcess) -> None:
    """Where the kernel kills one process at a time, the sleeper beside it and the daemon live."""
    with limited_daemon.connect() as client:
        sleeper = client.start(["sleep", "1000.115"], attach=False)
        assert client.run([sys.executable, "-c", HOG]).exit.signal == 9
        assert client.inspect(sleeper.exec_id).state == "running"
        assert sleeper.pid is not None
        assert is_alive(sleeper.pid)
        order = client.info().oom_order
        assert (order.cgroup_version, order.limit_bytes) == (1, 128 << 20)
        assert order.group_kill is None
        assert order.verdict != "group_kill"
        client.cancel(sleeper.exec_id, grace_s=0.0)


@pytest.mark.parametrize(("group", "kills_all"), [("1", True), ("0", False)])
def test_c115_a_cgroup_that_is_killed_whole_is_said(
    tmp_path: Path, group: str, *, kills_all: bool
) -> None:
    """memory.oom.group of 1 makes every score void, and the daemon warns of it.

    Here a folder stands in for the cgroup; the kill itself needs a v2 hierarchy.
    """
    folder = tmp_path / "cgroup"
    folder.mkdir()
    for name, text in {
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
        "memory.max": f"{300 << 20}\n",
        "memory.high": "max\n",
        "memory.oom.group": f"{group}\n",
    }.items():
        (folder / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/\n")
    cgroup = find_cgroup(folder, own)
    assert cgroup == Cgroup(2, folder / "")
    order = oom_order(cgroup, lowered=False)
    assert (order.group_kill, order.verdict == "group_kill") == (kills_all, kills_all)
    assert any("memory.oom.group" in warning for warning in order.warnings) == kills_all
    assert (order.cgroup_version, order.limit_bytes, order.high_bytes) == (2, 300 << 20, None)


def test_c116_code_and_signal_are_two_fields(runnerd_daemon: RunnerdProcess) -> None:
    """A signal is no code, a code above 128 is no signal, and a grandchild's end is neither."""
    wanted: list[tuple[list[str], int | None, int | None]] = [
        (["sh", "-c", "kill -9 $$"], None, 9),
        (["sh", "-c", "kill -TERM $$"], None, 15),
        (["sh", "-c", "kill -SEGV $$"], None, 11),
        (["sh", "-c", "exit 137"], 137, None),
        (["sh", "-c", "exit 255"], 255, None),
        (["bash", "-c", "kill -34 $$"], None, 34),
        (["sh", "-c", "sh -c 'kill -9 $$'; exit $?"], 137, None),
    ]
    with runnerd_daemon.connect() as client:
        for argv, code, number in wanted:
            its_exit = client.run(argv, rlimits={"core": (0, 0)}).exit
            assert (its_exit.code, its_exit.signal) == (code, number), argv
            assert (its_exit.core_dumped, its_exit.reason) == (False, "exited")
            assert its_exit.oom.verdict in ("none", "unknown")


def test_c116_the_core_flag_is_the_kernels(runnerd_daemon: RunnerdProcess, tmp_path: Path) -> None:
    """Where a core may be written, the exit says what waitpid says of the same command here."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit: int | Literal["unlimited"] = "unlimited" if hard == resource.RLIM_INFINITY else hard
    argv = ["sh", "-c", "kill -SEGV $$"]
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),  # noqa: PLW1509
    ) as local:
        _, status = os.waitpid(local.pid, 0)
        local.returncode = status
    for left in tmp_path.glob("core*"):
        left.unlink()
    with runnerd_daemon.connect() as client:
        its_exit = client.run(argv, cwd=str(tmp_path), rlimits={"core": (limit, limit)}).exit
        assert (its_exit.signal, its_exit.core_dumped) == (11, os.WCOREDUMP(status))


def test_c119_stops_and_traps_are_no_exits(runnerd_daemon: RunnerdProcess) -> None:
    """A tracer attached and killed, STOP and CONT change neither the exit nor its number."""
    strace, gdb = needs.program("strace"), needs.program("gdb")
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        pid = client.call(
            "exec.start", exec_id="traced", argv=["sh", "-c", "sleep 2; exit 6"], attach={}
        )["pid"]
        tracer = client.call(
            "exec.start", exec_id="tracer", argv=[strace, "-p", str(pid), "-o", "/dev/null"]
        )["pid"]
        status = Path(f"/proc/{pid}/status")
        wait_for(lambda: f"TracerPid:\t{tracer}\n" in status.read_text())
        client.call("exec.signal", exec_id="tracer", signal="KILL")
        wait_for(lambda: "TracerPid:\t0\n" in status.read_text())
        client.call("exec.signal", exec_id="traced", signal="STOP")
        wait_for(lambda: "State:\tT" in status.read_text())
        assert client.call("exec.inspect", exec_id="traced")["state"] == "running"
        client.call("exec.signal", exec_id="traced", signal="CONT")
        assert client.call("exec.wait", exec_id="tracer")["signal"] == 9
        client.note("exec.closed", "traced")
        methods = [note["method"] for note in records(client, "traced")]
        assert methods == ["exec.exited", "exec.closed"]
        its_exit = client.note("exec.exited", "traced")["exit"]
        assert (its_exit["code"], its_exit["reason"]) == (6, "exited")
        assert 2.0 <= its_exit["wall_s"] <= 2.0 + SLACK
    with runnerd_daemon.connect() as library:
        assert library.run([strace, "-f", "-o", "/dev/null", "sh", "-c", "exit 7"]).exit.code == 7
        words = ["-q", "-batch", "-ex", "run", "-ex", "quit", "--args", "true"]
        assert library.run([gdb, *words], env={"DEBUGINFOD_URLS": ""}).exit.code == 0


def test_c120_a_stream_of_orphans_steals_no_status(runnerd_daemon: RunnerdProcess) -> None:
    """3000 of 3000 codes are right while orphans come and go beside them."""
    orphans = ["sh", "-c", "(sleep 0.01 &) ; (sleep 0.02 &)"]
    codes: dict[str, int | None] = {}
    left = [*range(3000)]
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        for _ in range(20):
            client.send("exec.start", argv=orphans, attach={})
        live = 0
        while left or live:
            while left and live < 16:
                number = left.pop()
                argv = ["sh", "-c", f"exit {number % 256}"]
                client.send("exec.start", exec_id=f"n{number}", argv=argv, attach={})
                live += 1
            message = client.receive()
            assert "error" not in message
            if message.get("method") != "exec.exited":
                continue
            its_exit = message["params"]["exit"]
            if its_exit["exec_id"].startswith("n"):
                assert its_exit["exec_id"] not in codes
                codes[its_exit["exec_id"]] = its_exit["code"]
                live -= 1
            elif left:
                client.send("exec.start", argv=orphans, attach={})
            client.notes.clear()
    assert codes == {f"n{number}": number % 256 for number in range(3000)}
