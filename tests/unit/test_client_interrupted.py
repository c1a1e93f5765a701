"""An exception out of a signal handler, at the worst moments: no hole unseen, nothing doubled.

The moments are a few bytecodes wide; each is hit by a function that raises there once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.blocking import connect
from runnerd.client.conversation import Conversation
from runnerd.client.errors import Ambiguous, Interrupted
from runnerd.client.following import Following
from runnerd.client.session import Failure, Session
from runnerd.client.wire import Wire
from runnerd.protocol.answers import AttachAnswer
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import Attach, ExecAttach, ExecSignal, ExecStart
from tests.unit.fake_daemon import FakeDaemon, Peer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runnerd.client.execs import Exec
    from runnerd.protocol.fields import Params

Id = int | str | None


def interrupts(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, when: Callable[..., object]
) -> None:
    """Have a method raise KeyboardInterrupt behind its first call for which `when` holds."""
    method = getattr(owner, name)
    hit: list[object] = []

    def interrupted(*args: Any) -> object:
        result = method(*args)
        if not hit and when(*args, result):
            hit.append(args)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)


def start(peer: Peer, request_id: Id, params: Params) -> None:
    peer.started(request_id)


def record(peer: Peer, at: int, subscription: int) -> bytes:
    note = OutputNote(
        subscription=subscription,
        exec_id="x",
        seq=at + 1,
        stream="stdout",
        offset=at,
        data=b"%d" % at,
    )
    return bytes(peer.codec.note("exec.output", note))


def prints_three(peer: Peer, request_id: Id, params: Params) -> None:
    peer.send(b"".join(record(peer, at, 1) for at in range(3)))


def is_second(_handle: Following, note: object, _result: object) -> bool:
    return isinstance(note, OutputNote) and note.seq == 2


def has_second(_session: Session, _data: object, events: list[object]) -> bool:
    return any(isinstance(event, OutputNote) and event.seq == 2 for event in events)


def attach(peer: Peer, request_id: Id, params: Params) -> None:
    assert isinstance(params, ExecAttach)
    assert isinstance(params.after, int)
    answer = AttachAnswer(
        subscription=2, state="running", pid=9, first_seq=1, last_seq=3, after=params.after
    )
    peer.answer(request_id, answer)
    peer.send(b"".join(record(peer, at, 2) for at in range(params.after, 3)))


def take(handle: Exec) -> bytes:
    """Take output until it ends by Interrupted, through as many interruptions as come."""
    taken = b""
    while True:
        try:
            for note in handle.output(30):
                assert isinstance(note, OutputNote)
                taken += note.data
        except KeyboardInterrupt:
            continue
        except Interrupted:
            return taken


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [(Following, "receive", is_second), (Session, "receive", has_second)],
)
def test_output_lost_to_an_interruption_ends_it_and_the_rest_can_be_had_anew(
    tmp_path: Path,
    owner: type,
    name: str,
    when: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = {"exec.start": start, "exec.signal": prints_three, "exec.attach": attach}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        interrupts(monkeypatch, owner, name, when=when)
        handle = client.start(["x"])
        client.send("exec.signal", ExecSignal(exec_id="x", signal=10))  # it is never repeated
        taken = take(handle)
        again = client.attach("x", after=handle.last_seq)
        rest = again.output(30)
        while len(taken) < 3:
            note = next(rest)
            assert isinstance(note, OutputNote)
            taken += note.data
        assert taken == b"012"
        # What ended is not resumed behind its follower's back.
        assert [method for method, _ in daemon.asked].count("exec.attach") == 1


def test_who_follows_by_number_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {"exec.start": start, "exec.signal": prints_three}
    with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
        client.send("exec.start", ExecStart(argv=["x"], attach=Attach()))
        assert client.receive_events(30)
        interrupts(monkeypatch, Session, "receive", when=has_second)
        client.send("exec.signal", ExecSignal(exec_id="x", signal=10))  # it is never repeated
        with pytest.raises(KeyboardInterrupt):
            client.receive_events(30)
        errors = [type(each.error) for each in client.receive_events(30)]  # type: ignore[union-attr]
        assert errors == [Interrupted, Ambiguous]


def test_what_may_have_been_sent_is_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore(peer: Peer, request_id: Id, params: Params) -> None:
        pass

    def counted_late(talk: Conversation, count_bytes: int) -> None:
        raise KeyboardInterrupt

    with (
        FakeDaemon(tmp_path / "s", {"exec.signal": ignore}) as daemon,
        connect(daemon.path) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Conversation, "sent", counted_late)
            with pytest.raises(KeyboardInterrupt):
                client.send("exec.signal", ExecSignal(exec_id="x", signal=15))
        client.ping()
        (failure,) = client.receive_events(timeout_s=0)
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, Ambiguous)
        assert [method for method, _ in daemon.asked].count("exec.signal") == 1


def test_an_interrupted_loss_is_taken_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDaemon(tmp_path / "s", {}) as daemon, connect(daemon.path) as client:
        interrupts(monkeypatch, Wire, "_drop_socket", when=lambda *_: True)
        daemon.peers[0].hang_up()
        with pytest.raises(KeyboardInterrupt):
            client.ping()
        client.ping()
