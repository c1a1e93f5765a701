"""A quiet subscription hears that exec and connection live; a busy or stuck one does not."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runnerd.core.bounds import HEARTBEAT_S
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_S = 1.0  # a tick, and what a loaded machine adds
SLACK_S = 1.0


def test_a_heartbeat_comes_after_every_time_of_quiet(runnerd_daemon: RunnerdProcess) -> None:
    """With the last sequence and the state, past a full window; not where output comes.

    One quiet exec has ended but for a leftover, and two subscriptions share one connection.
    """
    path = runnerd_daemon.socket_path
    with RawClient(path) as client, RawClient(path) as busy:
        began_s = time.monotonic()
        script = "yes | head -c 1000000; sleep 1000"
        client.call(
            "exec.start",
            exec_id="full",
            argv=["sh", "-c", script],
            attach={"window_bytes": 1},
            grace_s=0,
        )
        client.call("exec.start", exec_id="left", argv=["sh", "-c", "sleep 1000 &"], attach={})
        busy.call(
            "exec.start",
            exec_id="busy",
            argv=["sh", "-c", "while :; do echo; sleep 1; done"],
            attach={},
            grace_s=0,
        )
        client.note("exec.exited", "left")
        client.note("exec.output", "full")
        for exec_id, state in (("full", "running"), ("left", "lingering")):
            beat = client.note("exec.heartbeat", exec_id)
            took_s = time.monotonic() - began_s
            assert HEARTBEAT_S - 0.1 <= took_s <= HEARTBEAT_S + LATE_S + SLACK_S
            at = client.call("exec.inspect", exec_id=exec_id)
            assert (beat["last_seq"], beat["state"]) == (at["last_seq"], state)
        assert client.note("exec.output", "full")["seq"] == 1
        client.notes.clear()
        client.note("exec.heartbeat", "full")  # and again
        took_s = time.monotonic() - began_s
        assert 2 * HEARTBEAT_S - 0.1 <= took_s <= 2 * (HEARTBEAT_S + LATE_S) + SLACK_S
        busy.call("ping")  # everything before its answer is read with it
        assert {note["method"] for note in busy.notes} == {"exec.output"}


def test_no_heartbeats_pile_up_behind_a_full_socket(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """A quiet subscription of a reader that stands still is told once at most what it missed."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as stuck:
        stuck.call("exec.start", exec_id="quiet", argv=["sleep", "1000"], attach={}, grace_s=0)
        stuck.call("exec.start", exec_id="noise", argv=["yes"], attach={}, flow="drop")
        wait_for(lambda: client.call("exec.inspect", exec_id="noise")["last_seq"] > 100)
        time_s = time.monotonic() + 3 * (HEARTBEAT_S + LATE_S)
        while time.monotonic() < time_s:
            client.call("ping")
            time.sleep(0.1)
        client.call("exec.cancel", exec_id="noise")
        stuck.note("exec.closed", "noise")
        beats = [note for note in stuck.notes if note["method"] == "exec.heartbeat"]
        assert len(beats) <= 1
        assert stuck.note("exec.heartbeat", "quiet")["state"] == "running"  # it goes on


def wakeups(pid: int) -> int:
    """Return how often the process has gone to sleep, all threads. Source: proc(5), status."""
    line = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
    statuses = Path(f"/proc/{pid}/task").glob("*/status")
    return sum(int(line.findall(status.read_text())[0]) for status in statuses)


def test_a_quiet_daemon_sleeps(runnerd_daemon: RunnerdProcess) -> None:
    """Next to nothing wakes it without a subscription, and 100 of them at most once a second.

    They are opened over five seconds, so that their times would differ.
    """
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "1000"], grace_s=0)
        _wakeups_per_s(runnerd_daemon.pid)  # the first seconds: what a boot leaves for later
        rates = [_wakeups_per_s(runnerd_daemon.pid)]
        for _ in range(100):
            client.call("exec.attach", exec_id="e")
            time.sleep(HEARTBEAT_S / 100)
        rates.append(_wakeups_per_s(runnerd_daemon.pid))
        print(f"\nwake-ups a second with 0 and 100 subscriptions: {rates}")
        # The pulse, three times at most in ten seconds: a socket is to be missed within five.
        assert rates[0] <= 0.3
        assert rates[1] <= 1.3 + 0.1


def _wakeups_per_s(pid: int) -> float:
    time.sleep(0.5)  # what was going on is over
    before, began_s = wakeups(pid), time.monotonic()
    time.sleep(2 * HEARTBEAT_S)
    return (wakeups(pid) - before) / (time.monotonic() - began_s)
