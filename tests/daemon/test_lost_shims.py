"""A shim that is killed or stopped: the tree ends all the same, and the status stays true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests import needs
from tests.cases.field import mark, marked
from tests.daemon.looking import (
    TREE,
    living,
    log_lines,
    planted,
    seconds,
    shim_of,
    shims,
    tree_of,
)
from tests.harness import RunnerdProcess, children, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

_SCRIPT: Final = """
trap '' TERM
setsid sh -c 'trap "" TERM; sleep 900; :' &
echo up
while :; do sleep 9; done
"""
ORPHANS: Final = ["sh", "-c", "setsid sh -c 'trap \"\" TERM; sleep 900; :' & echo up; wait"]
"""Its worker, in a session of its own, does not heed TERM."""
STUBBORN: Final = ["sh", "-c", _SCRIPT]


def test_a_killed_shim_costs_its_exec_alone(start_daemon: Start) -> None:
    """Reason internal, the command's own status, nothing left; the neighbour does not notice."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        other = tree_of(client.call("exec.start", exec_id="other", argv=TREE)["pid"])
        pid = client.call("exec.start", exec_id="e", argv=TREE, attach={})["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        took_s, its_exit = seconds(lambda: client.note("exec.exited", "e")["exit"])
        print(f"a killed shim: exited after {took_s:.3f} s")
        assert its_exit["reason"] == "internal"
        assert its_exit["signal"] == signal.SIGTERM
        assert its_exit["code"] is None
        assert its_exit["cpu_user_s"] is not None
        client.note("exec.closed", "e")
        assert living(tree) == set()
        assert living(other) == other
        assert "runnerd_shims_lost_total 1.0" in client.call("daemon.metrics")["text"]
        assert client.call("daemon.info")["stray_failures"] == 0
        client.call("exec.cancel", exec_id="other", grace_s=0)


def test_a_true_status_comes_through_a_killed_shim(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "trap 'exit 42' TERM; echo up; while :; do sleep 0.05; done"]
        pid = client.call("exec.start", exec_id="e", argv=argv, attach={})["pid"]
        client.note("exec.output", "e")
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        its_exit = client.note("exec.exited", "e")["exit"]
        assert (its_exit["code"], its_exit["reason"]) == (42, "internal")


def test_what_ignores_term_is_killed_after_the_grace(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=STUBBORN, grace_s=0.5, attach={})["pid"]
        client.note("exec.output", "e")
        tree = tree_of(pid, 4)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        took_s, its_exit = seconds(lambda: client.note("exec.exited", "e")["exit"])
        assert (its_exit["signal"], its_exit["forced"]) == (signal.SIGKILL, True)
        client.note("exec.closed", "e")
        assert 0.3 < took_s < 2
        assert living(tree) == set()
        assert client.call("exec.cancel", exec_id="e")["outcome"] == "already_ended"


def test_the_twin_that_adopts_nothing_leaves_the_tree(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import adopted
            adopted.AdoptedTree._present = lambda self: []
        """)
    )
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=TREE)["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        client.call("exec.wait", exec_id="e")
        assert living(tree) != set()
        for each in tree:
            os.kill(each, signal.SIGKILL)


def test_two_shims_killed_at_once(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        trees, lost = set(), []
        for exec_id in ("a", "b"):
            pid = client.call("exec.start", exec_id=exec_id, argv=TREE)["pid"]
            trees |= tree_of(pid)
            lost.append(shim_of(daemon, pid))
        for shim in lost:
            os.kill(shim, signal.SIGKILL)
        for exec_id in ("a", "b"):
            its_exit = client.call("exec.wait", exec_id=exec_id, until="closed", timeout_s=10)
            assert (its_exit["reason"], its_exit["signal"]) == ("internal", signal.SIGTERM)
        assert living(trees) == set()


def test_every_shim_killed_at_once_again_and_again(start_daemon: Start) -> None:
    """Parked ones too: the next starts work."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        for number in range(15):
            pids = [
                client.call("exec.start", exec_id=f"e{number}.{each}", argv=["sleep", "900"])["pid"]
                for each in range(3)
            ]
            for shim in shims(daemon):
                os.kill(shim, signal.SIGKILL)
            for each in range(3):
                its_exit = client.call(
                    "exec.wait", exec_id=f"e{number}.{each}", until="closed", timeout_s=10
                )
                assert its_exit["reason"] == "internal"
                assert its_exit["signal"] == signal.SIGTERM
            assert living(set(pids)) == set()
        info = client.call("daemon.info")
        assert (info["live_execs"], info["stray_failures"]) == (0, 0)


def test_a_stopped_shim_gives_its_receipt_within_a_second(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=TREE)["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGSTOP)
        took_s, answer = seconds(lambda: client.call("exec.cancel", exec_id="e"))
        print(f"a stopped shim: cancelled after {took_s:.3f} s")
        assert answer["outcome"] == "ended"
        assert answer["exit"]["reason"] == "cancelled"
        assert answer["receipt"]["termed_total"] == len(tree)
        assert took_s < 1
        assert living(tree) == set()


def test_a_stopped_shim_still_passes_a_signal_on(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        os.kill(shim_of(daemon, pid), signal.SIGSTOP)
        assert client.call("exec.signal", exec_id="e", signal="USR1")["signalled"] == 1
        assert client.call("exec.wait", exec_id="e", timeout_s=5)["signal"] == signal.SIGUSR1


HOSTILE: Final = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
shim = os.getppid()
while os.getppid() == shim:     # another parent would be the daemon, and then these tests
    os.kill(shim, signal.SIGSTOP)
signal.pause()
"""
"""A command that never lets its shim run."""


def test_a_shim_stopped_again_and_again_is_killed_in_time(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = [sys.executable, "-I", "-c", HOSTILE]
        pid = client.call("exec.start", exec_id="e", attach={}, argv=argv)["pid"]
        client.note("exec.output", "e")
        took_s, answer = seconds(lambda: client.call("exec.cancel", exec_id="e", grace_s=0.3))
        print(f"a shim kept stopped: cancelled after {took_s:.3f} s")
        assert answer["outcome"] == "ended"
        assert answer["exit"]["signal"] == signal.SIGKILL
        assert took_s < 4
        assert not is_alive(pid)
        assert client.call("ping") == {}


def test_a_shim_stopped_again_and_again_does_not_outlive_the_stop(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = [sys.executable, "-I", "-c", HOSTILE]
        pid = client.call("exec.start", exec_id="e", attach={}, argv=argv)["pid"]
        client.note("exec.output", "e")
        shim = shim_of(daemon, pid)
        took_s, code = seconds(daemon.stop)
        print(f"a shim kept stopped: daemon gone after {took_s:.3f} s")
        assert code == 0
        assert took_s < 2.2
        assert living({pid, shim}) == set()
        assert client.note("exec.exited", "e")["exit"]["reason"] == "stopped"


def test_a_stopped_parked_shim_costs_no_start(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: len(shims(daemon)) == 3)
        for shim in shims(daemon):
            os.kill(shim, signal.SIGSTOP)
        took_s, _ = seconds(lambda: client.call("exec.start", exec_id="e", argv=["true"]))
        assert took_s < 1
        assert client.call("exec.wait", exec_id="e")["code"] == 0


def test_killed_shims_race_the_exit(start_daemon: Start) -> None:
    """Fifty times at whatever moment: exactly one exit, never a made-up one, nothing left."""
    daemon = start_daemon()
    seen: dict[str, int] = {}
    with RawClient(daemon.socket_path) as client:
        for number in range(50):
            exec_id = f"e{number}"
            argv = ["sh", "-c", "sleep 0.0$0; exit 5", str(number % 7)]
            pid = client.call("exec.start", exec_id=exec_id, argv=argv, attach={})["pid"]
            time.sleep(0.01 * (number % 8))
            for shim in shims(daemon):
                if pid in children(shim):
                    os.kill(shim, signal.SIGKILL)
            its_exit = client.note("exec.exited", exec_id)["exit"]
            client.note("exec.closed", exec_id)
            ended = (its_exit["code"], its_exit["signal"])
            assert ended in ((5, None), (None, signal.SIGTERM), (None, None)), its_exit
            if ended == (None, None):
                assert its_exit["reason"] in ("lost", "internal")
            exits = [
                note
                for note in client.notes
                if note["method"] == "exec.exited" and note["params"]["exec_id"] == exec_id
            ]
            assert len(exits) == 1
            seen[f"{ended} {its_exit['reason']}"] = seen.get(f"{ended} {its_exit['reason']}", 0) + 1
        info = client.call("daemon.info")
        assert (info["live_execs"], info["stray_failures"]) == (0, 0)
    print("a killed shim at any moment:", seen)


# The loop stands still from `started` on until the shim and what it leaves are dead.
LATE: Final = """
    import os, select, socket, time
    from pathlib import Path
    from runnerd.daemon import procfs, shims
    def dead():
        return [pid for pid in procfs.children(os.getpid()) if procfs.read_stat(pid).state == "Z"]
    original = shims.Shim.send_job
    def send_job(self, fds):
        original(self, fds)
        select.select([self._control], [], [])
        assert self._control.recv(100, socket.MSG_PEEK).startswith(b"started")
        Path({go!r}).touch()
        while len(dead()) < 2:
            time.sleep(0.001)
        Path({go!r}).unlink()
    shims.Shim.send_job = send_job
"""
# As it is where the shim is traced: wait(2) gives the command before it.
BACKWARDS: Final = """
    wait4 = os.wait4
    def backwards(_pid, options):
        pids = sorted(procfs.children(os.getpid()), reverse=True)
        found = (wait4(pid, options) for pid in pids)
        return next((each for each in found if each[0]), None) or wait4(-1, options)
    os.wait4 = backwards
"""


@pytest.mark.parametrize("code", [LATE, LATE + BACKWARDS], ids=["forwards", "backwards"])
def test_a_command_that_kills_its_shim_and_ends_at_once_has_its_true_status(
    start_daemon: Start, tmp_path: Path, code: str
) -> None:
    """All of it is over before the daemon reads that it has begun."""
    go = tmp_path / "go"
    daemon = start_daemon(**planted(code.format(go=str(go))))
    script = f"until [ -e {go} ]; do :; done; kill -9 $PPID; exit 3"
    with RawClient(daemon.socket_path) as client:
        for number in range(25):
            exec_id = f"e{number}"
            client.call("exec.start", exec_id=exec_id, argv=["sh", "-c", script], attach={})
            its_exit = client.note("exec.exited", exec_id)["exit"]
            ended = (its_exit["code"], its_exit["signal"], its_exit["reason"])
            assert ended == (3, None, "internal"), number
            client.note("exec.closed", exec_id)
        info = client.call("daemon.info")
        assert (info["live_execs"], info["stray_failures"]) == (0, 0)


# ------------------------------------------------------------------ not of any exec

AS_PID_1: Final = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.parametrize("score", [0, 950], ids=["low", "as high as commands'"])
def test_orphans_of_no_exec_are_reaped_and_never_signalled(
    start_daemon: Start, tmp_path: Path, score: int
) -> None:
    """What `docker exec` brings in where runnerd is PID 1, with a lost shim at the same time."""
    needs.root()
    needs.program("unshare", "util-linux")
    needs.program("nsenter", "util-linux")

    def set_score() -> None:
        Path("/proc/self/oom_score_adj").write_text(str(score))

    daemon = start_daemon("--oom-score", "keep", wrapper=AS_PID_1, prepare=set_score)
    (inner,) = wait_for(lambda: children(daemon.pid))
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["pid"] == 1
        # Double-forked, so orphaned to PID 1; it says which signals it gets.
        script = (
            "import os, signal, sys, time\n"
            "if os.fork(): os._exit(0)\n"
            "os.setsid()\n"
            "if os.fork(): os._exit(0)\n"
            "got = open(sys.argv[1], 'a', buffering=1)\n"
            "for number in (1, 2, 3, 15, 18):\n"
            "    signal.signal(number, lambda number, frame: got.write(f'{number}\\n'))\n"
            "got.write('up\\n')\n"
            "end = time.monotonic() + float(sys.argv[2])\n"
            "while time.monotonic() < end: time.sleep(0.05)\n"
        )
        said = tmp_path / "got"
        words = ["nsenter", "--target", str(inner), "--pid", "--mount", sys.executable, "-I", "-c"]
        subprocess.run([*words, script, str(said), "2.5"], check=True, preexec_fn=set_score)
        wait_for(lambda: said.exists() and said.read_text().startswith("up"))
        (orphan,) = wait_for(lambda: {p for p in children(inner) if is_python(p)})
        pid = client.call("exec.start", exec_id="e", argv=TREE)["pid"]
        shim = next(p for p in children(inner) if pid in inner_pids(children(p)))
        os.kill(shim, signal.SIGKILL)
        its_exit = client.call("exec.wait", exec_id="e", timeout_s=10)
        assert its_exit["reason"] == "internal"
        assert is_alive(orphan)
        wait_for(lambda: not Path(f"/proc/{orphan}").exists(), 10)  # reaped, no zombie
        assert said.read_text() == "up\n"
        assert log_lines(daemon, "uncaught_error") == []
    os.kill(inner, signal.SIGTERM)
    daemon.process.wait(10)


def is_python(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # one that came and went
        return False
    return b"-c" in words


def inner_pids(pids: set[int]) -> set[int]:
    """Return the numbers that processes have in their own pid namespace."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                found.add(int(line.split()[-1]))
    return found


# ------------------------------------------------------------------ starts that fail meanwhile


def test_a_failed_start_leaves_another_execs_orphans_their_grace(start_daemon: Start) -> None:
    """What comes to the daemon while a start fails need not be what that start has left."""
    daemon = start_daemon("--cgroups", "off")
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=ORPHANS, grace_s=2.0, attach={})["pid"]
        tree = tree_of(pid, 3)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 1.0:
            with pytest.raises(RawError) as caught:
                client.call("exec.start", argv=["/no/such/program"])
            assert caught.value.kind == "start_failed"
            wait_for(lambda: not is_alive(pid))  # of TERM
            assert living(tree) == tree - {pid}
        client.note("exec.closed", "e")
        assert time.monotonic() - began_s > 1.9
        assert living(tree) == set()
        assert client.call("daemon.info")["stray_failures"] == 0


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside a lost shim"])
def test_what_a_start_that_timed_out_has_left_is_ended(start_daemon: Start, *, other: bool) -> None:
    """The command ran, and nobody heard of it: its orphans are found, now or with the other's."""
    daemon = start_daemon(
        "--cgroups",
        "off",
        **planted("""
            from runnerd.daemon import running, starting
            started = running.Running._started
            def unheard(self, message):
                if self.exec.exec_id != "unheard":
                    started(self, message)
            running.Running._started = unheard
            starting.START_TIMEOUT_S = 1.0
        """),
    )
    word = mark()
    with RawClient(daemon.socket_path) as client:
        if other:
            pid = client.call("exec.start", exec_id="e", argv=ORPHANS, grace_s=2.5)["pid"]
            tree_of(pid, 3)
            os.kill(shim_of(daemon, pid), signal.SIGKILL)
        script = f"setsid sh -c 'setsid sleep {word} & exit' ; exec sleep {word}"
        with pytest.raises(RawError) as caught:
            client.call("exec.start", exec_id="unheard", argv=["sh", "-c", script])
        assert caught.value.kind == "start_timeout"
        if other:
            client.call("exec.wait", exec_id="e", until="closed")
        wait_for(lambda: not marked(word))
        assert client.call("daemon.info")["stray_failures"] == 0
