"""What all connections together may have the daemon hold: unfinished requests, unread answers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import sys
import termios
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.protocol.framing import Encoding
from tests.cases.field import rss_bytes
from tests.harness import wait_for
from tests.raw import ClosedError, RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Start = Callable[..., RunnerdProcess]

MIB: Final = 1 << 20
PIECE_BYTES: Final = 700_000
encodings = pytest.mark.parametrize("encoding", Encoding, ids=lambda each: each.value)


def unfinished(client: RawClient) -> bytes:
    """Return a good request that is large, less its last byte."""
    return client.encode("exec.inspect", {"exec_id": "x" * PIECE_BYTES}, 1)[:-1]


def unread_bytes(client: RawClient) -> int:
    """Return what the daemon has not read yet. Source: unix(7), SIOCOUTQ."""
    found = fcntl.ioctl(client.sock, termios.TIOCOUTQ, b"\0\0\0\0")
    return int.from_bytes(found, sys.byteorder)


def is_read(client: RawClient) -> bool:
    return unread_bytes(client) == 0


def sent(client: RawClient) -> None:
    with contextlib.suppress(OSError):
        client.sock.sendall(unfinished(client))


@encodings
def test_before_hello_a_frame_is_small(runnerd_daemon: RunnerdProcess, encoding: Encoding) -> None:
    """Who is refused anyway, or says nothing, must not have 4 MiB held for each connection."""
    with RawClient(runnerd_daemon.socket_path, encoding=encoding, hello=False) as client:
        text = "x" * 70_000
        with contextlib.suppress(OSError):
            client.sock.sendall(client.encode("hello", {"protocol": [1], "client": text}, 1))
        assert client.receive()["error"]["data"]["kind"] == "frame_too_large"
        with pytest.raises(ClosedError):
            client.receive()


@encodings
def test_a_large_request_may_follow_hello_at_once(
    runnerd_daemon: RunnerdProcess, encoding: Encoding
) -> None:
    with RawClient(runnerd_daemon.socket_path, encoding=encoding, hello=False) as client:
        hello = client.encode("hello", {"protocol": [1]}, 1)
        large = client.encode("exec.start", {"argv": ["true", "x" * 100_000]}, 2)
        client.sock.sendall(hello + large)
        assert client.answer(1)["protocol"] == 1
        assert client.answer(2)["created"] is True


def test_unfinished_requests_are_bounded_over_all_connections(start_daemon: Start) -> None:
    daemon = start_daemon("--incoming-total-bytes-max", str(MIB))
    with RawClient(daemon.socket_path) as other, RawClient(daemon.socket_path) as late:
        with RawClient(daemon.socket_path) as first:
            assert first.hello["limits"]["incoming_total_bytes"] == MIB
            sent(first)
            # All of it has been taken in: nothing is left in the socket's buffer.
            wait_for(lambda: unread_bytes(first) == 0)
            sent(late)
            error = late.receive()["error"]
            assert (error["data"]["kind"], error["data"]["preserved"]) == (
                "busy",
                "nothing ran, nothing changed",
            )
            with pytest.raises(ClosedError):
                late.receive()
            assert other.call("ping") == {}
            first.sock.sendall(b"\n")
            assert first.receive()["error"]["data"]["kind"] == "invalid_params"
            sent(first)
        # Its connection is gone, and what it took with it.
        assert other.call("ping") == {}
        other.sock.sendall(unfinished(other) + b"\n")
        assert other.receive()["error"]["data"]["kind"] == "invalid_params"


@pytest.mark.parametrize("is_over", [False, True], ids=["silent", "gone"])
def test_large_requests_leave_nothing_behind(start_daemon: Start, is_over: bool) -> None:
    """Answered and silent since then: no bound counted them. Gone: a collection came too rarely."""
    daemon = start_daemon()
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(RawClient(daemon.socket_path))
        before = rss_bytes(daemon.pid)
        for _ in range(60):
            client = stack.enter_context(RawClient(daemon.socket_path))
            client.sock.sendall(unfinished(client))
            if is_over:
                wait_for(functools.partial(is_read, client))
                client.sock.close()
            else:
                client.sock.sendall(b"\n")
                assert client.receive()["error"]["data"]["kind"] == "invalid_params"
        assert other.call("ping") == {}
        assert rss_bytes(daemon.pid) - before < 60 * PIECE_BYTES / 3


def connections(client: RawClient) -> int:
    text: str = client.call("daemon.metrics")["text"]
    return int(float(text.split("\nrunnerd_connections ")[1].split("\n", maxsplit=1)[0]))


def test_unread_answers_are_bounded_over_all_connections(start_daemon: Start) -> None:
    daemon = start_daemon("--outgoing-total-bytes-max", str(MIB))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(daemon.socket_path)) for _ in range(6)]
        reader = stack.enter_context(RawClient(daemon.socket_path))
        assert connections(reader) == len(clients) + 1
        for client in clients:
            with contextlib.suppress(OSError):
                for _ in range(60):
                    client.send("daemon.metrics")
        wait_for(lambda: connections(reader) < len(clients) + 1)
        for _ in range(60):
            assert connections(reader) > 1  # whoever has little waiting is let be
