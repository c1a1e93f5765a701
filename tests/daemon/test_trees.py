"""Whole trees ended: nothing is left, and the receipt is what a look at /proc saw.

RUNNERD_CASES_FULL=1 makes it 1,000 random trees, and 1,000 starts cancelled at once.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests import needs
from tests.cases.field import mark, marked, rounds, status_field
from tests.harness import REPOSITORY, descendants, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess

MAKER: Final = str(REPOSITORY / "tests" / "daemon" / "tree_maker.py")


def random_plan(chance: random.Random, depth: int = 0) -> str:
    """Write the plan of a tree of up to about thirty processes."""
    traits = "".join(trait for trait in "sgitd" if chance.random() < 0.2) or "r"
    if depth == 0 or "s" in traits:
        traits = traits.replace("g", "") or "r"  # who leads a session leads its group
    if depth == 0:
        traits = traits.replace("d", "").replace("s", "") or "r"  # it is nobody's child here
    count = chance.choice([0, 0, 1, 1, 2, 3]) if depth else chance.randint(1, 4)
    kept = [random_plan(chance, depth + 1) for _ in range(count if depth < 4 else 0)]
    if depth and not kept and chance.random() < 0.1:
        traits += "f"
    return f"{traits}({''.join(kept)})"


def start(client: RawClient, exec_id: str, word: str, plan: str) -> int:
    """Start a tree and wait until all of it is there; returns the command's pid."""
    argv = [sys.executable, "-SE", MAKER, word, plan]
    started = client.call("exec.start", exec_id=exec_id, argv=argv, attach={}, grace_s=0.2)
    wanted = plan.count("(")
    while len(client.output(exec_id)) < wanted:
        assert not client.output(exec_id, "stderr"), plan
        client.receive()
    client.notes.clear()
    return int(started["pid"])


def place(pid: int, leader: int) -> str:
    """Say where a process is, as a receipt does, by what /proc says."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    group, session = int(fields[2]), int(fields[3])
    if group == leader:
        return "group"
    return "session" if session == leader else "outside"


def listed(processes: list[dict[str, Any]]) -> dict[int, str]:
    return {each["pid"]: each["place"] for each in processes}


@pytest.mark.timeout(600)
def test_random_trees_are_ended_and_told(runnerd_daemon: RunnerdProcess) -> None:
    """With and without a TERM first; each its own seed, which a failure shows."""
    for seed in range(rounds(1000, 120)):
        chance = random.Random(seed)
        plan, word = random_plan(chance), mark()
        grace_s = chance.choice([0, 0, 0.05])
        told = f"seed {seed}: {plan}, grace {grace_s}"
        with RawClient(runnerd_daemon.socket_path) as client:
            leader = start(client, f"t{seed}", word, plan)
            runs_away = "f" in plan
            before = {} if runs_away else {pid: place(pid, leader) for pid in marked(word)}
            answer = client.call("exec.cancel", exec_id=f"t{seed}", grace_s=grace_s)
            assert not marked(word), told
            assert answer["outcome"] == "ended", told
            receipt = answer["receipt"]
            assert receipt["survivors"] == [], told
            assert len(receipt["killed"]) == min(receipt["killed_total"], 200), told
            if runs_away:
                assert receipt["killed_total"] + receipt["termed_total"] > 0, told
            elif grace_s:
                assert listed(receipt["termed"]) == before, told
                assert listed(receipt["killed"]).items() <= before.items(), told
                if "i" in plan:
                    assert receipt["killed_total"] > 0, told
            else:
                assert listed(receipt["killed"]) == before, told
                assert receipt["termed"] == [], told
            its_exit = client.call("exec.wait", exec_id=f"t{seed}", until="closed")
            assert its_exit["reason"] == "cancelled", told
            assert its_exit["signal"] in ((9, 15) if grace_s else (9,)), told


LEAVING: Final = {
    "setsid": "setsid sleep {} & wait",
    "double fork": "(setsid sleep {} &) ; sleep 600",
    "no environment": "(env -i setsid sh -c 'sleep {}; :' &) ; sleep 600",
    "no parent": "(sleep {} & ) & sleep 600",
    "stopped": "sleep {} & until grep -q sleep /proc/$!/comm; do :; done; kill -STOP $!; wait",
    "ignores all": "trap '' TERM HUP INT; sleep {} & wait",
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("grace_s", [0, 0.1])
def test_ways_to_leave_a_tree(runnerd_daemon: RunnerdProcess, how: str, grace_s: float) -> None:
    word = mark()
    with RawClient(runnerd_daemon.socket_path) as client:
        script = LEAVING[how].format(word)
        client.call("exec.start", exec_id="l", argv=["sh", "-c", script])
        (pid,) = wait_for(lambda: marked(word))
        answer = client.call("exec.cancel", exec_id="l", grace_s=grace_s)
        assert answer["outcome"] == "ended"
        assert not is_alive(pid)
        receipt = answer["receipt"]
        assert pid in listed(receipt["termed"] if grace_s else receipt["killed"])


TRACER: Final = """
import ctypes, os, signal, sys, time
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
child = os.fork()
if not child:
    os.execvp("sleep", ["sleep", sys.argv[1]])
time.sleep(0.05)
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
assert ptrace(PTRACE_SEIZE, child, 0, 0) == 0
assert ptrace(PTRACE_INTERRUPT, child, 0, 0) == 0
os.waitpid(child, 0)
print("traced", flush=True)
signal.pause()
"""

DEAD_LEADER: Final = """
import ctypes, os, sys, threading, time
def live():
    time.sleep(0.05)
    os.write(1, b"alone")
    time.sleep(600)
threading.Thread(target=live).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("grace_s", [0, 0.1])
def test_a_process_stopped_by_its_tracer_is_ended(
    runnerd_daemon: RunnerdProcess, grace_s: float
) -> None:
    """A tracer in the tree holds its child in a ptrace stop, which CONT does not end; KILL does."""
    word = mark()
    with RawClient(runnerd_daemon.socket_path) as client:
        argv = [sys.executable, "-c", TRACER, word]
        client.call("exec.start", exec_id="p", argv=argv, attach={})
        client.note("exec.output", "p")
        (traced,) = (pid for pid in marked(word) if status_field(pid, "State").startswith("t"))
        answer = client.call("exec.cancel", exec_id="p", grace_s=grace_s)
        assert answer["outcome"] == "ended"
        assert not marked(word)
        assert not is_alive(traced)


@pytest.mark.parametrize("grace_s", [0, 0.1])
def test_a_dead_first_thread_hides_nobody(runnerd_daemon: RunnerdProcess, grace_s: float) -> None:
    """The command looks like a zombie and lives on in another thread."""
    with RawClient(runnerd_daemon.socket_path) as client:
        argv = [sys.executable, "-c", DEAD_LEADER]
        pid = client.call("exec.start", exec_id="z", argv=argv, attach={})["pid"]
        client.note("exec.output", "z")
        wait_for(lambda: status_field(pid, "State").startswith("Z"))
        assert client.call("exec.inspect", exec_id="z", usage=True)["usage"]["processes"] == 1
        answer = client.call("exec.cancel", exec_id="z", grace_s=grace_s)
        assert answer["outcome"] == "ended"
        assert not Path(f"/proc/{pid}/stat").exists()
        its_exit = client.call("exec.wait", exec_id="z")
        assert (its_exit["signal"], its_exit["reason"]) == (15 if grace_s else 9, "cancelled")


def test_cancelled_straight_after_the_start_again_and_again(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """In one breath with the start, and with its answer just come, in turn.

    Every signal of the daemon and its shims is seen, and went to who they had made themselves.
    Never to a group, to pid 1 or below, or to the daemon's own group; one exit each, none left.
    """
    needs.root()
    strace, trace = needs.program("strace"), tmp_path / "trace"
    calls = "trace=kill,tkill,tgkill,pidfd_open,pidfd_send_signal,clone,clone3,fork,vfork"
    # Three parked shims with a child each: who is made later is seen being made.
    wait_for(lambda: len(descendants(runnerd_daemon.pid)) == 6)
    made = {runnerd_daemon.pid, *descendants(runnerd_daemon.pid)}
    tracer = subprocess.Popen(
        [strace, "-f", "-qq", "-e", calls, "-e", "signal=none", "-o", str(trace),
         *(word for pid in made for word in ("-p", str(pid)))],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    word, count = mark(), rounds(1000, 200)
    try:
        wait_for(lambda: all(status_field(pid, "TracerPid") == str(tracer.pid) for pid in made))
        with RawClient(runnerd_daemon.socket_path) as client:
            for number in range(count):
                exec_id = f"c{number}"
                start_id = client.send("exec.start", exec_id=exec_id, argv=["sleep", word])
                is_known = number % 2 == 0 and refusal_of(client, start_id) is None
                cancel_id = client.send("exec.cancel", exec_id=exec_id, grace_s=0)
                assert client.answer(cancel_id)["outcome"] == "ended"
                if not is_known and refusal_of(client, start_id) == "cancelled":
                    continue
                its_exit = client.call("exec.wait", exec_id=exec_id)
                assert (its_exit["signal"], its_exit["reason"]) == (9, "cancelled")
            assert not marked(word)
    finally:
        tracer.terminate()
        tracer.communicate(timeout=20)
    signalled = audit(trace.read_text(), made)
    assert len(signalled) >= count // 2
    assert runnerd_daemon.pid not in signalled


def refusal_of(client: RawClient, request: int) -> str | None:
    try:
        client.answer(request)
    except RawError as error:
        return error.kind
    return None


def audit(trace: str, made: set[int]) -> set[int]:
    """Return every pid that was signalled; fail where one was not made by who was watched."""
    made = made | set(
        map(int, re.findall(r"(?:clone3?|v?fork)(?:\(| resumed).* = (\d+)$", trace, re.MULTILINE))
    )
    pidfds: dict[tuple[str, str], int] = {}
    signalled: set[int] = set()
    for line in trace.splitlines():
        if found := re.match(r"(\d+)\s+pidfd_open\((\d+), .* = (\d+)$", line):
            pidfds[found[1], found[3]] = int(found[2])
        elif found := re.match(r"(\d+)\s+pidfd_send_signal\((\d+), (\S+),", line):
            signalled.add(pidfds[found[1], found[2]])
        elif found := re.match(r"(\d+)\s+t?g?kill\((-?\d+), (.*)\)\s+=", line):
            signalled.add(int(found[2]))
    assert signalled <= made, signalled - made
    return signalled
