"""What a command leaves running: it lives on, is named, counted, and wears nobody down."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cases.field import cpu_s, mark, marked
from tests.daemon.test_clocks import wake_ups
from tests.harness import wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]

LIVE_MAX = 3


def test_output_of_leftovers_is_thrown_away_slowly(runnerd_daemon: RunnerdProcess) -> None:
    """A writer at full speed is slowed, not refused: 64 KiB each 50 ms, whoever reads or not."""
    word = mark()
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="l", argv=["sh", "-c", f"yes {word} &"])
        client.call("exec.wait", exec_id="l")
        pid = runnerd_daemon.pid
        began_s, began_cpu_s, began_wakes = time.monotonic(), cpu_s(pid), wake_ups(pid)
        time.sleep(3)  # a rate needs a length of time
        lasted_s = time.monotonic() - began_s
        assert cpu_s(pid) - began_cpu_s < 0.3 * lasted_s
        assert wake_ups(pid) - began_wakes < 60 * lasted_s
        assert marked(word), "neither blocked for good nor dead of SIGPIPE"
        client.call("exec.cancel", exec_id="l", grace_s=0)
        discarded = client.call("exec.inspect", exec_id="l")["closed"]["discarded_bytes"]
        rounds = (time.monotonic() - began_s) / 0.05 + 3
        assert 64 * 1024 * 10 < discarded <= rounds * 64 * 1024


def test_who_holds_the_pipes_is_named(runnerd_daemon: RunnerdProcess) -> None:
    """The one that has them, and not the one beside it that does not."""
    holder, other = mark(), mark()
    script = f"sleep {holder} & sleep {other} >/dev/null 2>&1 & :"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="h", argv=["sh", "-c", script])
        client.call("exec.wait", exec_id="h")
        (pid,) = wait_for(lambda: marked(holder))
        wait_for(lambda: marked(other))
        info = client.call("exec.inspect", exec_id="h", usage=True)
        assert info["state"] == "lingering"
        assert info["holders"] == [{"pid": pid, "command": "sleep", "certain": True}]
        assert info["usage"]["processes"] == 2
        client.call("exec.cancel", exec_id="h", grace_s=0)
        assert client.call("exec.inspect", exec_id="h").get("holders", []) == []


def test_lingering_execs_count_against_the_limit(start_daemon: Daemons) -> None:
    daemon = start_daemon("--live-execs-max", str(LIVE_MAX))
    word = mark()
    with RawClient(daemon.socket_path) as client:
        for number in range(LIVE_MAX):
            script = f"sleep {word} >/dev/null 2>&1 &"
            client.call("exec.start", exec_id=f"l{number}", argv=["sh", "-c", script])
            client.call("exec.wait", exec_id=f"l{number}")
        states = [each["state"] for each in client.call("exec.list")["execs"]]
        assert states == ["lingering"] * LIVE_MAX
        with pytest.raises(RawError) as refused:
            client.call("exec.start", argv=["true"])
        assert refused.value.kind == "busy"
        client.call("exec.cancel", exec_id="l0", grace_s=0)
        client.call("exec.start", argv=["true"])
        for number in range(1, LIVE_MAX):
            client.call("exec.cancel", exec_id=f"l{number}", grace_s=0)
        assert not marked(word)
