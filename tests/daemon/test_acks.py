"""Acknowledgements, as requests and as the one notification a client may send."""

from __future__ import annotations

from tests.harness import RunnerdProcess
from tests.raw import RawClient


def ack(client: RawClient, subscription: int, seq: int) -> None:
    params = {"subscription": subscription, "seq": seq}
    client.sock.sendall(client.encode("exec.ack", params, None))


def test_an_ack_that_crosses_with_closed_is_no_error(runnerd_daemon: RunnerdProcess) -> None:
    """Whoever acknowledges the last output cannot know that the subscription is over by then."""
    with RawClient(runnerd_daemon.socket_path) as client:
        number = client.call("exec.start", exec_id="a", argv=["echo"], attach={})["subscription"]
        client.note("exec.closed", "a")
        ack(client, number, 1)
        assert client.call("exec.ack", subscription=number, seq=1) == {}
        assert client.errors_without_id == []


def test_a_notification_is_never_answered(runnerd_daemon: RunnerdProcess) -> None:
    """A wrong one is counted, and nothing more: JSON-RPC gives nowhere to put an error."""
    with RawClient(runnerd_daemon.socket_path) as client:
        ack(client, 77, 1)
        client.sock.sendall(client.encode("exec.ack", {"subscription": "x"}, None))
        assert client.call("ping") == {}
        assert client.errors_without_id == []
        text = client.call("daemon.metrics")["text"]
        assert 'runnerd_refusals_total{kind="subscription_unknown"} 1.0' in text
        assert 'runnerd_refusals_total{kind="invalid_params"} 1.0' in text


def test_one_stream_wanted_under_a_window_does_not_hold_the_other(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """What a subscriber is not sent needs no acknowledgement, also behind what it was sent."""
    script = "echo first; head -c 3000000 /dev/zero >&2; echo last"
    with RawClient(runnerd_daemon.socket_path) as client:
        number = client.call(
            "exec.start",
            exec_id="a",
            argv=["sh", "-c", script],
            attach={"streams": ["stdout"], "window_bytes": 1},
        )["subscription"]
        first = client.note("exec.output", "a")
        ack(client, number, first["seq"])
        assert client.note("exec.exited", "a")["exit"]["stderr"]["total_bytes"] == 3_000_000
        assert client.output("a") == b"first\nlast\n"
