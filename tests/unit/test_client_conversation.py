"""A conversation over several connections, byte by byte and without any socket."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.client.errors import (
    Ambiguous,
    DaemonRestarted,
    DigestMismatch,
    ProtocolViolation,
    RemoteError,
    StreamLost,
)
from runnerd.client.pending import QUEUE_BYTES_MAX, Unfollowed
from runnerd.client.session import Answer, Failure
from runnerd.client.subscription import Subscription
from runnerd.protocol.answers import Empty
from runnerd.protocol.daemon_requests import Ping
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import Params
from runnerd.protocol.notes import GapNote, OutputNote, StoppingNote, SupersededNote
from runnerd.protocol.requests import (
    Attach,
    ExecAck,
    ExecAttach,
    ExecCancel,
    ExecDetach,
    ExecSignal,
    ExecStart,
    ExecWait,
    ExecWrite,
)
from tests.unit.fake_daemon import LIMITS, make_exit
from tests.unit.scripted_peer import ScriptedPeer, attached, conversation, started

START = ExecStart(argv=["a"], attach=Attach(window_bytes=1 << 20))


def test_every_start_can_be_repeated() -> None:
    peer = ScriptedPeer(conversation(), starts=41)
    peer.talk.request("exec.start", ExecStart(argv=["a"], attach=Attach()))
    ((_, _, params),) = peer.asked()
    assert isinstance(params, ExecStart)
    assert params.exec_id is not None
    assert params.exec_id.startswith("x-")
    assert params.nonce is not None
    assert params.horizon == 41
    assert params.attach is not None
    assert (params.attach.subscriber, params.attach.generation) == ("c-0000000000000000.1", 1)


def test_what_the_caller_chose_is_kept() -> None:
    peer = ScriptedPeer(conversation(), starts=41)
    attach = Attach(subscriber="me", generation=7)
    mine = ExecStart(argv=["a"], exec_id="mine", nonce="n", horizon=3, attach=attach)
    peer.talk.request("exec.start", mine)
    assert peer.asked()[0][2] == mine


def test_what_the_caller_chose_and_may_not_choose_is_for_the_daemon_to_refuse() -> None:
    """An empty id from `--id "$UNSET"` is a mistake, and no wish for one that is made up."""
    mine = ExecStart(argv=["a"], exec_id="", nonce="", attach=Attach(subscriber="", generation=0))
    sent = conversation().prepared(mine)
    assert (sent.exec_id, sent.nonce, sent.attach) == (mine.exec_id, mine.nonce, mine.attach)


def test_the_horizon_is_what_the_daemon_last_said() -> None:
    peer = ScriptedPeer(conversation(), starts=41)
    peer.start(START, starts=50)
    peer.talk.request("exec.start", START)
    assert peer.asked()[0][2].horizon == 50  # type: ignore[attr-defined]


def test_a_repeated_start_is_the_same_start_under_the_next_generation() -> None:
    talk = conversation()
    first = ScriptedPeer(talk, starts=41)
    own_id = talk.request("exec.start", START)
    ((_, _, once),) = first.asked()
    assert talk.lost() == []
    second = ScriptedPeer(talk, starts=60)
    ((request_id, _, twice),) = second.asked()
    assert isinstance(once, ExecStart)
    assert isinstance(twice, ExecStart)
    assert (twice.exec_id, twice.nonce, twice.horizon) == (once.exec_id, once.nonce, 41)
    assert twice.attach is not None
    assert twice.attach.generation == 2
    (told,) = second.answer(request_id, started(created=False))
    assert isinstance(told, Answer)
    assert told.request_id == own_id


def test_a_repeated_attach_under_a_name_is_the_next_generation_too() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    talk.request("exec.attach", ExecAttach(exec_id="x", after=4, subscriber="me"))
    ((_, _, once),) = first.asked()
    talk.lost()
    ((_, _, twice),) = ScriptedPeer(talk).asked()
    assert isinstance(once, ExecAttach)
    assert isinstance(twice, ExecAttach)
    assert (twice.after, twice.subscriber) == (4, "me")
    assert (once.generation, twice.generation) == (1, 2)


def test_an_attach_without_a_name_stays_without_one() -> None:
    """A name takes a place, and is refused to who does not own the sandbox."""
    talk = conversation()
    peer = ScriptedPeer(talk)
    params = ExecAttach(exec_id="x", after=4)
    talk.request("exec.attach", params)
    assert peer.asked()[0][2] == params
    talk.lost()
    peer = ScriptedPeer(talk)
    ((request_id, _, again),) = peer.asked()
    assert again == params
    peer.answer(request_id, attached(5, after=4))
    peer.output(5, 0, b"ab", 5)
    talk.lost()
    resumed = ScriptedPeer(talk).resume(6)
    assert resumed == ExecAttach(exec_id="x", after=5)


def test_a_tail_is_resumed_where_the_daemon_began_it() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    talk.request("exec.attach", ExecAttach(exec_id="x", after="tail", tail_bytes=100))
    peer.answer(peer.asked()[0][0], attached(5, last_seq=9, after=6))
    talk.lost()
    peer = ScriptedPeer(talk)
    resumed = peer.resume(1)
    assert resumed == ExecAttach(exec_id="x", after=6)
    (told,) = peer.output(7, 1000, b"recent")
    assert isinstance(told, OutputNote)


REPEATABLE = [
    ("ping", Ping()),
    ("exec.wait", ExecWait(exec_id="x")),
    ("exec.cancel", ExecCancel(exec_id="x", if_nonce="n")),
    ("exec.write", ExecWrite(exec_id="x", data=b"abc", offset=4)),
]


@pytest.mark.parametrize(("method", "params"), REPEATABLE)
def test_what_is_safe_twice_is_asked_again_as_it_was(method: str, params: Params) -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    own_id = talk.request(method, params)
    assert first.asked()[0][1:] == (method, params)
    assert talk.lost() == []
    second = ScriptedPeer(talk)
    ((request_id, asked, again),) = second.asked()
    assert (asked, again) == (method, params)
    error = RequestError("exec_unknown", "no")
    (told,) = second.fail(request_id, error)
    assert isinstance(told, Failure)
    assert told.request_id == own_id


NOT_REPEATABLE = [
    ("exec.signal", ExecSignal(exec_id="x", signal="TERM")),
    ("exec.write", ExecWrite(exec_id="x", data=b"abc")),
]


@pytest.mark.parametrize(("method", "params"), NOT_REPEATABLE)
def test_what_is_not_safe_twice_fails_as_ambiguous_and_is_not_asked_again(
    method: str, params: Params
) -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    own_id = talk.request(method, params)
    assert len(first.asked()) == 1
    (told,) = talk.lost()
    assert isinstance(told, Failure)
    assert told.request_id == own_id
    assert isinstance(told.error, Ambiguous)
    assert (told.error.method, told.error.exec_id) == (method, "x")
    assert ScriptedPeer(talk).asked() == []


@pytest.mark.parametrize(("method", "params"), NOT_REPEATABLE)
@given(st.data())
def test_what_was_not_handed_over_to_its_last_byte_was_never_sent(
    method: str, params: Params, data: st.DataObject
) -> None:
    """The daemon acts on whole frames: any part of one is no request."""
    talk = conversation()
    first = ScriptedPeer(talk)
    talk.request(method, params)
    most_bytes = data.draw(st.integers(0, len(talk.unsent) - 1))
    assert first.asked(most_bytes) == []
    assert talk.lost() == []
    assert [each[1:] for each in ScriptedPeer(talk).asked()] == [(method, params)]


def test_what_is_asked_without_a_connection_waits_for_one_in_order() -> None:
    talk = conversation()
    ScriptedPeer(talk)
    talk.lost()
    for at in range(3):
        talk.request("exec.signal", ExecSignal(exec_id=f"x{at}", signal="TERM"))
    ScriptedPeer(talk, greets=False)
    assert talk.unsent == b""  # not before the hello's answer
    talk.lost()
    asked = [params for _, _, params in ScriptedPeer(talk).asked()]
    assert [each.exec_id for each in asked] == ["x0", "x1", "x2"]  # type: ignore[attr-defined]


def test_what_the_daemon_cannot_take_fails_alone_and_is_never_sent() -> None:
    """Sent, it would end the connection, look as if it had never been sent, and go again."""
    talk = conversation()
    ScriptedPeer(talk)
    large = ExecWrite(exec_id="x", data=bytes(LIMITS.frame_bytes))
    with pytest.raises(RemoteError, match=r"exec\.write makes a frame of"):
        talk.request("exec.write", large)
    talk.lost()
    own_id = talk.request("exec.write", large)  # how much it takes is known again with its hello
    talk.request("ping", Ping())
    peer = ScriptedPeer(talk)
    ((failure),) = peer.told
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.error.kind) == (own_id, "frame_too_large")
    assert [method for _, method, _ in peer.asked()] == ["ping"]


def test_a_subscription_goes_on_after_the_last_record_received() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    number = first.start(START, subscription=7)
    first.output(1, 0, b"ab", 7)
    assert talk.lost() == []
    second = ScriptedPeer(talk)
    params = second.resume(3)
    assert isinstance(params, ExecAttach)
    assert (params.exec_id, params.after, params.window_bytes) == ("x", 1, 1 << 20)
    assert (params.subscriber, params.generation) == ("c-0000000000000000.1", 2)
    (told,) = second.output(2, 2, b"cd", 3)
    assert isinstance(told, OutputNote)
    assert (told.subscription, told.data) == (number, b"cd")
    assert second.exited(3, 4, 3) != []
    assert second.closed(4, 3) != []
    assert talk.lost() == []
    assert ScriptedPeer(talk).asked() == []


def test_each_connection_is_the_next_generation() -> None:
    talk = conversation()
    ScriptedPeer(talk).start(START)
    generations = []
    for at in range(5):
        talk.lost()
        peer = ScriptedPeer(talk)
        if at % 2:
            generations.append(peer.asked()[0][2].generation)  # type: ignore[attr-defined]
        else:
            generations.append(peer.resume(1).generation)  # type: ignore[attr-defined]
    assert generations == [2, 3, 4, 5, 6]


BROKEN: list[tuple[str, Any]] = [
    ("sequence 2 after 2", lambda peer: peer.output(2, 2, b"b", 3)),
    ("goes on at offset 4 instead of 3", lambda peer: peer.output(4, 4, b"d", 3)),
    ("the exit states 5 bytes", lambda peer: peer.exited(3, 5, 3)),
]


@pytest.mark.parametrize(("reason", "tell"), BROKEN)
def test_a_record_doubled_or_left_out_between_two_connections_is_seen(
    reason: str, tell: Any
) -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    first.start(START)
    first.output(1, 0, b"ab")
    first.output(2, 2, b"c")
    talk.lost()
    second = ScriptedPeer(talk)
    second.resume(3)
    assert tell(second) == []
    assert isinstance(talk.end, ProtocolViolation)
    assert reason in str(talk.end)


def test_twin_without_the_check_a_doubled_record_is_delivered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the sequence check is for: the same records as above, taken by a client without it."""
    monkeypatch.setattr(Subscription, "output", lambda _self, _note: None)
    talk = conversation()
    first = ScriptedPeer(talk)
    first.start(START)
    first.output(1, 0, b"ab")
    talk.lost()
    second = ScriptedPeer(talk)
    second.resume(3)
    (told,) = second.output(1, 0, b"ab", 3)
    assert isinstance(told, OutputNote)
    assert talk.end is None


def test_a_gap_met_at_the_resumption_is_counted_from_where_the_client_stood() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    first.start(START)
    first.output(1, 0, b"ab")
    talk.lost()
    second = ScriptedPeer(talk)
    second.resume(3)
    (told,) = second.gap((2, 5), None, 12, 3)
    assert isinstance(told, GapNote)
    assert told.stdout_bytes == 10
    second.output(6, 12, b"z", 3)
    second.exited(7, 13, 3)
    assert talk.end is None


@pytest.mark.parametrize("is_true", [True, False])
def test_a_digest_is_checked_over_all_connections(is_true: bool) -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    first.start(ExecStart(argv=["a"], sha256=True, attach=Attach()))
    first.output(1, 0, b"ab")
    talk.lost()
    second = ScriptedPeer(talk)
    second.resume(1)
    second.output(2, 2, b"cd")
    digest = hashlib.sha256(b"abcd" if is_true else b"abcD").hexdigest()
    second.exited(3, 4, sha256=digest)
    assert (talk.end is None) is is_true
    assert is_true or isinstance(talk.end, DigestMismatch)


def test_a_digest_of_what_did_not_all_come_is_not_checked() -> None:
    peer = ScriptedPeer(conversation())
    peer.start(ExecStart(argv=["a"], sha256=True, attach=Attach()))
    peer.gap((1, 2), 5, 5)
    peer.output(3, 5, b"x")
    peer.exited(4, 6, sha256=hashlib.sha256(b"12345x").hexdigest())
    assert peer.talk.end is None


def test_what_cannot_be_resumed_is_said_with_the_exit_and_no_exit_is_made_up() -> None:
    talk = conversation()
    number = ScriptedPeer(talk).start(START)
    talk.lost()
    peer = ScriptedPeer(talk)
    ((request_id, _, _),) = peer.asked()
    error = RequestError("exec_evicted", "gone", exit=make_exit(code=3))
    (told,) = peer.fail(request_id, error)
    assert isinstance(told, Unfollowed)
    assert (told.subscription, told.exec_id) == (number, "x")
    assert isinstance(told.error, RemoteError)
    assert told.error.data.exit is not None
    talk.lost()
    assert ScriptedPeer(talk).asked() == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_start_answered_again_without_its_subscription_is_attached_to_or_said_why_not(
    is_kept: bool,
) -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    talk.request("exec.start", START)
    first.asked()
    talk.lost()
    peer = ScriptedPeer(talk)
    ((request_id, _, _),) = peer.asked()
    (told,) = peer.answer(request_id, started(None, created=False))
    assert isinstance(told, Answer)
    number = told.result.subscription  # type: ignore[attr-defined]
    assert number is not None
    ((request_id, method, params),) = peer.asked()
    assert method == "exec.attach"
    assert isinstance(params, ExecAttach)
    assert (params.exec_id, params.after, params.generation) == ("x", 0, 3)
    if is_kept:
        peer.answer(request_id, attached(7))
        (note,) = peer.output(1, 0, b"a", 7)
        assert isinstance(note, OutputNote)
        assert note.subscription == number
    else:
        (gone,) = peer.fail(request_id, RequestError("exec_evicted", "gone", exit=make_exit()))
        assert isinstance(gone, Unfollowed)
        assert (gone.subscription, gone.exec_id) == (number, "x")


def test_a_start_that_asked_for_no_subscription_gets_none() -> None:
    peer = ScriptedPeer(conversation())
    peer.talk.request("exec.start", ExecStart(argv=["a"]))
    ((request_id, _, _),) = peer.asked()
    (told,) = peer.answer(request_id, started(None))
    assert isinstance(told, Answer)
    assert told.result.subscription is None  # type: ignore[attr-defined]
    assert peer.asked() == []


def test_the_incarnation_is_named_from_the_second_hello_on() -> None:
    talk = conversation()
    assert ScriptedPeer(talk, incarnation="i-9").hello.incarnation is None  # type: ignore[attr-defined]
    talk.lost()
    assert ScriptedPeer(talk).hello.incarnation == "i-9"  # type: ignore[attr-defined]


def test_another_incarnation_ends_it_and_nothing_is_asked_of_it() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    first.start(START)
    talk.request("exec.wait", ExecWait(exec_id="x"))
    talk.lost()
    second = ScriptedPeer(talk, greets=False)
    assert second.fail(second.hello_id, RequestError("incarnation_changed", "another")) == []
    assert isinstance(talk.end, DaemonRestarted)
    assert talk.end.incarnation == "i-1"
    assert (talk.end.exec_ids, talk.end.methods) == (("x",), ("exec.wait",))
    assert talk.unsent == b""
    with pytest.raises(DaemonRestarted):
        talk.request("ping", Ping())


def test_a_hello_refused_for_now_is_tried_again_and_one_refused_for_good_is_the_end() -> None:
    talk = conversation()
    ScriptedPeer(talk)
    talk.lost()
    busy = ScriptedPeer(talk, greets=False)
    busy.fail(None, RequestError("busy", "512 connections", retry_after_s=1))
    assert talk.end is None
    assert talk.is_turned_away
    talk.lost()
    refused = ScriptedPeer(talk, greets=False)
    refused.fail(refused.hello_id, RequestError("peer_refused", "no"))
    assert isinstance(talk.end, RemoteError)


def test_after_a_stop_was_announced_no_further_connection_is_wanted() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    peer.start(START)
    note = StoppingNote(cause="SIGTERM", deadline_s=2.0)
    assert talk.receive(peer.codec.note("daemon.stopping", note)) == [note]
    talk.lost()
    assert isinstance(talk.end, StreamLost)
    assert talk.end.exec_ids == ("x",)


def test_a_loss_before_the_first_hello_is_one_like_any_other() -> None:
    talk = conversation()
    ScriptedPeer(talk, greets=False)
    talk.lost()
    assert talk.end is None
    assert str(talk.lost_error()) == "stream ended without the answer to hello"
    assert ScriptedPeer(talk).hello.incarnation is None  # type: ignore[attr-defined]


def test_a_detached_subscription_is_not_resumed() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(START)
    talk.detach(number)
    ((_, method, params),) = peer.asked()
    assert (method, params) == ("exec.detach", ExecDetach(subscription=1))
    assert peer.output(1, 0, b"late") == []
    talk.lost()
    assert ScriptedPeer(talk).asked() == []


def test_one_detached_while_its_resumption_is_under_way_is_detached_there_too() -> None:
    talk = conversation()
    number = ScriptedPeer(talk).start(START)
    talk.lost()
    peer = ScriptedPeer(talk)
    ((request_id, _, _),) = peer.asked()
    talk.detach(number)
    peer.answer(request_id, attached(3))
    assert [(method, params) for _, method, params in peer.asked()] == [
        ("exec.detach", ExecDetach(subscription=3))
    ]
    assert peer.output(1, 0, b"late", 3) == []


def test_a_detach_that_was_asked_for_is_answered_by_the_loss() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(START)
    own_id = talk.request("exec.detach", ExecDetach(subscription=number))
    assert peer.asked()[0][2] == ExecDetach(subscription=1)
    assert talk.lost() == [Answer(own_id, "exec.detach", Empty())]


def test_a_detach_asked_for_between_two_connections_holds_over_a_lost_hello() -> None:
    talk = conversation()
    number = ScriptedPeer(talk).start(START)
    talk.lost()
    own_id = talk.request("exec.detach", ExecDetach(subscription=number))
    ScriptedPeer(talk, greets=False)
    assert talk.lost() == [Answer(own_id, "exec.detach", Empty())]
    assert ScriptedPeer(talk).asked() == []


def test_an_abandoned_request_is_neither_sent_later_nor_again() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    sent = talk.request("exec.start", START)
    assert len(first.asked()) == 1
    assert talk.abandon(sent)
    (told,) = talk.lost()  # for whoever throws its answer away
    assert isinstance(told, Failure)
    assert told.request_id == sent
    waiting = talk.request("exec.start", START)
    assert not talk.abandon(waiting)
    assert ScriptedPeer(talk).asked() == []


def test_a_reader_that_takes_nothing_is_not_given_a_window_for_each_connection() -> None:
    """The queue is bounded over any number of reconnects, and goes on once there is room."""
    window = 2 << 20
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(ExecStart(argv=["a"], attach=Attach(window_bytes=window)))
    received = 0
    seq = 0
    for _ in range(10):
        for _ in range(window >> 20):
            seq += 1
            peer.output(seq, received, bytes(1 << 20))
            received += 1 << 20
        talk.lost()
        peer = ScriptedPeer(talk)
        asked = peer.asked()
        if not asked:
            break
        peer.answer(asked[0][0], attached(1))
    assert received + window > QUEUE_BYTES_MAX >= received
    talk.ack(number, 1)
    assert peer.asked() == []
    talk.ack(number, 2)
    ((_, method, params),) = peer.asked()
    assert method == "exec.attach"
    assert params.after == seq  # type: ignore[attr-defined]


def test_a_window_above_the_bound_is_resumed_once_all_of_it_was_taken() -> None:
    """Else its reader would wait for ever for a window that never fits."""
    talk = conversation()
    params = ExecStart(argv=["a"], attach=Attach(window_bytes=2 * QUEUE_BYTES_MAX))
    peer = ScriptedPeer(talk)
    number = peer.start(params)
    peer.output(1, 0, b"ab")
    peer.output(2, 2, b"cd")
    talk.lost()
    peer = ScriptedPeer(talk)
    assert peer.asked() == []
    talk.ack(number, 1)
    assert peer.asked() == []
    talk.ack(number, 2)
    assert peer.resume(5).after == 2  # type: ignore[attr-defined]
    talk.lost()
    assert ScriptedPeer(talk).resume(6).after == 2  # type: ignore[attr-defined]


def test_an_ack_that_is_asked_for_makes_room_as_one_that_is_told() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(START)
    for at in range(8):
        peer.output(at + 1, at << 20, bytes(1 << 20))
    own_id = talk.request("exec.ack", ExecAck(subscription=number, seq=4))
    ((request_id, _, params),) = peer.asked()
    assert params == ExecAck(subscription=1, seq=4)
    assert peer.answer(request_id, Empty()) == [Answer(own_id, "exec.ack", Empty())]
    talk.lost()
    assert ScriptedPeer(talk).resume(5).after == 8  # type: ignore[attr-defined]


def test_an_ack_that_is_asked_for_between_two_connections_is_answered_and_resumes() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(START)
    for at in range(8):
        peer.output(at + 1, at << 20, bytes(1 << 20))
    talk.lost()
    first_id = talk.request("exec.ack", ExecAck(subscription=number, seq=0))
    peer = ScriptedPeer(talk)
    ((request_id, method, _),) = peer.asked()
    assert method == "ping"  # there is no window to acknowledge in
    assert peer.answer(request_id, Empty()) == [Answer(first_id, "exec.ack", Empty())]
    talk.request("exec.ack", ExecAck(subscription=number, seq=8))
    assert [method for _, method, _ in peer.asked()] == ["exec.attach", "ping"]


def test_an_ack_of_what_was_never_opened_is_for_the_daemon_to_refuse() -> None:
    peer = ScriptedPeer(conversation())
    peer.talk.request("exec.ack", ExecAck(subscription=3, seq=1))
    assert [params for _, _, params in peer.asked()] == [ExecAck(subscription=0, seq=1)]


def test_a_detach_names_the_present_number() -> None:
    talk = conversation()
    number = ScriptedPeer(talk).start(START)
    talk.lost()
    peer = ScriptedPeer(talk)
    peer.resume(5)
    talk.request("exec.detach", ExecDetach(subscription=number))
    assert [params for _, _, params in peer.asked()] == [ExecDetach(subscription=5)]
    talk.lost()
    assert ScriptedPeer(talk).asked() == []


def test_acks_are_sent_under_the_present_number() -> None:
    talk = conversation()
    number = ScriptedPeer(talk).start(START)
    talk.lost()
    talk.ack(number, 1)
    peer = ScriptedPeer(talk)
    peer.resume(5)
    talk.ack(number, 2)
    assert peer.asked() == [(None, "exec.ack", ExecAck(subscription=5, seq=2))]


def test_a_superseded_subscription_is_told_and_not_resumed() -> None:
    talk = conversation()
    peer = ScriptedPeer(talk)
    number = peer.start(START)
    note = SupersededNote(subscription=1, exec_id="x", subscriber="s", generation=4)
    (told,) = talk.receive(peer.codec.note("exec.superseded", note))
    assert isinstance(told, SupersededNote)
    assert told.subscription == number
    talk.lost()
    assert ScriptedPeer(talk).asked() == []


def test_two_connections_may_use_the_same_numbers_for_different_execs() -> None:
    talk = conversation()
    first = ScriptedPeer(talk)
    one = first.start(START, subscription=1)
    talk.lost()
    second = ScriptedPeer(talk)
    second.resume(2)
    two = second.start(START, subscription=1)
    assert one != two
    (told,) = second.output(1, 0, b"new", 1)
    assert told.subscription == two  # type: ignore[union-attr]
    (told,) = second.output(1, 0, b"old", 2)
    assert told.subscription == one  # type: ignore[union-attr]


@given(st.data())
def test_however_often_it_is_cut_the_bytes_come_once_and_in_order(data: st.DataObject) -> None:
    """A daemon with a transcript, a connection cut anywhere, also between answer and record."""
    chunks = data.draw(st.lists(st.binary(min_size=1, max_size=4), max_size=8))
    talk = conversation()
    peer = ScriptedPeer(talk)
    peer.start(START)
    taken: list[bytes] = []
    at, wire = 0, 1
    while at < len(chunks):
        if data.draw(st.booleans()):
            talk.lost()
            peer = ScriptedPeer(talk)
            wire = data.draw(st.integers(1, 3))
            params = peer.resume(wire)
            assert isinstance(params, ExecAttach)
            assert isinstance(params.after, int)
            at = params.after
            continue
        offset = sum(map(len, chunks[:at]))
        for told in peer.output(at + 1, offset, chunks[at], wire):
            assert isinstance(told, OutputNote)
            taken.append(told.data)
        at += 1
    assert taken == chunks
    assert talk.end is None
