"""A command that signals the daemon, its shims and other execs, one by one or all at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness import is_alive, wait_for
from tests.hostile.sandbox import (
    ONE,
    ONE_PID_1,
    SEPARATE,
    Sandbox,
    leave_nobody,
    of_user,
)
from tests.raw import ClosedError, RawClient, RawError

Make = Callable[..., Sandbox]

HIT: Final = """
forged = b''.join(number.to_bytes(4, sys.byteorder) for number in (0, 0, 2**32 - 1, 0, 1, 0))
queue = {'x86_64': 129, 'aarch64': 138}[os.uname().machine]
def hit(pid, number):
    'Itself, by a thread, through a child that is gone at once, and with a forged sender.'
    outcomes = {said(os.kill, pid, number)}
    outcomes.add(said(system, queue, pid, number, forged.ljust(128, b'\\0')))
    child = os.fork()
    if child == 0:
        said(os.kill, pid, number)
        os._exit(0)
    os.waitpid(child, 0)
    return outcomes
"""
ONE_BY_ONE: Final = (
    HIT
    + """
outcomes = set()
for number in map(int, sys.argv[2:]):
    outcomes |= hit(DAEMON if sys.argv[1] == 'daemon' else int(sys.argv[1]), number)
tell(*sorted(outcomes))
"""
)
HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What asks a daemon to stop."""
IGNORED: Final = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT)
DEADLINE: Final = 62  # the guard's timer, shim/guard.c
EVERY: Final = sorted(set(range(1, 65)) - {32, 33, 34})  # those are the libc's own
IGNORED_BY_A_SHIM: Final = (1, 2, 3, 10, 12, 13, 14, 15, 17)


def shim_of(sandbox: Sandbox, client: RawClient, pid: int) -> int:
    """Return the shim of a command, both as the daemon sees them."""
    code = "tell(int(stat(sys.argv[1])[1]))"
    return int(sandbox.attack(client, code, pid)[0])


def test_the_daemon_is_still_there(sandbox: Sandbox) -> None:
    """As another user: no signal at all. As PID 1: not even KILL and STOP, from whomever."""
    if sandbox.setting == ONE:
        code = HIT.replace("child = os.fork()", "return outcomes")
        numbers = [*HANDLED, *IGNORED, DEADLINE]
    else:
        code, numbers = HIT, EVERY
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        words = ["daemon", *map(int, numbers)]
        said = sandbox.attack(client, ONE_BY_ONE.replace(HIT, code), *words)
        assert said == ["done" if sandbox.is_one_user else "EPERM"]
        sandbox.check_unharmed(client, victim)
        sandbox.check_well(client)
        if sandbox.is_one_user:
            wait_for(lambda: sandbox.log("signal_refused"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_what_ends_a_daemon_of_the_same_user_ends_every_tree(
    make_sandbox: Make, number: signal.Signals
) -> None:
    """It cannot be prevented. Nothing is left of any exec, and no exit is made up."""
    sandbox = make_sandbox(ONE)
    with sandbox.connect() as client:
        victim, pid = sandbox.start_victim(client)
        sandbox.start_attack(
            client, "attack", f"signal.signal(15, signal.SIG_IGN)\n"
            f"if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
            f"else: os.kill(DAEMON, {int(number)})\nsignal.pause()",
        )  # fmt: skip
        with pytest.raises(ClosedError):
            client.note("exec.exited", "attack")
        exits = [note for note in client.notes if note["method"] == "exec.exited"]
        assert exits == []
    assert sandbox.daemon.process.wait(10) == -number
    wait_for(lambda: not is_alive(pid) and not of_user(sandbox.uid))
    again = make_sandbox(ONE, again=sandbox.place, uid=sandbox.uid)
    with again.connect() as client:
        for exec_id in (victim, "attack"):
            with pytest.raises(RawError) as caught:
                client.call("exec.wait", exec_id=exec_id)
            assert caught.value.kind == "exec_lost"


def test_a_stopped_daemon_goes_on_where_it_was(make_sandbox: Make) -> None:
    """Nothing is lost of what came meanwhile, once somebody continues it."""
    sandbox = make_sandbox(ONE)
    with sandbox.connect() as client:
        client.call("exec.start", exec_id="other", attach={}, cwd="/",
                    argv=["sh", "-c", "sleep 0.2; seq 1000; exit 7"])  # fmt: skip
        sandbox.start_attack(client, "attack", "os.kill(DAEMON, signal.SIGSTOP)")
        wait_for(lambda: state(sandbox.pid) == "T")
        os.kill(sandbox.pid, signal.SIGCONT)
        assert client.note("exec.exited", "other")["exit"]["code"] == 7
        assert client.output("other").split()[-1] == b"1000"
        assert client.note("exec.exited", "attack")["exit"]["code"] == 0
        sandbox.check_well(client)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_another_execs_shim_and_command(sandbox: Sandbox) -> None:
    """As another user: nothing. As the same: a killed shim costs its exec alone, and that truly."""
    with sandbox.connect() as client:
        victim, pid = sandbox.start_victim(client)
        shim = shim_of(sandbox, client, pid)
        said = sandbox.attack(client, ONE_BY_ONE, shim, *IGNORED_BY_A_SHIM)
        assert said == ["done" if sandbox.is_one_user else "EPERM"]
        if not sandbox.is_one_user:
            for target in (shim, pid):
                assert sandbox.attack(client, ONE_BY_ONE, target, *EVERY) == ["EPERM"]
            sandbox.check_unharmed(client, victim)
        else:
            assert sandbox.attack(client, ONE_BY_ONE, shim, 19) == ["done"]
            assert client.call("exec.inspect", exec_id=victim)["state"] == "running"
            assert "done" in sandbox.attack(client, ONE_BY_ONE, shim, 9)[0]
            its_exit = client.call("exec.wait", exec_id=victim, until="closed")
            assert (its_exit["reason"], its_exit["signal"]) == ("internal", signal.SIGTERM)
            other, pid = sandbox.start_victim(client)
            assert "done" in sandbox.attack(client, ONE_BY_ONE, pid, 10)[0]
            its_exit = client.call("exec.wait", exec_id=other, until="closed")
            assert (its_exit["reason"], its_exit["signal"]) == ("exited", signal.SIGUSR1)
        sandbox.check_well(client)


PARKED: Final = """
hit = 0
for pid in children(DAEMON):
    if pid != SHIM and pid != int(sys.argv[1]):
        hit += said(os.kill, pid, int(sys.argv[2])) == 'done'
tell(hit)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_parked_shims(sandbox: Sandbox, number: signal.Signals) -> None:
    """Killed ones are replaced, stopped ones woken: neither costs a start, or another exec."""
    with sandbox.connect() as client:
        victim, pid = sandbox.start_victim(client)
        shim = shim_of(sandbox, client, pid)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        (hit,) = sandbox.attack(client, PARKED, shim, int(number))
        assert (int(hit) >= 2) is sandbox.is_one_user
        for _ in range(4):
            sandbox.check_well(client)
        sandbox.check_unharmed(client, victim)


WAITING: Final = """
pairs = [(shim, child) for shim in children(DAEMON) if shim not in (SHIM, int(sys.argv[1]))
         for child in children(shim)]
for shim, child in pairs:
    said(os.kill, child, signal.SIGSTOP)
    if sys.argv[2] == 'kill':
        said(os.kill, shim, signal.SIGKILL)
tell(*(child for _, child in pairs))
"""


@pytest.mark.parametrize("shims", ["leave", "kill"])
def test_the_children_of_parked_shims(sandbox: Sandbox, shims: str) -> None:
    """Stopped, they are woken by their job, and die with their shims: no start fails for them."""
    with sandbox.connect() as client:
        victim, pid = sandbox.start_victim(client)
        shim = shim_of(sandbox, client, pid)
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        (told,) = sandbox.attack(client, WAITING, shim, shims)
        stopped = {int(word) for word in told.split()}
        assert len(stopped) >= 2
        for _ in range(4):
            sandbox.check_well(client)
        if sandbox.is_one_user and shims == "kill":
            code = (
                "tell(*(pid for pid in map(int, sys.argv[1:]) if os.path.exists(f'/proc/{pid}')))"
            )
            wait_for(lambda: sandbox.attack(client, code, *stopped) == [""])
        sandbox.check_unharmed(client, victim)


@pytest.mark.parametrize("pattern", ["python", "python3", "runnerd", "runnerd-shim"])
def test_pkill_by_name(sandbox: Sandbox, pattern: str) -> None:
    """`pkill -f python` meets neither daemon nor shims; what it meets by their names is TERM."""
    if sandbox.setting == ONE and pattern == "runnerd":
        pattern = "^runnerd-shim"  # the daemon itself: see the next test
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        exec_id = sandbox.new_id("pkill")
        argv = ["pkill", "-f", pattern]
        client.call("exec.start", exec_id=exec_id, argv=argv, cwd="/", **sandbox.user())
        assert client.call("exec.wait", exec_id=exec_id, until="closed")["signal"] is None
        sandbox.check_unharmed(client, victim)
        sandbox.check_well(client)


UNSEEN: Final = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)        # the kernel reaps, at once
signal.signal(signal.SIGTERM, signal.SIG_IGN)
said(os.kill, DAEMON, signal.SIGSTOP)                # so that it looks when the sender is gone
for _ in range(50):
    if os.fork() == 0:
        said(os.kill, DAEMON, signal.SIGTERM)
        os._exit(0)
try:
    os.wait()                                        # for the last of them
except ChildProcessError:
    pass
tell(said(os.kill, DAEMON, signal.SIGCONT))
signal.pause()
"""


def test_a_term_whose_sender_is_gone(own_sandbox: Sandbox) -> None:
    """One that is PID 1 obeys nobody it cannot see. Elsewhere it is an honest stop, as by kill(1):

    who sends it could as well send KILL.
    """
    with own_sandbox.connect() as client:
        victim, pid = own_sandbox.start_victim(client)
        own_sandbox.start_attack(client, "attack", UNSEEN)
        if own_sandbox.setting != ONE:
            client.note("exec.output", "attack")
            own_sandbox.check_well(client)
            own_sandbox.check_unharmed(client, victim)
            client.call("exec.cancel", exec_id="attack", grace_s=0)
            return
        its_exit = client.note("exec.exited", "attack")["exit"]
        assert (its_exit["reason"], its_exit["signal"]) == ("stopped", signal.SIGKILL)
    assert own_sandbox.daemon.process.wait(10) == 0
    assert not is_alive(pid)


def test_a_kill_of_everything(make_sandbox: Make) -> None:
    """kill(-1, KILL), as killall5 does it: the daemon as PID 1 is the only one of its user left."""
    sandbox = make_sandbox(ONE_PID_1)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        sandbox.start_attack(client, "attack", "os.kill(-1, signal.SIGKILL); tell('on')")
        for exec_id in (victim, "attack"):
            its_exit = client.call("exec.wait", exec_id=exec_id, until="closed")
            assert its_exit["reason"] == "internal"
        killed = client.call("exec.wait", exec_id=victim)
        assert (killed["code"], killed["signal"]) == (None, signal.SIGKILL)
        sandbox.check_well(client)


def test_a_kill_of_everything_by_another_user(make_sandbox: Make) -> None:
    """Only its own user's processes are met: neither the daemon, nor a shim, nor another exec."""
    sandbox = make_sandbox(SEPARATE)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        before = sandbox.shims()
        sibling: dict[str, Any] = {"exec_id": "own", "argv": ["sleep", "900"], **sandbox.user()}
        client.call("exec.start", cwd="/", **sibling)
        assert sandbox.attack(client, "os.kill(-1, signal.SIGKILL); tell('on')") == ["on"]
        its_exit = client.call("exec.wait", exec_id="own", until="closed")
        assert (its_exit["reason"], its_exit["signal"]) == ("exited", signal.SIGKILL)
        assert before - sandbox.shims() <= before
        sandbox.check_unharmed(client, victim)
        sandbox.check_well(client)


def test_a_kill_of_everything_by_the_same_user(make_sandbox: Make) -> None:
    """It cannot be prevented: the daemon and every shim with it. What is left is the killer alone.

    Under tini it ends with the container. What it was is told by the next daemon: it is lost.
    """
    sandbox = make_sandbox(ONE)
    with sandbox.connect() as client:
        victim, _ = sandbox.start_victim(client)
        sandbox.start_attack(client, "attack", "os.kill(-1, signal.SIGKILL); signal.pause()")
        with pytest.raises(ClosedError):
            client.note("exec.exited", "attack")
    assert sandbox.daemon.process.wait(10) == -signal.SIGKILL
    wait_for(lambda: len(of_user(sandbox.uid)) == 1)
    leave_nobody(sandbox.uid)
    with make_sandbox(ONE, again=sandbox.place, uid=sandbox.uid).connect() as client:
        listed = {each["exec_id"]: each for each in client.call("exec.list")["execs"]}
        assert {listed[each]["transcript"] for each in (victim, "attack")} == {"lost"}
