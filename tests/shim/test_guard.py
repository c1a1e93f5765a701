"""The guard: whatever state Python is in, the process is gone at the deadline, with its code."""

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
from tests.shim.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Loads the guard as the daemon does. `arm`, `value` and the descriptors are for the programs below.
PRELUDE = """
import ctypes, os, re, signal, socket, sys, threading, time
G = ctypes.CDLL(sys.argv[1])
lifeline, shims_end = socket.socketpair()
woken, wake = os.pipe()
os.set_blocking(wake, False)
G.guard_setup.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
assert G.guard_setup(lifeline.fileno(), wake, int(float(sys.argv[2]) * 1e9)) == 0
if "alone" not in sys.argv: threading.Thread(target=G.guard_park, daemon=True).start()
value = lambda name: ctypes.c_int.in_dll(G, "guard_" + name).value
def parked():
    others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    stats = [open(f"/proc/self/task/{tid}/stat").read() for tid in others]
    return [stat.rpartition(")")[2].split()[0] for stat in stats] == ["S"]
while "alone" not in sys.argv and not parked(): pass
def ready(): print("ready", flush=True)
def stuck(): re.match(r"(a+)+$", "a" * 60 + "b")
"""


class Guarded:
    """A Python with the guard, running a program; TERM comes from here, so from outside."""

    def __init__(self, guard: Path, program: str, deadline_s: float, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", PRELUDE + program, str(guard), str(deadline_s), *words],
            stdout=subprocess.PIPE,
        )
        self.deadline_s = deadline_s
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        assert self.stdout.readline() == b"ready\n"

    def ends_in_time(self, code: int, begun_s: float) -> None:
        assert self.process.wait(timeout=20) == code
        took_s = time.monotonic() - begun_s
        assert self.deadline_s - 0.01 <= took_s <= self.deadline_s + 0.15

    def term(self, signum: int = signal.SIGTERM) -> float:
        begun_s = time.monotonic()
        self.process.send_signal(signum)
        return begun_s


@pytest.fixture
def guarded(guard_object: Path) -> Iterator[Callable[..., Guarded]]:
    running: list[Guarded] = []

    def run(program: str, deadline_s: float = 0.3, *words: str) -> Guarded:
        running.append(Guarded(guard_object, program, deadline_s, *words))
        return running[-1]

    yield run
    for one in running:
        one.process.kill()
        one.process.wait()
        one.stdout.close()
    # What they left is ours now: the child of a spawn that hangs, senders that sleep.
    for pid in children_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


LOOP = "ready()\nwhile True: pass"
HOLDS_THE_GIL = "ready()\nstuck()"


@pytest.mark.parametrize("program", [LOOP, HOLDS_THE_GIL, "ready()\ntime.sleep(60)"])
def test_a_term_ends_it_at_the_deadline(guarded: Callable[..., Guarded], program: str) -> None:
    one = guarded(program)
    one.ends_in_time(0, one.term())


def test_the_real_deadline(guarded: Callable[..., Guarded]) -> None:
    one = guarded(HOLDS_THE_GIL, 2.0)
    one.ends_in_time(0, one.term())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_the_other_signals_do_the_same(guarded: Callable[..., Guarded], signum: int) -> None:
    one = guarded(HOLDS_THE_GIL)
    one.ends_in_time(0, one.term(signum))


def test_an_uncaught_error_ends_it_with_70(guarded: Callable[..., Guarded]) -> None:
    one = guarded("ready()\nassert G.guard_arm(70, 1000) == 1\nprint('armed', flush=True)\nstuck()")
    begun_s = time.monotonic()
    one.ends_in_time(70, begun_s)


def test_the_first_cause_stands(guarded: Callable[..., Guarded]) -> None:
    one = guarded(
        "ready()\nprint(G.guard_arm(70, 1000), G.guard_arm(0, 1001), value('code'),"
        " value('cause'), value('armed'), flush=True)\nstuck()"
    )
    begun_s = one.term()
    words = one.stdout.readline().split()
    if words[0] == b"1":  # else the signal was first, and that stands as well
        assert words == [b"1", b"0", b"70", b"1000", b"1"]
    one.ends_in_time(70 if words[0] == b"1" else 0, begun_s)


def test_a_later_signal_does_not_move_the_deadline(guarded: Callable[..., Guarded]) -> None:
    one = guarded(HOLDS_THE_GIL, 0.5)
    begun_s = one.term()
    while one.process.poll() is None and time.monotonic() < begun_s + 5:
        one.term(signal.SIGINT)
        time.sleep(0.02)
    one.ends_in_time(0, begun_s)


def test_the_lifeline_ends_and_the_loop_is_woken_at_once(guarded: Callable[..., Guarded]) -> None:
    one = guarded(
        "ready()\nassert shims_end.recv(1) == b''\nassert os.read(woken, 9) == b'g'\n"
        "print(value('cause'), value('code'), value('armed'), flush=True)\nstuck()"
    )
    begun_s = one.term()
    assert one.stdout.readline() == b"15 0 1\n"
    assert time.monotonic() - begun_s < 0.25
    one.ends_in_time(0, begun_s)


HANGING_SPAWN = """
ready()
os.posix_spawn(
    "/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[3], os.O_RDONLY, 0)]
)
time.sleep(60)
"""


def test_a_spawn_that_hangs(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    """posix_spawn keeps the GIL, blocks all signals in its thread, and waits for an execve that
    comes to nothing: its file action opens a FIFO that nobody else opens."""
    os.mkfifo(tmp_path / "fifo")
    one = guarded(HANGING_SPAWN, 0.3, str(tmp_path / "fifo"))
    wait_until(lambda: children_of(one.process.pid))
    one.ends_in_time(0, one.term())


def test_the_twin_without_a_parked_thread_overstays(
    guarded: Callable[..., Guarded], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    one = guarded(HANGING_SPAWN, 0.3, str(tmp_path / "fifo"), "alone")
    wait_until(lambda: children_of(one.process.pid))
    one.term()
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(timeout=1.0)
    for pid in children_of(one.process.pid):
        os.kill(pid, signal.SIGKILL)  # lets the spawn go on, and the signal in
    assert one.process.wait(timeout=20) == 0


def children_of(pid: int) -> list[int]:
    return [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]


def test_a_full_pid_table(guarded: Callable[..., Guarded], pids_group: Path) -> None:
    one = guarded(
        "open(sys.argv[3] + '/cgroup.procs', 'w').write('0')\n"
        "open(sys.argv[3] + '/pids.max', 'w').write('2')\n"
        "try:\n    os.fork()\nexcept BlockingIOError:\n    ready()\nstuck()",
        0.3,
        str(pids_group),
    )
    one.ends_in_time(0, one.term())


# ------------------------------------------------------------------------- who may ask for a stop

SENDER = """
ready()
pid = os.fork()
if pid == 0:
    if {double}: os.fork() and os._exit(0)
    os.kill({target}, {signum})
    time.sleep(60)
"""
REPORT = """
while not os.read(woken, 9): pass
print(value('armed'), value('refused_total'), value('refused_signal'),
      value('refused_pid') == pid, flush=True)
os.kill(pid, 9)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_a_descendants_signal_is_refused(guarded: Callable[..., Guarded], signum: int) -> None:
    program = SENDER.format(double=0, target="os.getppid()", signum=int(signum)) + REPORT
    one = guarded(program)
    assert one.stdout.readline() == f"0 1 {int(signum)} True\n".encode()
    assert one.process.wait(timeout=20) == 0


def test_a_grandchilds_signal_is_refused(guarded: Callable[..., Guarded]) -> None:
    one = guarded(
        "ready()\nme, pid = os.getpid(), os.fork()\n"
        "if pid == 0:\n    if os.fork() == 0: os.kill(me, 15)\n    time.sleep(60)\n"
        "os.read(woken, 9)\nprint(value('armed'), value('refused_total'), flush=True)\n"
        "os.system(f'pkill -9 -P {pid}'); os.kill(pid, 9)"
    )
    assert one.stdout.readline() == b"0 1\n"


def test_our_own_signal_is_obeyed(guarded: Callable[..., Guarded]) -> None:
    one = guarded("ready()\nos.kill(os.getpid(), 15)\nprint(value('armed'), flush=True)\nstuck()")
    assert one.stdout.readline() == b"1\n"


def test_a_sender_already_gone_is_obeyed(guarded: Callable[..., Guarded]) -> None:
    """It cannot be told from an honest kill(1) that has done its work."""
    one = guarded("ready()\nos.read(woken, 9)\nprint(value('cause'), flush=True)")
    subprocess.run(["/bin/kill", str(one.process.pid)], check=True)
    assert one.stdout.readline() == b"15\n"


GONE: Final = """
signal.pthread_sigmask(signal.SIG_BLOCK, [15])
pid = os.fork()
if pid == 0: os.kill(os.getppid(), 15), os._exit(0)
os.waitpid(pid, 0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [15])
print(value('armed'), value('refused_total'), flush=True)
"""


def test_a_command_that_is_gone_is_not_obeyed_by_pid_1(guard_object: Path) -> None:
    """No other signal of a command's can end PID 1. Elsewhere it has KILL anyway."""
    needs.root()
    command = [sys.executable, "-ISc", PRELUDE + GONE, str(guard_object), "0.3", "alone"]
    own_pids = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    for wrapper, said in (own_pids, b"0 1\n"), ([], b"1 0\n"):
        done = subprocess.run([*wrapper, *command], capture_output=True, check=True)
        assert done.stdout == said


@pytest.mark.parametrize("how", ["from beyond", "by an exec from beyond"])
def test_pid_1_obeys_whoever_is_beyond_its_namespace(
    guarded: Callable[..., Guarded], guard_object: Path, how: str
) -> None:
    """As docker stop does it, and as docker exec would."""
    needs.root()
    code = PRELUDE + "ready()\ntime.sleep(60)"
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
         sys.executable, "-ISc", code, str(guard_object), "0.3"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        (pid,) = children_of(process.pid)
        if how == "from beyond":
            os.kill(pid, signal.SIGTERM)
        else:
            # The one that enters stays, as what an engine runs does while it is looked at.
            script = "kill -TERM 1; sleep 2"
            enter = ["nsenter", "-t", str(pid), "-p", "-m", "sh", "-c", script]
            subprocess.run(enter, check=False)
        assert process.wait(timeout=20) == 0


def test_a_stray_deadline_signal_ends_nothing(guarded: Callable[..., Guarded]) -> None:
    one = guarded("ready()\ntime.sleep(0.2)\nprint('on', flush=True)")
    one.process.send_signal(62)
    assert one.stdout.readline() == b"on\n"


FORGE = """
def forge(pid, number, code):  # a siginfo that says: sent by pid 1
    info = struct.pack("iiiiiI", number, 0, code, 0, 1, 0).ljust(128, b"\\0")
    call = {"x86_64": 129, "aarch64": 138}[os.uname().machine]
    assert ctypes.CDLL(None).syscall(call, pid, number, info) == 0
"""


@pytest.mark.parametrize("code", [-1, -2, -60])
def test_a_sender_that_names_itself_is_not_believed(
    guarded: Callable[..., Guarded], code: int
) -> None:
    """rt_sigqueueinfo(2) lets a descendant say that it is anyone, and that a timer sent it."""
    one = guarded(
        f"import struct\n{FORGE}\nready()\nme, pid = os.getpid(), os.fork()\n"
        f"if pid == 0:\n    forge(me, 15, {code})\n    time.sleep(60)\n{REPORT}"
    )
    assert one.stdout.readline() == b"0 1 15 False\n"


def test_a_forged_timer_does_not_cut_the_deadline_short(guarded: Callable[..., Guarded]) -> None:
    one = guarded(
        f"import struct\n{FORGE}\nready()\nos.read(woken, 9)\n"
        "for _ in range(9): forge(os.getpid(), 62, -2)\nstuck()"
    )
    one.ends_in_time(0, one.term())


def test_nohup_is_kept(guard_object: Path) -> None:
    code = PRELUDE + "ready()\nos.kill(os.getpid(), 1)\nprint(value('armed'), flush=True)"
    shell = "trap '' HUP; exec \"$@\""
    command = ["sh", "-c", shell, "sh", sys.executable, "-ISc", code, str(guard_object), "0.3"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == b"ready\n0\n"


def test_no_descriptor_or_timer_makes_an_errno(guard_object: Path) -> None:
    """A lifeline that is no socket changes nothing: the deadline holds all the same."""
    code = (
        "import ctypes, sys, time\nG = ctypes.CDLL(sys.argv[1])\n"
        "assert G.guard_setup(-1, -1, ctypes.c_long(10**8)) == 0\n"
        "assert G.guard_arm(7, 1) == 1\ntime.sleep(9)"
    )
    assert subprocess.run([sys.executable, "-ISc", code, guard_object], check=False).returncode == 7


def test_it_needs_nothing_of_a_libc(guard_object: Path) -> None:
    """One build serves glibc and musl: no symbol is left for anyone else to define."""
    done = subprocess.run(["nm", "-D", "-u", guard_object], capture_output=True, check=True)
    assert done.stdout == b""
