"""The answer to a wait or a cancel may tell the exit before the output is over: none is lost."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError, ExitPassed, OutputOverflow, StreamLost, Superseded
from runnerd.client.execs import Exec
from runnerd.client.pending import QUEUE_BYTES_MAX
from runnerd.protocol.answers import AttachAnswer, CancelAnswer, Empty, StartAnswer
from runnerd.protocol.notes import OutputNote, SupersededNote
from tests.unit.fake_daemon import FakeDaemon, Peer, make_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from runnerd.client.blocking import Client
    from runnerd.protocol.fields import Params

Id = int | str | None

EXIT = make_exit(stdout_bytes=10)


def start(peer: Peer, request_id: Id, params: Params) -> None:
    peer.started(request_id)
    peer.output(1, 0, b"first")


def wait(peer: Peer, request_id: Id, params: Params) -> None:
    peer.answer(request_id, EXIT)


def cancel(peer: Peer, request_id: Id, params: Params) -> None:
    peer.answer(request_id, CancelAnswer(outcome="ended", exit=EXIT))


def flood(peer: Peer, request_id: Id, params: Params) -> None:
    for at in range(QUEUE_BYTES_MAX // 65536 + 1):
        peer.output(at + 2, 5 + at * 65536, bytes(65536))
    peer.answer(request_id, Empty())


@contextlib.contextmanager
def following(path: Path, window_bytes: int | None = 5) -> Iterator[tuple[Client, Exec, Peer]]:
    """Yield the handle of an exec that wrote `first`, and who may say more of it."""
    script = {
        "exec.start": start,
        "exec.wait": wait,
        "exec.cancel": cancel,
        "daemon.drain": flood,
    }
    with FakeDaemon(path, script) as daemon:
        with connect(daemon.path, reconnect_s=0) as client:
            yield client, client.start(["x"], window_bytes=window_bytes), daemon.peers[0]


def text_of(handle: Exec) -> bytes:
    return b"".join(note.data for note in handle.output(5) if isinstance(note, OutputNote))


def taken_until(error: type[ClientError], handle: Exec) -> bytes:
    taken: list[bytes] = []
    with pytest.raises(error):
        taken.extend(note.data for note in handle.output(5) if isinstance(note, OutputNote))
    return b"".join(taken)


@pytest.mark.parametrize("tell", [Exec.wait, Exec.wait_closed, Exec.cancel])
def test_output_goes_on_to_its_own_end_after_the_exit_was_answered(
    tmp_path: Path, tell: Callable[[Exec], object]
) -> None:
    with following(tmp_path / "s") as (_, handle, peer):
        tell(handle)
        assert handle.exit == EXIT
        peer.output(2, 5, b"again")
        peer.exited(3, EXIT)
        assert text_of(handle) == b"firstagain"


def test_a_loss_of_the_rest_is_said_though_the_exit_is_known(tmp_path: Path) -> None:
    with following(tmp_path / "s") as (_, handle, peer):
        handle.wait()
        peer.hang_up()
        assert taken_until(StreamLost, handle) == b"first"


def test_a_newer_reader_is_said_though_the_exit_is_known(tmp_path: Path) -> None:
    with following(tmp_path / "s") as (_, handle, peer):
        handle.wait()
        note = SupersededNote(subscription=1, exec_id="x", subscriber="c", generation=2)
        peer.note("exec.superseded", note)
        assert taken_until(Superseded, handle) == b"first"


def test_an_overflow_is_said_though_the_exit_is_known(tmp_path: Path) -> None:
    with following(tmp_path / "s", window_bytes=None) as (client, handle, _):
        handle.wait()
        client.drain()
        assert len(taken_until(OutputOverflow, handle)) > QUEUE_BYTES_MAX - 65536


def test_what_was_detached_ends_with_what_had_come(tmp_path: Path) -> None:
    with following(tmp_path / "s") as (client, handle, _):
        client.ping()
        handle.detach()
        assert taken_until(ClientError, handle) == b"first"
        handle.wait()
        assert text_of(handle) == b""


def test_what_was_attached_behind_the_exit_has_no_output(tmp_path: Path) -> None:
    def attach(peer: Peer, request_id: Id, params: Params) -> None:
        answer = AttachAnswer(
            subscription=1, state="closed", pid=None, first_seq=1, last_seq=7, after=7
        )
        peer.answer(request_id, answer)
        peer.closed(8)

    script = {"exec.attach": attach, "exec.wait": wait}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        handle = client.attach("x", after=7)
        with pytest.raises(ExitPassed):
            text_of(handle)
        handle.wait()
        assert text_of(handle) == b""


def test_a_handle_without_a_subscription_has_no_output_once_its_exit_is_known(
    tmp_path: Path,
) -> None:
    def start_alone(peer: Peer, request_id: Id, params: Params) -> None:
        answer = StartAnswer(
            exec_id="x", pid=9, created=True, starts=1, oom_score_adj=0, subscription=None
        )
        peer.answer(request_id, answer)

    script = {"exec.start": start_alone, "exec.wait": wait}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        handle = client.start(["x"], attach=False)
        with pytest.raises(ClientError, match="not attached"):
            text_of(handle)
        handle.wait()
        assert text_of(handle) == b""
