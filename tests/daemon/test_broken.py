"""What once broke it: each attack that got through, as the smallest thing that showed it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests import needs
from tests.daemon.looking import command_name, living, seconds, shim_of
from tests.harness import RunnerdProcess, children, descendants, is_alive, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

PYTHON: Final = [sys.executable, "-I", "-c"]
NO_TERM: Final = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def trees(daemon: RunnerdProcess) -> set[int]:
    """Return every living process of every command."""
    return {pid for pid in living(descendants(daemon.pid)) if command_name(pid) != "runnerd-shim"}


# ------------------------------------------------------------------ lost shims, once more

DEAD_LEADER: Final = f"""{NO_TERM}
import ctypes, platform, threading
threading.Thread(target=time.sleep, args=(900,)).start()
print("up", flush=True)
# exit(2) of this thread alone: the process shows a Z from now on, and lives.
ctypes.CDLL(None).syscall({{"x86_64": 60, "aarch64": 93}}[platform.machine()], 0)
"""


def test_a_process_whose_first_thread_has_ended_is_no_zombie(start_daemon: Start) -> None:
    """It was taken for dead once its shim was killed: an exit made up, a process left for good."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = [*PYTHON, DEAD_LEADER]
        pid = client.call("exec.start", exec_id="e", argv=argv, grace_s=0.2, attach={})["pid"]
        client.note("exec.output", "e")
        wait_for(lambda: not is_alive(pid))  # as the kernel shows it
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        its_exit = client.note("exec.exited", "e")["exit"]
        client.note("exec.closed", "e")
        assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGKILL, "internal")
        assert not Path(f"/proc/{pid}").exists()


RUNAWAY: Final = f"""{NO_TERM}
score, shim = sys.argv[1], os.getppid()
if not os.fork():
    os.setsid()
    open("/proc/self/oom_score_adj", "w").write(score)
    if os.fork(): os._exit(0)
    print("away", flush=True)
    time.sleep(900)
time.sleep(900)
"""


def test_a_score_put_back_hides_nobody_from_a_lost_shims_end(start_daemon: Start) -> None:
    """Out of session and group, with the daemon's own score: it outlived cancel and stop."""
    needs.root()
    daemon = start_daemon("--oom-score", "keep")
    score = Path(f"/proc/{daemon.pid}/oom_score_adj").read_text().strip()
    with RawClient(daemon.socket_path) as client:
        argv = [*PYTHON, RUNAWAY, score]
        pid = client.call("exec.start", exec_id="e", argv=argv, grace_s=0.2, attach={})["pid"]
        client.note("exec.output", "e")
        wait_for(lambda: len(trees(daemon)) == 2)
        tree = trees(daemon)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        client.note("exec.closed", "e")
        assert living(tree) == set()


def test_the_receipt_of_a_lost_shims_end_adds_up(start_daemon: Start) -> None:
    """What the shim had told before it was killed is kept, and its TERM is not repeated."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        script = "trap 'echo got' TERM; sleep 900 & echo up; while :; do wait; done"
        argv = ["sh", "-c", script]
        pid = client.call("exec.start", exec_id="e", argv=argv, attach={})["pid"]
        wait_for(lambda: len(trees(daemon)) == 2)
        client.call("exec.cancel", exec_id="e", grace_s=0.5, wait=False)
        wait_for(lambda: client.call("exec.inspect", exec_id="e")["ending"] == "cancelled")
        while b"got" not in client.output("e"):
            client.receive()
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        receipt = client.call("exec.cancel", exec_id="e")["receipt"]
        assert receipt["termed_total"] == len(receipt["termed"]) == 2
        assert receipt["killed_total"] == len(receipt["killed"]) == 1
        assert client.output("e").count(b"got") == 1


def test_who_cannot_look_does_not_say_that_nothing_is_left(start_daemon: Start) -> None:
    """A command of the same user takes all descriptors from the daemon, then kills its shim."""
    daemon = start_daemon()
    blind = f"""{NO_TERM}
import resource
shim = os.getppid()
if not os.fork():
    os.setsid()
    time.sleep(900)
os.write(1, b"up")
while not os.path.exists("/proc/%s/fd/0" % sys.argv[1]): time.sleep(0.01)
resource.prlimit(int(sys.argv[1]), resource.RLIMIT_NOFILE, (5, 4096))
os.kill(shim, signal.SIGKILL)
time.sleep(900)
"""
    with RawClient(daemon.socket_path) as client:
        argv = [*PYTHON, blind, str(daemon.pid)]
        client.call("exec.start", exec_id="e", argv=argv, grace_s=0.2, attach={})
        client.note("exec.output", "e")
        its_exit = client.note("exec.exited", "e")["exit"]
        assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGKILL, "internal")
        assert client.call("exec.inspect", exec_id="e", usage=True)["usage"] is None
        assert client.call("exec.inspect", exec_id="e")["state"] == "lingering"
        left = trees(daemon)
        assert len(left) == 1
        resource_back(daemon.pid)
        client.note("exec.closed", "e")
        assert living(left) == set()


def resource_back(pid: int) -> None:
    """Give a process its descriptors back."""
    import resource  # noqa: PLC0415  # not everywhere

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))


# ------------------------------------------------------------------ traced, stopped

TRACER: Final = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
ok = libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
print("traced" if ok else "refused", flush=True)
time.sleep(900)
"""


def test_a_zombie_that_is_traced_is_told_as_what_it_is(start_daemon: Start) -> None:
    """Its status cannot be had until the tracer lets go: no exit `lost` meanwhile, no silence."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        argv = [*PYTHON, TRACER, str(pid)]
        client.call("exec.start", exec_id="tracer", argv=argv, attach={})
        client.note("exec.output", "tracer")
        if client.output("tracer") != b"traced\n":
            pytest.skip("no process may trace another one here")
        took_s, answer = seconds(lambda: client.call("exec.cancel", exec_id="e", grace_s=0.1))
        assert (answer["outcome"], answer["exit"]) == ("survivors", None)
        assert [each["pid"] for each in answer["receipt"]["survivors"]] == [pid]
        assert took_s < 3
        # The same, where the shim is gone too.
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        wait_for(lambda: pid in children(daemon.pid))
        answer = client.call("exec.cancel", exec_id="e")
        assert (answer["outcome"], answer["exit"]) == ("survivors", None)
        client.call("exec.cancel", exec_id="tracer", grace_s=0)
        its_exit = client.call("exec.wait", exec_id="e", until="closed", timeout_s=5)
        assert its_exit["signal"] in (signal.SIGTERM, signal.SIGKILL)
        assert its_exit["reason"] == "cancelled"


def test_a_command_that_traces_its_shim_is_ended(start_daemon: Start) -> None:
    """Killed, the shim stays a zombie of its tracer's: nobody came to end the tree."""
    daemon = start_daemon()
    program = f"{NO_TERM}sys.argv[1] = str(os.getppid())\nos.fork()\n{TRACER}"
    with RawClient(daemon.socket_path) as client:
        argv = [*PYTHON, program, "the shim"]
        client.call("exec.start", exec_id="e", argv=argv, attach={})
        while client.output("e").count(b"\n") < 2:
            client.receive()
        if b"traced" not in client.output("e"):
            pytest.skip("the shim cannot be traced here: not root, or without CAP_SYS_PTRACE")
        tree = trees(daemon)
        took_s, answer = seconds(lambda: client.call("exec.cancel", exec_id="e", grace_s=0.1))
        assert answer["outcome"] == "ended"
        assert took_s < 4
        assert living(tree) == set()


def test_a_stopped_shim_still_tells_the_exit(start_daemon: Start) -> None:
    """Nobody had asked anything of it, so nobody had made it go on."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "kill -STOP $PPID; exit 3"]
        client.call("exec.start", exec_id="e", argv=argv, attach={})
        assert client.note("exec.exited", "e", 5)["exit"]["code"] == 3


def test_a_stopped_shim_ends_its_tree_when_the_daemon_is_killed(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
        shim = shim_of(daemon, pid)
        os.kill(daemon.pid, signal.SIGSTOP)  # so that it is not what lets the shim go on
        os.kill(shim, signal.SIGSTOP)
        daemon.kill()
        wait_for(lambda: living({pid, shim}) == set(), 4)
