"""A command waits for its reader, and never for what its reader is not sent."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.core.bounds import DRAIN_S
from tests.daemon.looking import planted
from tests.harness import PATIENCE, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

FULL_TAIL_RECORDS = 3  # of 64 KiB, in a tail of 256 KiB


@pytest.mark.parametrize("window", [{}, {"window_bytes": 1000}])
def test_output_of_the_stream_that_is_not_sent_holds_nothing_up(
    runnerd_daemon: RunnerdProcess, window: dict[str, Any]
) -> None:
    """8 MiB on stderr, far more than a tail, with a blocking reader of stdout alone."""
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call(
            "exec.start",
            exec_id="e",
            argv=["sh", "-c", "head -c 8388608 /dev/zero >&2; echo done"],
            flow="block",
            attach={"streams": ["stdout"], **window},
        )
        ended = client.note("exec.exited", "e", 60.0)["exit"]
        assert (ended["code"], ended["stderr"]["total_bytes"]) == (0, 8 << 20)
        assert client.output("e") == b"done\n"


def test_what_is_passed_over_after_a_slow_peer_lets_the_command_go_on(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The writer's turn comes only once the pipes wait, and it has nothing to write for them."""
    path = runnerd_daemon.socket_path
    with RawClient(path) as slow, RawClient(path) as other:
        slow.call(
            "exec.start",
            exec_id="e",
            argv=["sh", "-c", "read go; head -c 8388608 /dev/zero >&2; echo done"],
            stdin="pipe",
            flow="block",
            attach={"streams": ["stdout"]},
        )
        slow.call(
            "exec.start",
            exec_id="noise",
            argv=["head", "-c", "33554432", "/dev/zero"],
            flow="drop",
            attach={},
        )
        other.call("exec.wait", exec_id="noise")  # far more than the socket of `slow` holds
        other.call("exec.write", exec_id="e", data="Z28K")
        wait_for(lambda: other.call("exec.inspect", exec_id="e")["last_seq"] >= FULL_TAIL_RECORDS)
        assert slow.note("exec.exited", "e", 60.0)["exit"]["code"] == 0
        assert slow.output("e") == b"done\n"


NAMED: dict[str, Any] = {"subscriber": "reader"}


def test_a_named_reader_gets_on_beside_a_flood_to_the_same_connection(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Its peer reads, but never so fast that all there is has been written."""
    daemon = start_daemon("--spool=off")
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        client.call("exec.start", exec_id="flood", argv=["yes"], flow="drop", attach={})
        argv = ["head", "-c", "2097152", "/dev/zero"]
        client.call("exec.start", exec_id="e", argv=argv, flow="block", attach=NAMED)
        is_over = threading.Event()

        def read_slowly() -> None:
            while not is_over.wait(0.002):
                client.sock.recv(1 << 15)

        reading = threading.Thread(target=read_slowly)
        reading.start()
        try:
            assert other.call("exec.wait", exec_id="e", timeout_s=20 * PATIENCE)["code"] == 0
        finally:
            is_over.set()
            reading.join()
        other.call("exec.cancel", exec_id="flood", grace_s=0)


def test_a_shut_gate_looks_what_a_named_reader_has_read_since(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """It had not read it when it was written; what fitted then is too much once tails shrink."""
    options = ("--transcript-total-bytes-max=8000", "--tail-bytes-max=4000")
    daemon = start_daemon(
        "--spool=off",
        "--tail-bytes-min=1000",
        *options,
        **planted("""
            from runnerd.core import heartbeats
            heartbeats.HEARTBEAT_S = 1000  # each would look, too
        """),
    )
    argv = ["sh", "-c", "while read x; do printf %0900d $x; done"]
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:

        def write_record(exec_id: str) -> None:
            other.call("exec.write", exec_id=exec_id, data="MQo=")

        def wait_written(exec_id: str, seq: int) -> None:
            wait_for(lambda: other.call("exec.inspect", exec_id=exec_id)["last_seq"] == seq)

        def receive_records(exec_id: str, count: int) -> None:
            while len(client.output(exec_id)) < 900 * count:
                client.receive(10.0 * PATIENCE)

        fields = {"argv": argv, "stdin": "pipe", "flow": "block", "attach": NAMED}
        for exec_id in ("a", "b", "c", "d", "e"):
            client.call("exec.start", exec_id=exec_id, **fields)
            for seq in (1, 2):
                write_record(exec_id)
                wait_written(exec_id, seq)
            receive_records(exec_id, 2)
            others = [f"{exec_id}.{at}" for at in range(7)]
            for each in others:
                other.call("exec.start", exec_id=each, argv=["sleep", "900"])
            write_record(exec_id)
            receive_records(exec_id, 3)
            for each in (exec_id, *others):
                other.call("exec.cancel", exec_id=each, grace_s=0)


def test_a_reader_that_stands_still_does_not_hold_back_the_exit(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The gate is shut when the command exits; the end of its output is seen all the same."""
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call(
            "exec.start",
            exec_id="e",
            argv=["head", "-c", "250000", "/dev/zero"],  # a tail, and a part of a pipe
            flow="block",
            attach={"window_bytes": 1},
        )
        ended = client.call("exec.wait", exec_id="e")
        phases = ended["phases"]
        assert phases["drained_ms"] - phases["exited_ms"] < DRAIN_S * 1000
        assert ended["stdout"]["kept_bytes"] == 250_000
