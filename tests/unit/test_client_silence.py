"""When a connection that says nothing is taken for lost; the clock is the test's."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from runnerd.client.locate import SocketWay
from runnerd.client.session import Answer
from runnerd.client.wire import HELLO_S, SILENCE_S, Options, Wire
from runnerd.core.bounds import HEARTBEAT_S
from runnerd.protocol.codec import Codec
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import HeartbeatNote
from runnerd.protocol.requests import Attach, ExecStart
from tests.unit.fake_daemon import HELLO
from tests.unit.scripted_peer import started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runnerd.client.errors import StreamLost

CODEC = Codec(Encoding.MSGPACK)


class Line:
    """A wire, and the daemon's end of its one connection."""

    def __init__(self, path: str) -> None:
        near, self.far = socket.socketpair()
        self.path = path
        self.lost: list[StreamLost] = []
        options = Options(
            client="me",
            incarnation=None,
            fence=None,
            token=None,
            encoding=Encoding.MSGPACK,
            reconnect_s=60.0,
            on_lost=self.lost.append,
        )
        self.wire = Wire(near, SocketWay(path), options)

    def says(self, framed: bytes | bytearray, now_s: float) -> None:
        self.far.sendall(framed)
        assert self.wire.step(now_s)

    def greets(self, now_s: float) -> None:
        self.says(CODEC.answer(1, HELLO), now_s)

    def subscribes(self, now_s: float) -> None:
        self.greets(now_s)
        self.wire.router.request("exec.start", ExecStart(argv=["a"], attach=Attach()))
        self.says(CODEC.answer(2, started()), now_s)
        assert isinstance(self.wire.router.take_events()[0], Answer)

    def beats(self, now_s: float) -> None:
        note = HeartbeatNote(subscription=1, exec_id="x", last_seq=0, state="running")
        self.says(CODEC.note("exec.heartbeat", note), now_s)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    made = Line(str(tmp_path / "none"))
    yield made
    made.wire.close()
    made.far.close()


def test_four_heartbeats_that_do_not_come_are_a_lost_connection(line: Line) -> None:
    assert SILENCE_S == 4 * HEARTBEAT_S
    line.subscribes(100.0)
    assert not line.wire.step(101.0)
    assert line.wire.wake_at_s == 101.0 + SILENCE_S
    assert not line.wire.step(100.9 + SILENCE_S)
    assert line.wire.step(101.0 + SILENCE_S)
    assert line.wire.socket is None
    assert [each.exec_ids for each in line.lost] == [("x",)]
    assert line.wire.wake_at_s is not None


def test_a_heartbeat_is_enough(line: Line) -> None:
    line.subscribes(0.0)
    for now_s in range(10, 200, 10):
        assert not line.wire.step(now_s - 0.5)
        line.beats(now_s)
    assert not line.wire.step(200.0)
    assert line.lost == []


def test_without_a_subscription_nothing_is_owed(line: Line) -> None:
    line.greets(0.0)
    assert not line.wire.step(1.0)
    assert line.wire.wake_at_s is None
    assert not line.wire.step(10_000.0)
    assert line.lost == []


def test_a_caller_that_was_busy_reads_what_came_meanwhile_first(line: Line) -> None:
    line.subscribes(0.0)
    assert not line.wire.step(1.0)
    line.beats(1000.0)
    assert not line.wire.step(1000.0)
    assert line.lost == []


def test_a_hello_that_is_not_answered_is_a_lost_connection_too(line: Line) -> None:
    line.subscribes(0.0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(line.path)
    listener.listen()
    try:
        line.far.shutdown(socket.SHUT_RDWR)
        assert line.wire.step(1.0)
        assert line.wire.step(60.0)
        assert line.wire.wake_at_s == 60.0 + HELLO_S
        assert not line.wire.step(59.0 + HELLO_S)
        assert line.wire.step(60.0 + HELLO_S)
        assert line.wire.socket is None
    finally:
        listener.close()
