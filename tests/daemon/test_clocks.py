"""Deadline, orphan and stall clocks of real commands, and a daemon that stood still meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cases.field import ROOM, is_stopped, mark, marked, metric
from tests.daemon.looking import log_lines, planted
from tests.harness import is_alive, wait_for
from tests.raw import RawClient
from tests.shim.needs import need_v2_cgroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]

REASONS = {"deadline_s": "deadline", "orphan_ttl_s": "orphaned", "stall_s": "stalled"}
SPIN = "while :; do :; done"


def end_of(client: RawClient, exec_id: str, timeout_s: float = 30) -> dict[str, Any]:
    """Wait for an exec's exit; its reason is what these tests are about."""
    request = client.send("exec.wait", exec_id=exec_id)
    return client.answer(request, timeout_s)


def lives_on(client: RawClient, exec_id: str, timeout_s: float) -> bool:
    """Whether an exec is still not being ended after some time."""
    time.sleep(timeout_s)  # the absence of an event has no condition to wait for
    info = client.call("exec.inspect", exec_id=exec_id)
    return bool(info["state"] == "running" and info["ending"] is None)


def test_a_command_nobody_is_attached_to_is_ended(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="o", argv=["sleep", "60"], orphan_ttl_s=0.3)
        its_exit = end_of(client, "o")
        assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGTERM, "orphaned")
        assert 0.3 <= its_exit["wall_s"] < 0.3 + ROOM


def test_whoever_is_attached_keeps_it_alive(runnerd_daemon: RunnerdProcess) -> None:
    """A reader at the start, a second one, the first gone: only without any does it run."""
    with RawClient(runnerd_daemon.socket_path) as watcher:
        with RawClient(runnerd_daemon.socket_path) as first:
            first.call("exec.start", exec_id="o", argv=["sleep", "60"], orphan_ttl_s=0.4, attach={})
            assert lives_on(watcher, "o", 0.8)
            subscription = watcher.call("exec.attach", exec_id="o")["subscription"]
        assert lives_on(watcher, "o", 0.8), "the first is lost, the second still there"
        began_s = time.monotonic()
        watcher.call("exec.detach", subscription=subscription)
        assert end_of(watcher, "o")["reason"] == "orphaned"
        assert time.monotonic() - began_s >= 0.4


def test_a_lost_connection_leaves_an_orphan(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as watcher:
        with RawClient(runnerd_daemon.socket_path) as first:
            first.call("exec.start", exec_id="o", argv=["sleep", "60"], orphan_ttl_s=0.3, attach={})
        assert end_of(watcher, "o")["reason"] == "orphaned"


@pytest.mark.parametrize("script", ["sleep 60", "echo one; sleep 60", "sleep 60 & sleep 61"])
def test_what_neither_prints_nor_computes_has_stalled(
    runnerd_daemon: RunnerdProcess, script: str
) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="s", argv=["sh", "-c", script], stall_s=0.5, attach={})
        its_exit = end_of(client, "s")
        assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGTERM, "stalled")
        assert 0.5 <= its_exit["wall_s"] < 1 + ROOM
        wait_for(lambda: client.call("exec.inspect", exec_id="s")["state"] == "closed")


BUSY = {
    "prints": "while sleep 0.1; do echo .; done",
    "complains": "while sleep 0.1; do echo . >&2; done",
    "computes": SPIN,
    # Of processes that lived and were waited for between two looks.
    "in its dead": f"while :; do timeout 0.1 sh -c '{SPIN}'; done",
    "in one child of two": f"sleep 60 & (trap '' TERM; {SPIN}) & wait",
}


def test_what_prints_or_computes_has_not(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        for number, script in enumerate(BUSY.values()):
            argv = ["sh", "-c", script]
            client.call("exec.start", exec_id=f"s{number}", argv=argv, stall_s=1.5, grace_s=0.0)
        time.sleep(5)  # the absence of an event has no condition to wait for
        for number, how in enumerate(BUSY):
            assert client.call("exec.inspect", exec_id=f"s{number}")["ending"] is None, how
            client.call("exec.cancel", exec_id=f"s{number}")


IGNORES_ITS_CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if not os.fork():
        while time.process_time() < 0.03: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


@pytest.mark.parametrize("cgroups", ["auto", "off"])
def test_who_computes_in_children_that_nobody_waits_for_has_not_stalled(
    start_daemon: Daemons, cgroups: str
) -> None:
    """The kernel adds their time to nobody's: only their cgroup knows of it, if they have one."""
    if cgroups == "auto":
        need_v2_cgroup()
    daemon = start_daemon("--cgroups", cgroups)
    with RawClient(daemon.socket_path) as client:
        for number in range(4):
            argv = ["python3", "-I", "-c", IGNORES_ITS_CHILDREN]
            client.call("exec.start", exec_id=f"s{number}", argv=argv, stall_s=1.5, grace_s=0.0)
        time.sleep(5)  # the absence of an event has no condition to wait for
        for number in range(4):
            assert client.call("exec.inspect", exec_id=f"s{number}")["ending"] is None
            client.call("exec.cancel", exec_id=f"s{number}")


def test_who_ignores_its_children_and_does_nothing_has_stalled_where_a_cgroup_tells(
    start_daemon: Daemons,
) -> None:
    need_v2_cgroup()
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "trap '' CHLD; sleep 900; :"]
        client.call("exec.start", exec_id="s", argv=argv, stall_s=0.5)
        assert end_of(client, "s")["reason"] == "stalled"


def test_a_stopped_command_has_stalled(runnerd_daemon: RunnerdProcess) -> None:
    """It computes nothing, whatever it was stopped in; TERM is followed by CONT."""
    with RawClient(runnerd_daemon.socket_path) as client:
        started = client.call("exec.start", exec_id="s", argv=["sh", "-c", SPIN], stall_s=0.5)
        os.kill(started["pid"], signal.SIGSTOP)
        its_exit = end_of(client, "s")
        assert (its_exit["signal"], its_exit["reason"]) == (signal.SIGTERM, "stalled")
        assert not its_exit["forced"]


def test_a_command_that_stops_computing_is_noticed(runnerd_daemon: RunnerdProcess) -> None:
    script = f"timeout 1 sh -c '{SPIN}'; sleep 60"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="s", argv=["sh", "-c", script], stall_s=0.5)
        its_exit = end_of(client, "s")
        assert its_exit["reason"] == "stalled"
        assert 1.5 <= its_exit["wall_s"] < 2 + ROOM


@pytest.mark.parametrize("clock", REASONS)
def test_leftovers_are_chased_by_no_clock(runnerd_daemon: RunnerdProcess, clock: str) -> None:
    word = mark()
    script = f"sleep {word} >/dev/null 2>&1 &"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="l", argv=["sh", "-c", script], **{clock: 0.5})
        assert end_of(client, "l")["reason"] == "exited"
        time.sleep(1.2)  # past the clock: the absence of an end
        assert client.call("exec.inspect", exec_id="l")["ending"] is None
        assert marked(word)
        client.call("exec.cancel", exec_id="l", grace_s=0)
        assert not marked(word)


@pytest.mark.parametrize("clock", REASONS)
def test_a_clock_that_meets_the_exit_gives_one_exit(
    runnerd_daemon: RunnerdProcess, clock: str
) -> None:
    """Around the moment of the exit, 200 times: its own, or a TERM's with the clock's reason.

    Where that moment is here and now the outcomes tell: the clocks of the next ten come later by
    each that a clock has ended, and earlier by each that has ended by itself.
    """
    seen = {"exited": 0, REASONS[clock]: 0}
    about_s = 0.1
    with RawClient(runnerd_daemon.socket_path) as client:
        for ten in range(0, 200, 10):
            starts = [
                client.send(
                    "exec.start",
                    exec_id=f"r{number}",
                    argv=["sleep", "0.1"],
                    **{clock: about_s + 0.001 * (number % 10 - 4.5)},
                )
                for number in range(ten, ten + 10)
            ]
            for start in starts:
                client.answer(start)
            for number in range(ten, ten + 10):
                its_exit = end_of(client, f"r{number}")
                by_itself = its_exit["reason"] == "exited"
                seen[its_exit["reason"]] += 1
                about_s += -0.001 if by_itself else 0.001
                ended = (its_exit["code"], its_exit["signal"])
                assert ended == ((0, None) if by_itself else (None, signal.SIGTERM))
    assert sum(seen.values()) == 200
    assert min(seen.values()) >= 20, seen  # it was a race


def freeze(daemon: RunnerdProcess, length_s: float) -> None:
    """Stop the daemon alone: its commands go on, so that only its clocks are looked at."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: is_stopped(daemon.pid))
        time.sleep(length_s)  # the length of the freeze is what is tested
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_frozen_time_is_nobodys_time(runnerd_daemon: RunnerdProcess) -> None:
    """Six seconds of stand-still, 4 s to live: each clock ends at ten, and not on waking up."""
    with RawClient(runnerd_daemon.socket_path) as client:
        for clock in REASONS:
            client.call("exec.start", exec_id=clock, argv=["sleep", "60"], **{clock: 4.0})
        freeze(runnerd_daemon, 6)
        for clock, reason in REASONS.items():
            its_exit = end_of(client, clock)
            assert its_exit["reason"] == reason
            # The loop's turn before the freeze is at most 2 s older than the freeze.
            assert 10.0 <= its_exit["wall_s"] < 12.1 + ROOM
        (line,) = log_lines(runnerd_daemon, "frozen")
        assert 6.0 <= line["gap_s"] < 8.1 + ROOM
        assert line["execs"] == 3
        text = client.call("daemon.metrics")["text"]
        assert metric(text, "runnerd_freezes_total") == 1
        assert metric(text, "runnerd_frozen_seconds_total") == line["gap_s"]


def test_the_twin_without_the_rule_ends_on_waking_up(start_daemon: Daemons) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import freezes
            freezes.GAP_S = 1e9
            """)
    )
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="f", argv=["sleep", "60"], deadline_s=4.0)
        freeze(daemon, 6)
        its_exit = end_of(client, "f")
        assert its_exit["reason"] == "deadline"
        assert its_exit["wall_s"] < 9
    assert log_lines(daemon, "frozen") == []


def test_a_short_stand_still_is_none(runnerd_daemon: RunnerdProcess) -> None:
    """A loop that is merely slow takes no time from a deadline: it is hard."""
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="f", argv=["sleep", "60"], deadline_s=1.0)
        freeze(runnerd_daemon, 2)
        assert end_of(client, "f")["wall_s"] < 2 + ROOM
        assert log_lines(runnerd_daemon, "frozen") == []


def wake_ups(pid: int) -> int:
    """Return how often a process's first thread has gone to sleep by itself."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_clock_that_waits_wakes_nobody_often(runnerd_daemon: RunnerdProcess) -> None:
    """Once in two seconds for all clocks together, and the pulse as ever."""
    with RawClient(runnerd_daemon.socket_path) as client:
        for number in range(20):
            client.call(
                "exec.start", exec_id=f"i{number}", argv=["sleep", "60"],
                deadline_s=500.0, orphan_ttl_s=600.0, stall_s=700.0,
            )  # fmt: skip
        time.sleep(1)  # the pool is refilled behind the answers
        before = wake_ups(runnerd_daemon.pid)
        time.sleep(6)  # a rate needs a length of time
        assert wake_ups(runnerd_daemon.pid) - before <= 3 + 2 + 2
        for number in range(20):
            client.call("exec.cancel", exec_id=f"i{number}", grace_s=0)


def test_no_clock_no_pulse(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        started = client.call("exec.start", exec_id="d", argv=["sleep", "60"], deadline_s=500.0)
        client.call("exec.cancel", exec_id="d", grace_s=0)
        assert not is_alive(started["pid"])
        time.sleep(1)  # the pool is refilled behind the answers
        before = wake_ups(runnerd_daemon.pid)
        time.sleep(6)  # a rate needs a length of time
        assert wake_ups(runnerd_daemon.pid) - before <= 2
