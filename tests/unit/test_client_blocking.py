"""The blocking client against a scripted daemon: what a real one does not do on demand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from runnerd.client.blocking import connect
from runnerd.client.errors import (
    ClientError,
    ClientTimeout,
    ConnectFailed,
    OutputOverflow,
    ProtocolViolation,
    RemoteError,
    StreamLost,
)
from runnerd.client.pending import QUEUE_BYTES_MAX
from runnerd.protocol.answers import CancelAnswer, WriteAnswer
from runnerd.protocol.daemon_requests import DaemonDrain, Hello, Ping
from runnerd.protocol.errors import RequestError
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import GapNote, OutputNote, StoppingNote
from runnerd.protocol.requests import ExecCancel, ExecStart, ExecWrite
from tests.unit.fake_daemon import HELLO, LIMITS, FakeDaemon, Peer, make_exit, prints

if TYPE_CHECKING:
    from pathlib import Path

    from runnerd.protocol.fields import Params

Id = int | str | None


def ignore(peer: Peer, request_id: Id, params: Params) -> None:
    """Never answer."""


def cancelled(peer: Peer, request_id: Id, params: Params) -> None:
    peer.answer(request_id, CancelAnswer(outcome="ended"))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_run_returns_both_streams_and_the_exit(tmp_path: Path, encoding: Encoding) -> None:
    chunks = [("stdout", b"a\0\xff"), ("stderr", b"e"), ("stdout", b"b")]
    script = {"exec.start": prints(chunks, make_exit(code=3))}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        with connect(daemon.path, encoding=encoding, client="me") as client:
            done = client.run(["x"])
        assert (done.stdout, done.stderr, done.exit.code) == (b"a\0\xffb", b"e", 3)
        hello = daemon.asked[0][1]
    assert isinstance(hello, Hello)
    assert hello.client == "me"


def test_a_missing_socket_names_every_path_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNNERD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("runnerd.client.locate.SYSTEM_SOCKET", "/nonexistent/runnerd.sock")
    with pytest.raises(ConnectFailed) as caught:
        connect()
    paths = ("/nonexistent/runnerd.sock", f"{tmp_path}/runnerd/runnerd.sock")
    assert caught.value.paths == paths
    assert all(path in str(caught.value) for path in paths)


def test_the_socket_is_taken_from_the_environment_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNERD_SOCKET", str(tmp_path / "s"))
    with FakeDaemon(tmp_path / "s", {}), connect() as client:
        client.ping()


def test_a_stale_socket_says_that_nobody_listens(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {}):
        pass
    with pytest.raises(ConnectFailed, match="no runnerd listens at"):
        connect(tmp_path / "s")


@pytest.mark.parametrize("what", ["folder", "file", ""])
def test_what_is_no_socket_is_called_that(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    said = f"'{tmp_path / what}' is no socket" if what else "the path of the socket is empty"
    with pytest.raises(ConnectFailed, match=said) as caught:
        connect(tmp_path / what if what else "")
    assert "--socket" in caught.value.hint


def test_a_refused_hello_is_the_daemons_error(tmp_path: Path) -> None:
    def refuse(peer: Peer, request_id: Id, params: Params) -> None:
        peer.fail(request_id, RequestError("peer_refused", "a command of runnerd"))

    with (
        FakeDaemon(tmp_path / "s", {"hello": refuse}) as daemon,
        pytest.raises(RemoteError) as caught,
    ):
        connect(daemon.path)
    assert caught.value.kind == "peer_refused"


def test_a_silent_daemon_is_a_timeout_and_the_connection_stays_usable(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {"daemon.drain": ignore}) as daemon:
        with connect(daemon.path) as client:
            with pytest.raises(ClientTimeout, match=r"answer to daemon\.drain"):
                client.call("daemon.drain", DaemonDrain(), timeout_s=0.05)
            client.ping()


def test_an_answer_after_the_timeout_is_thrown_away_and_its_subscription_detached(
    tmp_path: Path,
) -> None:
    waiting: list[tuple[Peer, Id]] = []

    def start(peer: Peer, request_id: Id, params: Params) -> None:
        waiting.append((peer, request_id))

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path) as client:
            with pytest.raises(ClientTimeout):
                client.start(["x"], timeout_s=0.05)
            waiting[0][0].started(waiting[0][1])
            waiting[0][0].output(1, 0, b"late")
            client.ping()
            client.ping()
            assert client.receive_events(timeout_s=0) == []
        assert "exec.detach" in [method for method, _ in daemon.asked]


def test_a_connection_lost_before_the_exit_is_said_and_no_exit_made_up(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        peer.output(1, 0, b"first")
        peer.hang_up()

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path, reconnect_s=0) as client:
            handle = client.start(["x"])
            taken: list[bytes] = []
            with pytest.raises(StreamLost, match="without the exit of x"):
                taken.extend(note.data for note in handle.output() if isinstance(note, OutputNote))
            assert taken == [b"first"]
            assert handle.exit is None
            assert not client.is_open
            with pytest.raises(StreamLost):
                client.ping()


def test_what_came_before_a_violation_is_still_delivered(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        peer.output(1, 0, b"first")
        peer.output(1, 5, b"again")

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path) as client:
            with pytest.raises(ProtocolViolation, match="sequence 1 after 1"):
                client.run(["x"])


def test_a_gap_is_handed_out_in_its_place_and_counted(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        note = GapNote(
            subscription=1,
            exec_id="x",
            first_seq=1,
            last_seq=4,
            stdout_bytes=9,
            stderr_bytes=1,
            stdout_offset=9,
            stderr_offset=1,
        )
        peer.note("exec.gap", note)
        peer.output(5, 9, b"rest")
        peer.exited(6, make_exit(stdout_bytes=13, stderr_bytes=1))

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path) as client:
            handle = client.start(["x"])
            assert [type(note) for note in handle.output()] == [GapNote, OutputNote]
            assert handle.gap_bytes == 10
            assert handle.last_seq == 5


def test_leaving_the_block_cancels_what_was_created_and_has_not_ended(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)

    script = {"exec.start": start, "exec.cancel": cancelled}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        with connect(daemon.path) as client:
            with pytest.raises(ZeroDivisionError), client.start(["x"]):
                raise ZeroDivisionError
        (started,) = [params for _, params in daemon.asked if isinstance(params, ExecStart)]
        assert started.nonce is not None
        params = ExecCancel(exec_id="x", tombstone=False, if_nonce=started.nonce)
        assert ("exec.cancel", params) in daemon.asked


def test_leaving_the_block_leaves_what_has_ended_alone(tmp_path: Path) -> None:
    script = {"exec.start": prints([], make_exit()), "exec.cancel": cancelled}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        with connect(daemon.path) as client, client.start(["x"]) as handle:
            assert list(handle.output()) == []
        assert "exec.cancel" not in [method for method, _ in daemon.asked]


def test_input_is_fed_by_offset_and_goes_on_where_a_full_queue_stopped_it(tmp_path: Path) -> None:
    taken = bytearray()

    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)

    def write(peer: Peer, request_id: Id, params: Params) -> None:
        assert isinstance(params, ExecWrite)
        assert params.offset == len(taken)
        piece = params.data[:100_000]
        taken.extend(piece)
        peer.answer(request_id, WriteAnswer(accepted_bytes=len(taken), room_bytes=0))
        if params.eof and len(piece) == len(params.data):
            peer.exited(1, make_exit())

    data = bytes(range(256)) * 4000
    script = {"exec.start": start, "exec.write": write}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        assert client.run(["x"], input=data).exit.code == 0
    assert taken == data


def test_input_that_no_frame_can_hold_is_an_error_of_the_run(tmp_path: Path) -> None:
    def greet(peer: Peer, request_id: Id, params: Params) -> None:
        limits = msgspec.structs.replace(LIMITS, frame_bytes=100_000)
        peer.answer(request_id, msgspec.structs.replace(HELLO, limits=limits))

    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        peer.output(1, 0, b"up")

    script = {"hello": greet, "exec.start": start, "exec.cancel": cancelled}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        with pytest.raises(RemoteError, match=r"exec\.write makes a frame of"):
            client.run(["x"], input=bytes(300_000), timeout_s=20)
        client.ping()


def test_a_command_that_does_not_read_its_input_is_no_error(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)

    def write(peer: Peer, request_id: Id, params: Params) -> None:
        peer.fail(request_id, RequestError("stdin_closed", "closed"))
        peer.exited(1, make_exit(code=4))

    script = {"exec.start": start, "exec.write": write}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        assert client.run(["x"], input=b"abc").exit.code == 4


def test_requests_can_be_pipelined(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {}) as daemon, connect(daemon.path) as client:
        ids = {client.send("ping", Ping()) for _ in range(50)}
        while ids:
            for event in client.receive_events(timeout_s=5):
                ids.discard(event.request_id)  # type: ignore[union-attr]


def test_waiting_for_one_event_ends_in_time_or_takes_what_is_there(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {}) as daemon, connect(daemon.path) as client:
        with pytest.raises(ClientTimeout):
            client.receive_events(timeout_s=0.02)
        assert client.receive_events(timeout_s=0) == []


def test_a_stop_is_announced_as_an_event(tmp_path: Path) -> None:
    note = StoppingNote(cause="SIGTERM", deadline_s=2.0)
    with FakeDaemon(tmp_path / "s", {}) as daemon, connect(daemon.path) as client:
        daemon.peers[0].note("daemon.stopping", note)
        assert client.receive_events(timeout_s=5) == [note]


def test_output_nobody_takes_is_bounded_and_the_exec_detached(tmp_path: Path) -> None:
    count = QUEUE_BYTES_MAX // 65536 + 2

    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        for at in range(count):
            peer.output(at + 1, at * 65536, bytes(65536))

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path) as client:
            handle = client.start(["x"], window_bytes=None)
            client.ping()
            with pytest.raises(OutputOverflow) as caught:
                list(handle.output())
            assert caught.value.last_seq == handle.last_seq < count
            client.ping()
        assert "exec.detach" in [method for method, _ in daemon.asked]


@pytest.mark.parametrize("window_bytes", [1, 1000, 65536, 100_000, 1 << 20])
def test_a_window_is_acknowledged_before_a_whole_chunk_no_longer_fits(
    tmp_path: Path, window_bytes: int
) -> None:
    size = min(window_bytes, 65536)
    sent: list[int] = []

    def output(peer: Peer, total: int) -> None:
        # The daemon's part: a chunk goes out when it fits the window.
        while len(sent) < 40 and (not total or (len(sent) + 1) * size - total <= window_bytes):
            if not total and (len(sent) + 1) * size > window_bytes:
                return
            peer.output(len(sent) + 1, len(sent) * size, bytes(size))
            sent.append(size)
        if len(sent) == 40:
            peer.exited(41, make_exit(stdout_bytes=40 * size))
            sent.append(0)

    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        output(peer, 0)

    def ack(peer: Peer, request_id: Id, params: Params) -> None:
        assert request_id is None
        output(peer, params.seq * size)  # type: ignore[attr-defined]

    script = {"exec.start": start, "exec.ack": ack}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        handle = client.start(["x"], window_bytes=window_bytes)
        assert sum(len(n.data) for n in handle.output(5) if isinstance(n, OutputNote)) == 40 * size


def test_a_field_out_of_range_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {}) as daemon, connect(daemon.path) as client:
        with pytest.raises(RemoteError) as caught:
            client.start(["x"], cwd="relative")
        assert caught.value.data.field == "cwd"
        assert [method for method, _ in daemon.asked] == ["hello"]


def test_a_run_that_outlasts_the_clients_patience_goes_on_detached(tmp_path: Path) -> None:
    def start(peer: Peer, request_id: Id, params: Params) -> None:
        peer.started(request_id)
        peer.output(1, 0, b"x")

    with FakeDaemon(tmp_path / "s", {"exec.start": start}) as daemon:
        with connect(daemon.path) as client:
            began_s = time.monotonic()
            with pytest.raises(ClientTimeout):
                client.run(["x"], timeout_s=0.1)
            assert time.monotonic() - began_s < 2
            client.ping()
        methods = [method for method, _ in daemon.asked]
    assert "exec.detach" in methods
    assert "exec.cancel" not in methods


def test_a_closed_client_says_so(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", {}) as daemon:
        client = connect(daemon.path)
        client.close()
        client.close()
        with pytest.raises(ClientError, match="closed"):
            client.ping()
