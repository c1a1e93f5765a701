"""A watch misses nothing without saying so: not over a reconnect, and not where nobody takes."""

from __future__ import annotations

import pytest

from runnerd.client import watching
from runnerd.client.conversation import Occurrence
from runnerd.client.errors import ClientError, ProtocolViolation, RemoteError
from runnerd.client.pending import Unfollowed
from runnerd.client.routing import Router
from runnerd.client.session import Answer
from runnerd.client.watching import Watching
from runnerd.protocol.daemon_requests import EventsSubscribe
from runnerd.protocol.errors import RequestError
from runnerd.protocol.events import EventNote, EventsAnswer
from runnerd.protocol.requests import ExecDetach
from tests.unit.scripted_peer import ScriptedPeer, conversation


def answer(subscription: int = 1, number: int = 10, at: float = 5.0) -> EventsAnswer:
    return EventsAnswer(
        subscription=subscription, number=number, at=at, state="serving", pressure=None,
        pressure_source=None,
    )  # fmt: skip


def note(number: int, kind: str = "draining", subscription: int = 1, lost: int | None = None) -> (
    EventNote
):  # fmt: skip
    return EventNote(subscription=subscription, number=number, at=1.0, kind=kind, lost=lost)


def tell(peer: ScriptedPeer, event: EventNote) -> list[Occurrence]:
    return peer.talk.receive(peer.codec.note("event", event))


def watched(peer: ScriptedPeer, wire_number: int = 1) -> int:
    peer.talk.request("events.subscribe", EventsSubscribe())
    ((request_id, _, _),) = peer.asked()
    (told,) = peer.answer(request_id, answer(wire_number))
    assert isinstance(told, Answer)
    assert isinstance(told.result, EventsAnswer)
    return told.result.subscription


def test_events_come_under_this_clients_own_number_and_heartbeats_do_not() -> None:
    peer = ScriptedPeer(conversation())
    number = watched(peer, wire_number=44)
    assert peer.talk.is_owed_heartbeats
    (event,) = tell(peer, note(11, subscription=44))
    assert isinstance(event, EventNote)
    assert (event.subscription, event.number) == (number, 11)
    assert tell(peer, note(11, "heartbeat", 44)) == []
    (lost,) = tell(peer, note(15, "events_lost", 44, lost=4))
    assert isinstance(lost, EventNote)
    assert tell(peer, note(16, "a kind of tomorrow", 44)) != []


@pytest.mark.parametrize(
    "wrong",
    [note(12), note(10), note(10, "events_lost"), note(12, "events_lost", lost=3),
     note(11, "heartbeat"), note(11, subscription=2)],
)  # fmt: skip
def test_an_event_left_out_or_told_twice_breaks_the_protocol(wrong: EventNote) -> None:
    peer = ScriptedPeer(conversation())
    watched(peer)
    assert tell(peer, wrong) == []
    assert isinstance(peer.talk.end, ProtocolViolation)


def test_after_a_lost_connection_it_is_told_that_events_may_have_been_missed() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    number = watched(first)
    talk.lost()
    second = ScriptedPeer(talk)
    ((request_id, method, _),) = second.asked()
    assert method == "events.subscribe"
    (missed,) = second.answer(request_id, answer(subscription=3, number=70, at=9.0))
    assert missed == EventNote(
        subscription=number, number=70, at=9.0, kind="events_lost", lost=None
    )
    (event,) = tell(second, note(71, subscription=3))
    assert isinstance(event, EventNote)
    assert event.subscription == number


def test_one_that_cannot_subscribe_again_is_told_why() -> None:
    talk = conversation()
    number = watched(ScriptedPeer(talk))
    talk.lost()
    second = ScriptedPeer(talk)
    ((request_id, _, _),) = second.asked()
    (told,) = second.fail(request_id, RequestError("busy", "full", retry_after_s=1.0))
    assert isinstance(told, Unfollowed)
    assert (told.subscription, told.error.kind) == (number, "busy")


def test_what_is_closed_is_closed_on_every_connection() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    number = watched(first)
    talk.lost()
    second = ScriptedPeer(talk)
    ((request_id, _, _),) = second.asked()
    talk.detach(number)  # while it subscribes again
    assert second.asked() == []
    assert second.answer(request_id, answer(subscription=3)) == []
    ((_, method, params),) = second.asked()
    assert (method, params) == ("exec.detach", ExecDetach(subscription=3))
    assert tell(second, note(11, subscription=3)) == []  # under way: neither news nor a violation
    talk.lost()
    assert ScriptedPeer(talk).asked() == []


def test_a_watch_that_nobody_takes_from_is_bounded_and_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "QUEUED_MAX", 4)
    talk = conversation()
    watch = Watching(Router(talk, lambda: None), answer())
    for number in range(11, 21):
        lost = number == 12
        watch.receive(note(number, "events_lost" if lost else "draining", lost=3 if lost else None))
    first = watch._take()
    assert first is not None
    assert (first.kind, first.lost, first.number) == ("events_lost", 8, 16)
    assert [(watch._take() or note(0)).number for _ in range(5)] == [17, 18, 19, 20, 0]
    watch.receive(Unfollowed(1, "", RemoteError.before_sending(RequestError("busy", "full"))))
    with pytest.raises(RemoteError):
        watch._take()
    watch.close()


def test_what_came_is_given_out_before_why_no_more_does() -> None:
    watch = Watching(Router(conversation(), lambda: None), answer())
    watch.receive(note(11))
    watch.receive(Unfollowed(1, "", ClientError("over")))
    event = watch._take()
    assert event is not None
    assert event.number == 11
    with pytest.raises(ClientError, match="over"):
        watch._take()
