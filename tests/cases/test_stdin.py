"""Cases from the field: feeding a command, or not."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.protocol.framing import Encoding
from tests.cases.looking import metric, peak_rss_bytes, rss_bytes, within
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20


def open_raw(daemon: RunnerdProcess) -> RawClient:
    return RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)


def test_c72_eof_closes_stdin_and_nothing_else(runnerd_daemon: RunnerdProcess) -> None:
    """3 MB come back, then what the shell prints after `cat`, then its own code."""
    data = random.Random(72).randbytes(3_000_000)
    with runnerd_daemon.connect() as client:
        done = client.run(["sh", "-c", "cat; echo tail; exit 2"], input=data)
        assert done.stdout == data + b"tail\n"
        assert (done.stderr, done.exit.code) == (b"", 2)


def test_c74_stdin_is_open_only_where_asked_for(runnerd_daemon: RunnerdProcess) -> None:
    """Without a stdin option a command reads /dev/null."""
    wanted: list[tuple[list[str], bytes]] = [
        (["cat"], b""),
        (["sh", "-c", "read x; echo rc=$?"], b"rc=1\n"),
        ([sys.executable, "-c", "import sys;print(repr(sys.stdin.read()))"], b"''\n"),
        (["stat", "-Lc", "%F", "/dev/stdin"], b"character special file\n"),
        (["readlink", "/proc/self/fd/0"], b"/dev/null\n"),
    ]
    with runnerd_daemon.connect() as client:
        for argv, stdout in wanted:
            done = client.run(argv)
            assert (done.stdout, done.exit.code) == (stdout, 0)
        exec_id = client.run(["true"]).exit.exec_id
    with open_raw(runnerd_daemon) as raw:
        with pytest.raises(RawError) as caught:
            raw.call("exec.write", exec_id=exec_id, data=b"x")
        assert caught.value.kind == "stdin_closed"


@pytest.mark.parametrize("wait_s", [None, 1000.0])
def test_c75_a_command_that_does_not_read_holds_nobody_up(
    runnerd_daemon: RunnerdProcess, wait_s: float | None
) -> None:
    """8 MiB for a `sleep` are taken up to the queue; everything else answers as ever.

    A write that is willing to wait does wait, and holds up no other client's.
    """
    limits: dict[str, Any] = {}
    with open_raw(runnerd_daemon) as writer, open_raw(runnerd_daemon) as other:
        limits = writer.hello["limits"]
        writer.call("exec.start", exec_id="c75", argv=["sleep", "30.75"], stdin="pipe")
        before = rss_bytes(runnerd_daemon.pid)
        write = {"exec_id": "c75", "data": bytes(2 * MIB)} | (
            {} if wait_s is None else {"wait_s": wait_s}
        )
        sent = [writer.send("exec.write", **write) for _ in range(4)]
        writer.call("ping")
        calls: list[Callable[[], object]] = [
            lambda: other.call("exec.signal", exec_id="c75", signal="CONT"),
            lambda: other.call("exec.list"),
            lambda: other.call("exec.start", exec_id="true", argv=["true"]),
            lambda: other.call("exec.wait", exec_id="true"),
            lambda: other.call("exec.write", exec_id="c75", data=b"second"),
            lambda: other.call("exec.write", exec_id="c75", data=b"third", offset=0),
            lambda: writer.call("ping"),
        ]
        for call in calls:
            with within(0.2):
                call()
        taken = other.call("exec.inspect", exec_id="c75")["stdin_accepted_bytes"]
        assert 1 * MIB <= taken <= limits["stdin_queue_bytes"] + (1 << 16)
        assert rss_bytes(runnerd_daemon.pid) - before < 16 * MIB
        if wait_s is None:
            for request_id in sent:
                assert writer.answer(request_id)["accepted_bytes"] <= taken
        with within(1.0, "the cancel"):
            assert other.call("exec.cancel", exec_id="c75")["outcome"] == "ended"
        if wait_s is not None:
            for request_id in sent:
                with pytest.raises(RawError) as caught:
                    writer.answer(request_id)
                assert caught.value.kind == "stdin_closed"


def test_c75_room_that_others_give_up_is_used_at_once(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Where the total is full, a write waits for any exec's bytes to go, not for its own only."""
    daemon = start_daemon("--stdin-total-bytes-max", str(MIB))
    with open_raw(daemon) as client:
        for exec_id, argv in (("full", ["sleep", "1000.75"]), ("cat", ["cat"])):
            client.call("exec.start", exec_id=exec_id, argv=argv, stdin="pipe")
        # More than one, since the pipe itself takes 64 KiB whenever it gets a chance.
        write = {"exec_id": "full", "data": bytes(2 * MIB)}
        wait_for(lambda: client.call("exec.write", **write)["room_bytes"] == 0)
        waiting = client.send("exec.write", exec_id="cat", data=b"late", wait_s=1000.0, eof=True)
        assert client.call("exec.inspect", exec_id="cat")["stdin_accepted_bytes"] == 0
        client.call("exec.cancel", exec_id="full", grace_s=0)
        with within(0.2, "the write"):
            assert client.answer(waiting)["accepted_bytes"] == 4
        assert client.call("exec.wait", exec_id="cat")["stdout"]["total_bytes"] == 4


def test_c76_64_mib_go_round(runnerd_daemon: RunnerdProcess) -> None:
    """Written as fast as possible and read back: the same bytes, in bounded memory and time."""
    data = random.Random(76).randbytes(64 * MIB)
    with runnerd_daemon.connect() as client:
        client.run(["true"])
        before = peak_rss_bytes(runnerd_daemon.pid)
        with within(30.0, "64 MiB"):
            done = client.run(["cat"], input=data)
        assert done.stdout == data
        assert (done.exit.code, done.exit.stdout.total_bytes) == (0, 64 * MIB)
        assert peak_rss_bytes(runnerd_daemon.pid) - before < 16 * MIB


def test_c78_a_command_need_not_read_what_it_is_sent(runnerd_daemon: RunnerdProcess) -> None:
    """20 MB for a command that reads one line, or none, fail the writes and not the exec."""
    lines = b"".join(b"line %d\n" % number for number in range(1_700_000))
    assert len(lines) > 20_000_000
    with runnerd_daemon.connect() as client:
        done = client.run(["head", "-n1"], input=lines)
        assert (done.stdout, done.exit.code, done.exit.reason) == (b"line 0\n", 0, "exited")
        assert client.run(["true"], input=lines).exit.code == 0
    with open_raw(runnerd_daemon) as raw:
        # One whose reader is gone while it lives on: only the writes tell.
        argv = ["sh", "-c", "exec 0<&-; echo; sleep 1000.78"]
        raw.call("exec.start", exec_id="deaf", argv=argv, stdin="pipe", attach={})
        raw.note("exec.output", "deaf")
        for _ in range(2):
            with pytest.raises(RawError) as caught:
                raw.call("exec.write", exec_id="deaf", data=lines[: 2 * MIB])
            assert caught.value.kind == "stdin_closed"
        assert raw.call("exec.inspect", exec_id="deaf")["state"] == "running"
        raw.call("exec.cancel", exec_id="deaf", grace_s=0)
        with pytest.raises(RawError) as caught:
            raw.call("exec.write", exec_id="deaf", data=b"x")
        assert caught.value.kind in ("stdin_closed", "exec_ended")
        assert "started without" not in str(caught.value)
    with runnerd_daemon.connect() as client:
        assert metric(client, "runnerd_stray_failures_total") == 0
        assert client.info().stray_failures == 0


def test_c80_clients_that_leave_in_the_middle_harm_nobody(runnerd_daemon: RunnerdProcess) -> None:
    """500 sockets closed under the daemon's output, and 500 commands that never read."""
    with runnerd_daemon.connect() as client:
        with client.start(["sleep", "1000.80"], attach=False, grace_s=0.0) as beside:
            for number in range(500):
                with open_raw(runnerd_daemon) as leaving:
                    exec_id = f"a{number}"
                    leaving.call(
                        "exec.start",
                        exec_id=exec_id,
                        argv=["cat"],
                        stdin="pipe",
                        attach={},
                        hold_s=0,
                    )
                    leaving.send(
                        "exec.write", exec_id=exec_id, data=bytes(MIB - 1), eof=True, wait_s=60.0
                    )
                    leaving.note("exec.output", exec_id)
                assert client.wait(exec_id).stdout.total_bytes == MIB - 1
            for number in range(500):
                assert client.run(["true"], input=bytes(100_000)).exit.code == 0, number
            assert client.inspect(beside.exec_id).state == "running"
        info = client.info()
        assert (info.pid, info.stray_failures) == (runnerd_daemon.pid, 0)
        wait_for(lambda: client.info().live_execs == 0)


def test_c80_a_log_that_nobody_reads_any_more_is_no_harm(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    """With the reader of its stderr gone, lines are counted as lost; SIGPIPE ends nothing."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    daemon = start_daemon("--log-level", "debug", wrapper=("sh", "-c", f'exec "$@" 2>{fifo}', "sh"))
    with daemon.connect() as client:
        wait_for(lambda: b'"ready"' in os.read(reader, 65536))
        os.close(reader)
        for number in range(20):
            assert client.run(["sh", "-c", f"exit {number}"]).exit.code == number
        assert metric(client, "runnerd_log_lines_dropped_total") > 0
        assert client.info().stray_failures == 0
    assert daemon.stop() == 0
