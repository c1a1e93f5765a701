"""Many readers of one exec through the clients, and readers who own nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import ExitPassed, RemoteError
from runnerd.core.bounds import NAMES_MAX
from runnerd.protocol.notes import ClosedNote, OutputNote
from runnerd.protocol.requests import ExecAttach
from tests.daemon.looking import log_lines, planted
from tests.harness import wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runnerd.client.execs import Exec
    from tests.harness import RunnerdProcess

READERS = 100
SLOW_STARTS = """
    from runnerd.daemon import running
    original = running.Running._started
    def later(self, message):
        self._service.poller.call_at(time.monotonic() + 0.3, self, lambda: original(self, message))
    import time
    running.Running._started = later
"""


def bytes_of(handle: Exec) -> bytes:
    return b"".join(note.data for note in handle.output(30) if isinstance(note, OutputNote))


def test_a_hundred_readers_of_one_exec_at_once(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Without a name: NAMES_MAX is for readers a command waits for by name."""
    assert READERS > NAMES_MAX
    go = tmp_path / "go"
    script = f"seq 1000; while [ ! -e {go} ]; do sleep 0.02; done; seq 1001 2000"
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(runnerd_daemon.connect())
        owner.start(["sh", "-c", script], exec_id="x", attach=False)
        clients = [stack.enter_context(runnerd_daemon.connect()) for _ in range(10)]
        handles = [client.attach("x") for client in clients for _ in range(READERS // 10)]
        assert owner.inspect("x").subscriptions == READERS
        go.touch()
        expected = b"".join(b"%d\n" % n for n in range(1, 2001))
        assert {bytes_of(handle) for handle in handles} == {expected}


def test_one_name_too_many_is_refused_and_changes_nothing(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client, client.start(["sleep", "60"], exec_id="x") as handle:
        for at in range(NAMES_MAX - 1):
            client.call("exec.attach", ExecAttach(exec_id="x", subscriber=f"n{at}"))
        with pytest.raises(RemoteError) as caught:
            client.call("exec.attach", ExecAttach(exec_id="x", subscriber="more"))
        assert caught.value.kind == "busy"
        assert caught.value.data.retryable
        assert client.inspect("x").subscriptions == NAMES_MAX
        assert client.attach("x") is not None
        handle.cancel(grace_s=0)


def test_who_does_not_own_the_sandbox_may_read_and_goes_on_reading(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; echo two"
    with runnerd_daemon.connect(fence=7) as owner, runnerd_daemon.connect() as other:
        owner.start(["sh", "-c", script], exec_id="x", attach=False)
        handle = other.attach("x")
        assert runnerd_daemon.ctl("logs", "x").returncode == 0
        with pytest.raises(RemoteError, match="has an owner"):
            other.cancel("x")
        go.touch()
        assert bytes_of(handle) == b"one\ntwo\n"
        done = runnerd_daemon.ctl("attach", "x")
        assert (done.returncode, done.stdout) == (0, b"one\ntwo\n")


def test_a_tail_begins_where_it_says(runnerd_daemon: RunnerdProcess) -> None:
    """Also of what has ended, where the newest record is no output."""
    script = "for n in 1 2 3; do echo $n; sleep 0.05; done"
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", script], exec_id="x")
        assert bytes_of(handle) == b"1\n2\n3\n"
        wait_for(lambda: client.inspect("x").state == "closed")
        assert bytes_of(client.attach("x", after="tail")) == b""
        assert client.attach("x", after="tail").wait().code == 0
        client.send("exec.attach", ExecAttach(exec_id="x", after="tail", tail_bytes=4))
        events = client.receive_events(10)
        while not isinstance(events[-1], ClosedNote):
            events += client.receive_events(10)
        output = [event.data for event in events if isinstance(event, OutputNote)]
        assert b"".join(output) == b"2\n3\n"


def test_who_begins_behind_the_exit_is_told_so(runnerd_daemon: RunnerdProcess) -> None:
    """Output 1, exit 2, closed 3: after 1 the exit comes, after 2 and 3 only that it is over."""
    with runnerd_daemon.connect() as client:
        client.start(["sh", "-c", "echo 1; exit 4"], exec_id="x", attach=False)
        client.wait("x", until="closed", timeout_s=20)
        assert bytes_of(client.attach("x", after=1)) == b""
        for after in (2, 3):
            handle = client.attach("x", after=after)
            with pytest.raises(ExitPassed):
                bytes_of(handle)
            assert handle.wait(10).code == 4
        assert client.run(["echo", "y"]).stdout == b"y\n"
    assert runnerd_daemon.ctl("attach", "--after", "1", "x").returncode == 4
    done = runnerd_daemon.ctl("attach", "--after", "2", "x")
    assert done.returncode == 125
    assert b"'x' had exited before the sequence asked for" in done.stderr
    assert runnerd_daemon.ctl("attach", "--tail", "x").returncode == 4


def test_an_attach_behind_a_start_whose_client_left_meanwhile_opens_nothing(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """It waits for the start; a reader made for a connection that is gone would never end.

    The command would wait for it for ever, and its room among the subscriptions be lost.
    """
    daemon = start_daemon(**planted(SLOW_STARTS))
    with RawClient(daemon.socket_path) as client:
        with RawClient(daemon.socket_path) as leaving:
            leaving.send("exec.start", exec_id="e", argv=["head", "-c", "1000000", "/dev/zero"])
            leaving.send("exec.attach", exec_id="e", window_bytes=1)
            wait_for(lambda: client.call("daemon.info")["live_execs"] == 1)
        assert client.call("exec.wait", exec_id="e", timeout_s=20)["code"] == 0
        assert client.call("daemon.info")["subscriptions"] == 0
        assert client.call("exec.inspect", exec_id="e")["subscriptions"] == 0
    assert log_lines(daemon, "stray_failure") == []


@pytest.mark.parametrize("way", ["attach", "start again"])
def test_a_live_exec_that_has_lost_all_its_output_is_read_from_the_gap_on(
    start_daemon: Callable[..., RunnerdProcess], way: str
) -> None:
    """With seven live, its one record is more than its share, which the others write full."""
    options = ("--transcript-total-bytes-max=2000", "--tail-bytes-max=2000")
    daemon = start_daemon("--spool=off", "--tail-bytes-min=500", *options)
    argv = ["sh", "-c", "printf %0400d 1; read go; echo more"]
    start: dict[str, Any] = {"exec_id": "e", "argv": argv, "stdin": "pipe", "nonce": "n" * 16}
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        other.call("exec.start", **start)
        wait_for(lambda: other.call("exec.inspect", exec_id="e")["last_seq"] == 1)
        for at in range(6):
            noise = ["sh", "-c", "printf %0600d 2; sleep 900"]
            other.call("exec.start", exec_id=f"other{at}", argv=noise)
        wait_for(lambda: other.call("exec.inspect", exec_id="e")["transcript"] == "evicted")
        if way == "attach":
            client.call("exec.attach", exec_id="e")
        else:
            assert client.call("exec.start", **start, attach={})["subscription"] is not None
        gap = client.note("exec.gap", "e")
        assert (gap["first_seq"], gap["last_seq"], gap["stdout_bytes"]) == (1, 1, 400)
        other.call("exec.write", exec_id="e", data="Z28K")
        assert client.note("exec.exited", "e")["exit"]["code"] == 0
        assert client.output("e") == b"more\n"
        for at in range(6):
            other.call("exec.cancel", exec_id=f"other{at}", grace_s=0)
