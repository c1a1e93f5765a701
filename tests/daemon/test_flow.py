"""A command waits for its reader, and never for what its reader is not sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runnerd.core.bounds import DRAIN_S
from tests.harness import wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
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
