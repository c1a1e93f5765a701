"""What once broke it: each attack that got through, as the smallest thing that showed it."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.core.bounds import Bounds
from runnerd.daemon.poller import Poller
from tests import needs
from tests.daemon.looking import (
    command_name,
    living,
    log_lines,
    planted,
    refusal,
    seconds,
    shim_of,
    shims,
)
from tests.harness import RunnerdProcess, children, descendants, is_alive, wait_for
from tests.raw import RawClient, RawError

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
        shim = Path(f"/proc/{shim_of(daemon, pid)}/stat")
        # Once it waits for the grace to pass it has told whom it sent TERM.
        wait_for(lambda: shim.read_text().rpartition(")")[2].split()[0] == "S")
        os.kill(int(shim.parent.name), signal.SIGKILL)
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


@pytest.mark.parametrize("limit", [0, 5])
def test_a_command_that_ends_while_no_descriptor_is_to_be_had(
    start_daemon: Start, limit: int
) -> None:
    """Its cgroup could not be looked at: it ended the daemon, and all else that ran there.

    With a limit of 0 poll(2) fails too: every connection that had a reader was closed.
    """
    import resource  # noqa: PLC0415  # not everywhere

    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["cat"], stdin="pipe", attach={})
        client.call("exec.start", exec_id="other", argv=["cat"], stdin="pipe", attach={})
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, 4096))
        client.call("exec.write", exec_id="e", data="dG9sZA==")
        client.call("exec.write", exec_id="e", offset=4, eof=True)
        assert client.note("exec.exited", "e")["exit"]["code"] == 0
        assert client.output("e") == b"told"
        with pytest.raises(RawError) as raised:
            client.call("daemon.metrics")
        assert raised.value.kind == "busy"
        Path(daemon.socket_path).unlink()
        wait_for(
            lambda: (
                "socket_unreachable"
                in {each["kind"] for each in client.call("daemon.health")["degraded"]}
            ),
            20,
        )
        resource_back(daemon.pid)
        client.note("exec.closed", "e")
        wait_for(Path(daemon.socket_path).exists, 20)
        client.call("exec.write", exec_id="other", eof=True)
        assert client.note("exec.exited", "other")["exit"]["code"] == 0
        assert client.call("daemon.metrics")["text"]
        assert client.call("daemon.info")["stray_failures"] == 0


def test_who_cannot_be_looked_at_for_want_of_a_descriptor_may_come_again(
    start_daemon: Start,
) -> None:
    """The last descriptor is the connection's own: nothing says that its process has ended."""
    import resource  # noqa: PLC0415  # not everywhere

    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == Bounds().parked_shims)
        in_use = {int(each.name) for each in Path(f"/proc/{daemon.pid}/fd").iterdir()}
        lowest = min(set(range(4096)) - in_use)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (lowest + 1, 4096))
        error = refusal(daemon.socket_path)
        assert (error["data"]["kind"], error["data"]["retry_after_s"]) == ("busy", 1.0)
        assert "cannot look at the peer" in error["message"]
        resource_back(daemon.pid)
        with RawClient(daemon.socket_path):
            assert client.call("daemon.info")["stray_failures"] == 0


def resource_back(pid: int) -> None:
    """Give a process its descriptors back."""
    import resource  # noqa: PLC0415  # not everywhere

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))


@pytest.mark.parametrize("leftovers", ["keep", "kill"])
def test_a_command_that_died_with_its_shim(start_daemon: Start, leftovers: str) -> None:
    """Adopting it told its exit and closed it at once, and then its tree was to be ended."""
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon.reaper import Reaper
            when_gone = Reaper.when_gone
            def reap_first(self, *what):  # as when the reaper has its turn before the poller
                self.reap()
                when_gone(self, *what)
            Reaper.when_gone = reap_first
        """)
    )
    with RawClient(daemon.socket_path) as client:
        argv = ["sleep", "900"]
        pid = client.call("exec.start", exec_id="e", argv=argv, leftovers=leftovers)["pid"]
        shim = shim_of(daemon, pid)
        os.kill(daemon.pid, signal.SIGSTOP)
        os.kill(shim, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))
        os.kill(daemon.pid, signal.SIGCONT)
        its_exit = client.call("exec.wait", exec_id="e", until="closed", timeout_s=5)
        assert its_exit["signal"] == signal.SIGKILL
        assert client.call("daemon.info")["stray_failures"] == 0


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


# ------------------------------------------------------------------ requests nobody waits for

GONE: Final = 100  # connections, each with as many requests as one may have unanswered


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def ask_and_leave(daemon: RunnerdProcess, method: str, **params: object) -> None:
    with RawClient(daemon.socket_path) as client:
        client.sock.sendall(b"".join(client.encode(method, params, f"r{at}") for at in range(250)))
        client.call("ping")  # all of them have been taken


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("exec.cancel", {"grace_s": 900.0}),
        ("exec.wait", {}),
        ("exec.wait", {"until": "closed", "timeout_s": 900.0}),
        ("exec.write", {"data": "", "wait_s": 900.0}),
    ],
)
def test_what_gone_connections_asked_is_not_kept_for_ever(
    start_daemon: Start, method: str, params: dict[str, object]
) -> None:
    """Each left a callback with the exec, or an empty write that no limit counted."""
    daemon = start_daemon("--stdin-total-bytes-max", str(2 << 20))
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 900; done"]
        client.call("exec.start", exec_id="e", argv=argv, stdin="pipe", attach={})
        client.note("exec.output", "e")
        room = client.call("exec.write", exec_id="e", data=b"")["room_bytes"]
        full = client.send("exec.write", exec_id="e", data=bytes(room + 100_000), wait_s=900.0)
        for _ in range(30):
            ask_and_leave(daemon, method, exec_id="e", **params)
        before_kib = rss_kib(daemon.pid)
        for _ in range(GONE):
            ask_and_leave(daemon, method, exec_id="e", **params)
        grown_kib = rss_kib(daemon.pid) - before_kib
        print(f"{method}: {GONE * 250} requests of gone connections cost {grown_kib} KiB")
        assert grown_kib < 8192
        took_s, _ = seconds(lambda: client.call("exec.cancel", exec_id="e", grace_s=0))
        assert took_s < 2
        assert full not in client.answers or client.answers[full]["error"]


def test_a_close_is_quick_however_many_wait(start_daemon: Start) -> None:
    """Each wait was looked for among all of them."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        others = [RawClient(daemon.socket_path) for _ in range(100)]
        for other in others:
            waits = [other.encode("exec.wait", {"exec_id": "e"}, f"r{at}") for at in range(250)]
            other.sock.sendall(b"".join(waits))
            other.call("ping")
        for other in others[:50]:
            other.sock.close()
        took_s, _ = seconds(
            lambda: wait_for(lambda: client.call("daemon.info")["connections"] == 51, 30)
        )
        print(f"12,500 of 25,000 waits are gone after {took_s:.3f} s")
        assert took_s < 1
        client.call("exec.cancel", exec_id="e", grace_s=0)
        for other in others[50:]:
            assert other.answer("r249")["reason"] == "cancelled"
            other.sock.close()


def test_a_timer_that_arms_itself_lets_others_have_their_turn() -> None:
    """It was called as often at a time as timers were armed."""
    poller = Poller()
    calls = 0

    class Ours:
        def stray(self, error: Exception) -> None:
            raise error

    def again() -> None:
        nonlocal calls
        calls += 1
        poller.call_soon(Ours(), again)

    for _ in range(1000):
        poller.call_at(time.monotonic() + 900, Ours(), lambda: None)
    poller.call_soon(Ours(), again)
    poller._run_timers()
    assert calls == 1


def test_a_due_timer_that_another_cancels_is_not_called_and_not_counted() -> None:
    """It has left the heap by then, which is swept by the count of those in it."""
    poller = Poller()
    calls: list[str] = []

    class Ours:
        def stray(self, error: Exception) -> None:
            raise error

    def first() -> None:
        calls.append("first")
        second.cancel()

    poller.call_soon(Ours(), first)
    second = poller.call_soon(Ours(), lambda: calls.append("second"))
    poller.call_soon(Ours(), lambda: calls.append("third"))
    poller._run_timers()
    assert calls == ["first", "third"]
    assert poller._cancelled == 0


# ------------------------------------------------------------------ memory of what is over


def test_a_record_is_small_whatever_its_command_was(start_daemon: Start) -> None:
    """Many short arguments, and a tree that had to be killed one by one."""
    daemon = start_daemon("--finished-execs-max", "1000")
    words = [chr(0x4E00 + at) for at in range(2000)]
    script = (
        "trap '' TERM; for at in $(seq 250); do sleep 900 & done; echo up; while :; do wait; done"
    )
    with RawClient(daemon.socket_path) as client:

        def run(exec_id: str) -> None:
            argv = ["sh", "-c", script, *words]
            client.call("exec.start", exec_id=exec_id, argv=argv, attach={})
            client.note("exec.output", exec_id)
            first = client.call("exec.cancel", exec_id=exec_id, grace_s=0.01)
            assert first["receipt"]["termed_total"] == 251
            assert len(first["receipt"]["termed"]) == 200
            again = client.call("exec.cancel", exec_id=exec_id)
            assert again == {**first, "outcome": "already_ended"}
            assert client.call("exec.inspect", exec_id=exec_id)["argv"][3:5] == words[:2]
            client.notes.clear()

        for number in range(5):
            run(f"warm{number}")
        before_kib = rss_kib(daemon.pid)
        for number in range(20):
            run(f"e{number}")
        each_kib = (rss_kib(daemon.pid) - before_kib) / 20
        print(f"a record of 2,000 arguments and 250 processes: {each_kib:.0f} KiB")
        assert each_kib < 80


def test_a_pipe_of_gigabytes_is_not_read_at_one_go(start_daemon: Start) -> None:
    """Who has CAP_SYS_RESOURCE can make one, fill it and exit; here the size is pretended."""
    daemon = start_daemon(
        "--spool",
        "off",  # with one, the command would go on for 64 MiB before it has to wait
        **planted("""
            from runnerd.daemon import output_pump
            output_pump.bytes_waiting = lambda fd: 1 << 31
        """),
    )
    with RawClient(daemon.socket_path) as client:
        before_kib = rss_kib(daemon.pid)
        argv = ["sh", "-c", "for at in 1 2 3 4; do yes & done; sleep 0.2; exit 3"]
        client.call("exec.start", exec_id="e", argv=argv, attach={"window_bytes": 1})
        took_s, its_exit = seconds(lambda: client.call("exec.wait", exec_id="e"))
        print(f"{its_exit['stdout']['total_bytes']} bytes, {took_s:.3f} s")
        assert its_exit["code"] == 3
        assert its_exit["stdout"]["total_bytes"] < 2 << 20
        assert rss_kib(daemon.pid) - before_kib < 16384
        client.call("exec.cancel", exec_id="e", grace_s=0)


# ------------------------------------------------------------------ the last bytes

FILL: Final = "head -c 300000 /dev/zero &"
"""More than a tail holds: behind a window of one byte the gate shuts, and this waits."""


def test_late_output_is_not_lost_behind_a_shut_gate(start_daemon: Start) -> None:
    """The drain did not look at the pipes again: what came within its time was thrown away."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        script = f"{FILL} sleep 0.3; (sleep 0.2; echo late >&2) & exit 0"
        argv = ["sh", "-c", script]
        client.call("exec.start", exec_id="e", argv=argv, attach={"window_bytes": 1})
        its_exit = client.call("exec.wait", exec_id="e")
        assert its_exit["stderr"]["total_bytes"] == len(b"late\n")


def test_the_last_of_a_tree_is_read_though_the_gate_is_shut(start_daemon: Start) -> None:
    """Once nobody is left to write, nothing can be gained by waiting for the reader."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        script = f"{FILL} sleep 0.3; (sleep 0.2; head -c 65536 /dev/zero >&2) &"
        argv = ["sh", "-c", script]
        client.call("exec.start", exec_id="e", argv=argv, attach={"window_bytes": 1})
        its_exit = client.call("exec.wait", exec_id="e", until="closed")
        discarded = client.call("exec.inspect", exec_id="e")["closed"]["discarded_bytes"]
        assert its_exit["stdout"]["total_bytes"] == 300000
        assert its_exit["stderr"]["total_bytes"] == 65536
        assert discarded == 0


@pytest.mark.parametrize("size", [1, 65536, 400_000, 1_000_001])
def test_every_byte_is_told_or_counted(start_daemon: Start, size: int) -> None:
    """What was in the pipes when the last process left was in no sum."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        for at, (delay_s, window) in enumerate(
            ((0, 1), (0.3, 1), (0.6, 1), (0, 4096), (0.6, None))
        ):
            exec_id = f"e{at}"
            script = f"(sleep {delay_s}; head -c {size} /dev/zero) & sleep 0.1"
            client.call(
                "exec.start",
                exec_id=exec_id,
                argv=["sh", "-c", script],
                attach={"window_bytes": window},
            )
            its_exit = client.call("exec.wait", exec_id=exec_id, until="closed")
            closed = client.call("exec.inspect", exec_id=exec_id)["closed"]
            assert its_exit["stdout"]["total_bytes"] + closed["discarded_bytes"] == size


def test_a_job_that_cannot_be_sent_leaves_no_shim(start_daemon: Start) -> None:
    """As where the last descriptor is gone: the parked shim that was taken is not forgotten."""
    daemon = start_daemon(
        **planted("""
            import errno
            from runnerd.daemon import launcher
            send, tries = launcher._send_job, []
            def failing(shim, prepared):
                tries.append(shim)
                if len(tries) <= 5:
                    raise OSError(errno.EMFILE, "no descriptors")
                send(shim, prepared)
            launcher._send_job = failing
        """)
    )
    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        for _ in range(5):
            with pytest.raises(RawError) as refused:
                client.call("exec.start", argv=["true"])
            assert refused.value.kind == "start_failed"
        assert client.call("exec.start", argv=["true"])["created"]
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(shims(daemon)) == 3)


@pytest.mark.parametrize(("call", "nth"), [("os.pipe2", 3), ("os.set_blocking", 2)])
def test_pipes_that_cannot_all_be_had_leave_no_descriptor(
    start_daemon: Start, call: str, nth: int
) -> None:
    daemon = start_daemon(
        **planted(f"""
            import errno, os
            from runnerd.daemon import pipes
            original, count, Pipes = {call}, 0, pipes.Pipes.__init__
            def failing(*args):
                global count
                count += 1
                if count == {nth}:
                    raise OSError(errno.ENFILE, "planted")
                return original(*args)
            def init(self, *args):
                {call} = failing
                try:
                    Pipes(self, *args)
                finally:
                    {call} = original
            pipes.Pipes.__init__ = init
        """)
    )

    def descriptors() -> int:
        return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))

    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        before = descriptors()
        with pytest.raises(RawError) as refused:
            client.call("exec.start", argv=["true"], stdin="pipe")
        assert refused.value.kind == "start_failed"
        assert descriptors() == before
        client.call("exec.start", exec_id="e", argv=["true"], stdin="pipe")
        client.call("exec.wait", exec_id="e", until="closed")
        wait_for(lambda: descriptors() == before)


def test_a_death_is_heard_of_where_the_kernel_has_no_buffer_for_a_wakeup(
    start_daemon: Start,
) -> None:
    """trio's own handler sends on a socket pair, and what that says came up anywhere in the loop.

    The kernel has no buffer for it where a memory cgroup is full.
    """
    daemon = start_daemon(
        **planted("""
            import errno
            from trio._core import _wakeup_socketpair
            def failing(self):
                raise OSError(errno.ENOBUFS, "planted")
            _wakeup_socketpair.WakeupSocketpair.wakeup_thread_and_signal_safe = failing
        """)
    )
    with RawClient(daemon.socket_path) as client:
        for number in range(20):
            client.call("exec.start", exec_id=f"e{number}", argv=["true"])
            assert client.call("exec.wait", exec_id=f"e{number}", until="closed")["code"] == 0
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        wait_for(lambda: len(children(daemon.pid)) == 3)
        assert client.call("daemon.info")["stray_failures"] == 0


def test_nothing_is_told_after_what_could_not_be_written(start_daemon: Start) -> None:
    """The kernel may have no memory for one write and some for the next: a hole, and no gap."""
    daemon = start_daemon(
        **planted("""
            import errno, socket
            original, done = socket.socket.sendmsg, []
            def failing(self, parts, *args):
                if b"exec.output" in b"".join(parts) and not done:
                    done.append(1)
                    raise OSError(errno.ENOMEM, "planted")
                return original(self, parts, *args)
            socket.socket.sendmsg = failing
            from runnerd.daemon import connection
            close = connection.Connection.close
            def late(self):  # as it is where much else is ready
                self._service.poller.call_at(time.monotonic() + 0.5, self._outgoing,
                                             lambda: close(self))
            import time
            connection.Connection.close = late
        """)
    )
    with RawClient(daemon.socket_path) as client:
        script = "read go; head -c 60000 /dev/zero; sleep 0.1; echo more"
        argv = ["sh", "-c", script]
        client.call("exec.start", exec_id="e", argv=argv, stdin="pipe", attach={})
        client.send("exec.write", exec_id="e", data="Cg==", eof=True)
        client.read_to_end()
        position = 0
        for note in client.notes:  # what was written before, if anything, and no end of it
            assert note["method"] == "exec.output"
            assert note["params"]["offset"] == position
            position += len(base64.b64decode(note["params"]["data"]))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.attach", exec_id="e")
        client.note("exec.exited", "e")
        assert client.output("e") == bytes(60000) + b"more\n"


def test_what_is_forgotten_is_freed_without_the_collector(start_daemon: Start) -> None:
    """Its parts refer to each other; the collector would come thousands of execs later.

    Then all of them would be freed at once, while the loop stands still, and until then they are
    memory that no bound counts.
    """
    daemon = start_daemon(
        "--finished-execs-max", "5",
        **planted("""
            import gc
            from runnerd.daemon import methods
            from runnerd.daemon.running import Running
            original = methods.HANDLERS['daemon.undrain']
            def count(call, params):
                gc.disable()
                found = sum(isinstance(each, Running) for each in gc.get_objects())
                call.service.log.info('counted', runnings=found)
                original(call, params)
            methods.HANDLERS['daemon.undrain'] = count
        """),
    )  # fmt: skip
    kinds: list[dict[str, object]] = [
        {"attach": {}},
        {"deadline_s": 60, "stall_s": 60, "orphan_ttl_s": 60},
        {"stdin": "pipe", "sha256": True},
        {"pty": {}, "attach": {"window_bytes": 1000}},
        {"argv": ["sh", "-c", "sleep 0.05 & echo x"], "leftovers": "kill"},
    ]
    with RawClient(daemon.socket_path) as client:
        client.call("daemon.undrain")  # from here on the collector rests
        for number in range(25):
            start = {"argv": ["echo", "x"]} | kinds[number % 5]
            client.call("exec.start", exec_id=f"e{number}", **start)
            client.call("exec.wait", exec_id=f"e{number}", until="closed")
        client.call("daemon.undrain")
    runnings = [line["runnings"] for line in log_lines(daemon, "counted")][-1]
    assert runnings <= 5 + 1


def test_a_thread_that_is_heard_of_before_it_can_be_read_is_heard_of_again(
    start_daemon: Start,
) -> None:
    """The journal's and the disk's: a read that fails is tried again in the next turn."""
    daemon = start_daemon(
        "--tail-bytes-max", str(64 << 10),
        **planted("""
            import errno, itertools, os
            read, turns = os.eventfd_read, itertools.count(1)
            def failing(fd):
                if turn := next(turns) % 3:
                    number = (errno.EAGAIN, errno.EINTR)[turn - 1]
                    raise OSError(number, os.strerror(number))
                return read(fd)
            os.eventfd_read = failing
        """),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        for number in range(6):
            exec_id = f"e{number}"
            started = client.call("exec.start", exec_id=exec_id, argv=["seq", "100000"])
            assert started["created"]
            assert client.call("exec.wait", exec_id=exec_id, until="closed")["code"] == 0
        wait_for(lambda: client.call("exec.inspect", exec_id="e0")["spool"] == "on")
        wait_for(lambda: client.call("exec.start", argv=["true"])["journaled"])
        assert "runnerd_stray_failures_total{" not in client.call("daemon.metrics")["text"]
    assert daemon.stop() == 0
    assert not log_lines(daemon, "uncaught_error")


def test_the_descriptor_kept_for_a_peer_too_many_is_taken_back_later(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            import errno, os, socket
            from runnerd.daemon import server
            accept, shed, opened = socket.socket.accept, server.Server._shed, os.open
            times = 1
            def failing(self):
                global times
                found = accept(self)
                if times:
                    times = 0
                    found[0].close()
                    raise OSError(errno.EMFILE, "planted")
                return found
            socket.socket.accept = failing
            def refusing(*args, **named):
                raise OSError(errno.ENFILE, "planted")
            def without(self, error):
                os.open = refusing
                shed(self, error)
                os.open = opened
            server.Server._shed = without
        """)
    )

    def kept() -> int:
        found = 0
        for each in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += str(each.readlink()) == "/dev/null"
        return found

    wait_for(lambda: len(descendants(daemon.pid)) == 6)  # three parked: the boot is over
    with socket.socket(socket.AF_UNIX) as too_many:
        too_many.connect(daemon.socket_path)
        assert too_many.recv(1) == b""
    wait_for(lambda: log_lines(daemon, "accept_failed"))
    left = kept()
    with RawClient(daemon.socket_path):
        assert kept() == left + 1
