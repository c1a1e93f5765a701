"""The sans-IO session: any split of the bytes, every broken promise, a lost stream."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.client.errors import ProtocolViolation, RemoteError
from runnerd.client.session import Answer, Event, Failure, Session
from runnerd.protocol.answers import AttachAnswer, Empty, StartAnswer
from runnerd.protocol.codec import Codec
from runnerd.protocol.daemon_requests import DaemonDrain, Ping
from runnerd.protocol.errors import KINDS, RequestError
from runnerd.protocol.exits import Closed
from runnerd.protocol.framing import Encoding, FrameSplitter
from runnerd.protocol.notes import (
    ClosedNote,
    ExitedNote,
    GapNote,
    HeartbeatNote,
    OutputNote,
    StoppingNote,
    SupersededNote,
)
from runnerd.protocol.requests import Attach, ExecAttach, ExecDetach, ExecStart
from tests.unit.fake_daemon import HELLO, make_exit

if TYPE_CHECKING:
    import msgspec

ENCODINGS = [Encoding.MSGPACK, Encoding.JSON]


def output(seq: int, offset: int, data: bytes, stream: str = "stdout", **over: Any) -> OutputNote:
    fields: dict[str, Any] = {"subscription": 7, "exec_id": "x", "seq": seq, "stream": stream}
    return OutputNote(**{**fields, "offset": offset, "data": data, **over})


def gap(
    first: int,
    last: int,
    stdout: int | None = 0,
    stderr: int | None = 0,
    offsets: tuple[int, int] | None = None,
) -> GapNote:
    return GapNote(
        subscription=7,
        exec_id="x",
        first_seq=first,
        last_seq=last,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        stdout_offset=offsets[0] if offsets else stdout or 0,
        stderr_offset=offsets[1] if offsets else stderr or 0,
    )


def exited(seq: int, stdout: int = 0, stderr: int = 0) -> ExitedNote:
    exit = make_exit(stdout_bytes=stdout, stderr_bytes=stderr)
    return ExitedNote(subscription=7, exec_id="x", seq=seq, exit=exit)


def closed(seq: int) -> ClosedNote:
    return ClosedNote(
        subscription=7, exec_id="x", seq=seq, closed=Closed(discarded_bytes=0, closed_at=1.0)
    )


NAMES = {
    OutputNote: "exec.output",
    GapNote: "exec.gap",
    ExitedNote: "exec.exited",
    ClosedNote: "exec.closed",
    HeartbeatNote: "exec.heartbeat",
    SupersededNote: "exec.superseded",
    StoppingNote: "daemon.stopping",
}


def wire(codec: Codec, *notes: msgspec.Struct) -> bytes:
    return b"".join(codec.note(NAMES[type(note)], note) for note in notes)


def started(encoding: Encoding = Encoding.MSGPACK) -> tuple[Session, Codec]:
    session, codec = Session(encoding), Codec(encoding)
    request_id, _ = session.request("exec.start", ExecStart(argv=["a"], attach=Attach()))
    answer = StartAnswer(
        exec_id="x", pid=2, created=True, starts=1, oom_score_adj=900, subscription=7
    )
    events = session.receive(codec.answer(request_id, answer))
    assert events == [Answer(request_id, "exec.start", answer, session.subscriptions[7])]
    return session, codec


def attached(
    after: Any, streams: Any = ("stdout", "stderr"), *, begins_after: int | None = None
) -> tuple[Session, Codec]:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    params = ExecAttach(exec_id="x", after=after, streams=list(streams))
    request_id, _ = session.request("exec.attach", params)
    answer = AttachAnswer(
        subscription=7,
        state="running",
        pid=2,
        first_seq=1,
        last_seq=5,
        after=after if begins_after is None else begins_after,
    )
    session.receive(codec.answer(request_id, answer))
    return session, codec


@given(st.data(), st.sampled_from(ENCODINGS))
def test_how_the_bytes_were_split_makes_no_difference(
    data: st.DataObject, encoding: Encoding
) -> None:
    chunks = data.draw(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary())))
    notes: list[msgspec.Struct] = []
    offsets = {"stdout": 0, "stderr": 0}
    for seq, (stream, chunk) in enumerate(chunks, 1):
        notes.append(output(seq, offsets[stream], chunk, stream))
        offsets[stream] += len(chunk)
    notes.append(exited(len(notes) + 1, offsets["stdout"], offsets["stderr"]))
    notes.append(closed(len(notes) + 1))
    session, codec = started(encoding)
    stream_bytes = wire(codec, *notes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream_bytes)), max_size=20)))
    events: list[Event] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream_bytes)], strict=True):
        if end > start:
            events += session.receive(stream_bytes[start:end])
    assert [*events] == notes
    assert session.subscriptions == {}
    assert session.receive_eof() is None


@given(st.binary(min_size=1, max_size=300), st.sampled_from(ENCODINGS))
def test_garbage_is_a_violation_or_waits_for_more_and_nothing_else(
    garbage: bytes, encoding: Encoding
) -> None:
    session, _ = started(encoding)
    with contextlib.suppress(ProtocolViolation):
        assert session.receive(garbage) == []


@given(st.binary(min_size=1, max_size=300))
def test_a_frame_of_garbage_is_a_violation_or_an_unknown_notification(garbage: bytes) -> None:
    session, _ = started()
    with contextlib.suppress(ProtocolViolation):
        assert session.receive(len(garbage).to_bytes(4, "big") + garbage) == []


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ([output(1, 0, b"a"), output(1, 1, b"b")], "sequence 1 after 1"),
        ([output(2, 0, b"a"), output(1, 1, b"b")], "sequence 1 after 2"),
        ([output(1, 0, b"a"), output(2, 2, b"b")], "offset 2 instead of 1"),
        ([output(1, 1, b"a")], "offset 1 instead of 0"),
        ([output(1, 0, b"a"), output(2, 1, b"b", "stderr")], "offset 1 instead of 0"),
        ([output(1, 0, b"a", exec_id="y")], "a record of 'y'"),
        ([output(1, 0, b"a", subscription=8)], "subscription 8, not open"),
        ([gap(1, 3, stdout=5), output(4, 4, b"a")], "offset 4 instead of 5"),
        ([gap(3, 2)], "a gap from 3 to 2"),
        ([gap(1, 2, stdout=-1)], "a gap of -1 bytes in stdout from 0 to -1"),
        ([gap(1, 2, 5, 0, (6, 0))], "a gap of 5 bytes in stdout from 0 to 6"),
        ([output(3, 0, b""), gap(2, 4)], "sequence 2 after 3"),
        ([exited(1), exited(2)], "a second exit"),
        ([exited(1), output(2, 0, b"")], "after the exit"),
        ([exited(1), gap(2, 2)], "after the exit"),
        ([output(1, 0, b"abc"), exited(2, stdout=4)], "states 4 bytes of stdout; 3 were told"),
        ([gap(1, 1, stderr=2), exited(2, stderr=3)], "states 3 bytes of stderr; 2 were told"),
        ([closed(1)], "closed without an exit"),
        ([exited(1), closed(2), closed(3)], "subscription 7, not open"),
        ([exited(1), closed(1)], "sequence 1 after 1"),
    ],
)
def test_a_broken_promise_is_a_violation_after_what_was_kept(
    notes: list[msgspec.Struct], reason: str
) -> None:
    session, codec = started()
    with pytest.raises(ProtocolViolation, match=reason) as caught:
        session.receive(wire(codec, *notes))
    assert [*caught.value.events] == notes[:-1]


def test_a_gap_counts_its_bytes_and_the_stream_goes_on_behind_it() -> None:
    session, codec = started()
    notes = [
        output(1, 0, b"ab"),
        gap(2, 5, 10, 3, (12, 3)),
        output(6, 12, b"c"),
        output(7, 3, b"d", "stderr"),
        exited(8, 13, 4),
    ]
    assert [*session.receive(wire(codec, *notes))] == notes
    assert session.subscriptions[7].gap_bytes == 13


def test_an_attach_in_the_middle_takes_the_first_offset_it_sees() -> None:
    for after, begins_after in ((5, 5), ("tail", 5), ("tail", 3)):
        session, codec = attached(after, begins_after=begins_after)
        session.receive(wire(codec, output(6, 100, b"ab")))
        with pytest.raises(ProtocolViolation, match="offset 103 instead of 102"):
            session.receive(wire(codec, output(7, 103, b"c")))


def test_a_gap_tells_an_attach_in_the_middle_where_the_streams_go_on() -> None:
    session, codec = attached(5)
    session.receive(wire(codec, gap(6, 9, None, None, (100, 50))))
    session.receive(wire(codec, output(10, 100, b"ab"), output(11, 50, b"c", "stderr")))
    assert session.subscriptions[7].gap_bytes == 0
    session.receive(wire(codec, gap(12, 13, 8, 0, (110, 51))))
    assert session.subscriptions[7].gap_bytes == 8


def test_an_attach_after_a_sequence_is_not_told_what_is_before_it() -> None:
    session, codec = attached(5)
    with pytest.raises(ProtocolViolation, match="sequence 5 after 5"):
        session.receive(wire(codec, output(5, 0, b"a")))


def test_one_stream_of_two_is_checked_by_itself() -> None:
    session, codec = attached(0, ["stderr"])
    session.receive(wire(codec, output(4, 0, b"a", "stderr")))
    with pytest.raises(ProtocolViolation, match="not subscribed"):
        session.receive(wire(codec, output(5, 0, b"a")))


def test_a_stream_that_ends_early_is_lost_and_has_no_exit() -> None:
    session, codec = started()
    session.receive(wire(codec, output(1, 0, b"a")))
    lost = session.receive_eof()
    assert lost is not None
    assert str(lost) == "stream ended without the exit of x"
    assert lost.exec_ids == ("x",)


def test_after_the_exit_an_ended_stream_has_lost_nothing() -> None:
    session, codec = started()
    session.receive(wire(codec, exited(1)))
    assert session.receive_eof() is None


def test_an_unanswered_request_is_named_when_the_stream_ends() -> None:
    session = Session()
    session.request("ping", Ping())
    lost = session.receive_eof()
    assert lost is not None
    assert lost.methods == ("ping",)


def test_half_a_frame_at_the_end_is_a_lost_stream() -> None:
    session = Session()
    session.receive(b"\0\0\0\x05ab")
    assert str(session.receive_eof()) == "stream ended without the end of a message"


def test_an_error_carries_its_facts() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    request_id, _ = session.request("exec.start", ExecStart(argv=["nosuch"]))
    error = RequestError("start_failed", "no such program", stage="exec", errno=2)
    (event,) = session.receive(codec.failure(request_id, error))
    assert isinstance(event, Failure)
    assert isinstance(event.error, RemoteError)
    assert event.method == "exec.start"
    assert event.error.kind == "start_failed"
    assert (event.error.data.stage, event.error.data.errno) == ("exec", 2)
    assert event.error.preserved == KINDS["start_failed"].preserved
    assert event.error.data.layer == "kernel"
    assert session.unanswered == {}


def test_an_error_with_the_exit_in_its_data_is_read_with_it() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    request_id, _ = session.request("exec.attach", ExecAttach(exec_id="x"))
    exit = make_exit(code=3)
    (event,) = session.receive(
        codec.failure(request_id, RequestError("exec_evicted", "gone", exit=exit))
    )
    assert isinstance(event, Failure)
    assert isinstance(event.error, RemoteError)
    assert event.error.data.exit == exit


def test_an_error_without_an_id_belongs_to_no_request() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    (event,) = session.receive(codec.failure(None, RequestError("parse_error", "what")))
    assert isinstance(event, Failure)
    assert event.request_id is None


def test_answers_may_come_in_any_order_and_once() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    first, _ = session.request("ping", Ping())
    second, _ = session.request("daemon.drain", DaemonDrain())
    events = session.receive(codec.answer(second, Empty()) + codec.answer(first, Empty()))
    assert [event.method for event in events if isinstance(event, Answer)] == [
        "daemon.drain",
        "ping",
    ]
    with pytest.raises(ProtocolViolation, match="request 1, which was not made"):
        session.receive(codec.answer(first, Empty()))


def test_an_answer_of_the_wrong_shape_is_a_violation() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    request_id, _ = session.request("exec.start", ExecStart(argv=["a"]))
    with pytest.raises(ProtocolViolation, match="no message of this protocol"):
        session.receive(codec.answer(request_id, HELLO))


def test_what_a_newer_daemon_adds_is_passed_over() -> None:
    session = Session(Encoding.JSON)
    request_id, _ = session.request("ping", Ping())
    assert session.receive(b'{"jsonrpc":"2.0","method":"exec.novel","params":{"a":1}}\n') == []
    line = b'{"jsonrpc":"2.0","id":%d,"result":{"novel":1},"novel":2}\n' % request_id
    assert len(session.receive(line)) == 1


def test_a_heartbeat_is_no_news_and_changes_nothing() -> None:
    session, codec = started()
    heartbeat = HeartbeatNote(subscription=7, exec_id="x", last_seq=9, state="running")
    assert session.receive(wire(codec, output(1, 0, b"a"), heartbeat))[1:] == []
    assert session.subscriptions[7].last_seq == 1
    with pytest.raises(ProtocolViolation, match="subscription 8, not open"):
        session.receive(
            wire(codec, HeartbeatNote(subscription=8, exec_id="x", last_seq=9, state="running"))
        )


def test_a_superseded_subscription_is_over() -> None:
    session, codec = started()
    note = SupersededNote(subscription=7, exec_id="x", subscriber="s", generation=None)
    assert [*session.receive(wire(codec, note))] == [note]
    assert session.subscriptions == {}
    assert session.receive_eof() is None
    with pytest.raises(ProtocolViolation, match="subscription 7, not open"):
        session.receive(wire(codec, output(1, 0, b"a")))


def test_stopping_is_told_without_a_subscription() -> None:
    session, codec = Session(), Codec(Encoding.MSGPACK)
    note = StoppingNote(cause="SIGTERM", deadline_s=2.0)
    assert session.receive(wire(codec, note)) == [note]


def test_what_was_under_way_at_a_detach_is_no_news_and_no_violation() -> None:
    session, codec = started()
    session.request("exec.detach", ExecDetach(subscription=7))
    assert session.receive(wire(codec, output(1, 0, b"a"), exited(2, 1))) == []


def test_text_that_is_no_utf8_is_refused_before_it_is_sent() -> None:
    session = Session()
    with pytest.raises(RemoteError, match="not valid UTF-8") as caught:
        session.request("exec.start", ExecStart(argv=["a\udcff"]))
    assert caught.value.kind == "invalid_params"
    assert session.unanswered == {}


@pytest.mark.parametrize("encoding", Encoding)
def test_a_number_the_wire_has_no_room_for_is_refused(encoding: Encoding) -> None:
    session = Session(encoding)
    with contextlib.suppress(RemoteError):  # JSON has room for any; the daemon refuses it
        session.request("exec.attach", ExecAttach(exec_id="x", after=2**64))
    with contextlib.suppress(RemoteError):
        session.request("exec.start", ExecStart(argv=["a"], nice=-(2**63) - 1))
    assert len(session.unanswered) == (2 if encoding is Encoding.JSON else 0)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_largest_request_is_what_the_daemon_takes_to_the_byte(encoding: Encoding) -> None:
    session = Session(encoding)

    def framed(size: int) -> bytes:
        return session.request("exec.start", ExecStart(argv=["x" * size]))[1]

    most = len(framed(10_000)) - (1 if encoding is Encoding.JSON else 4)
    session.frame_bytes_max = most
    splitter = FrameSplitter(most, encoding)
    splitter.feed(framed(10_000))
    assert splitter.next_frame() is not None
    with pytest.raises(RemoteError, match=f"frame of {most + 1} bytes; the most is {most}") as told:
        framed(10_001)
    assert told.value.kind == "frame_too_large"
    assert [*session.unanswered] == [1, 2]
