"""The daemon's side of a Conversation, without a socket: what it is asked, what it says."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from runnerd.client.conversation import Conversation, Occurrence
from runnerd.protocol.answers import AttachAnswer, StartAnswer
from runnerd.protocol.codec import Codec
from runnerd.protocol.daemon_requests import Hello
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Closed
from runnerd.protocol.fields import Params
from runnerd.protocol.framing import Encoding, FrameSplitter
from runnerd.protocol.notes import ClosedNote, ExitedNote, GapNote, OutputNote
from runnerd.protocol.requests import METHODS, ExecStart
from tests.unit.fake_daemon import HELLO, make_exit

if TYPE_CHECKING:
    from collections.abc import Callable


def conversation(mint: Callable[[], str] | None = None) -> Conversation:
    """One whose secrets are numbers."""
    numbers = itertools.count(1)
    return Conversation(mint=mint or (lambda: f"{next(numbers):032x}"), client="me")


class ScriptedPeer:
    """One connection of a conversation.

    Args:
        talk: The conversation; a connection is opened on it.
        greets: Whether to answer its hello at once.
        incarnation: What the hello's answer says.
    """

    def __init__(
        self, talk: Conversation, *, greets: bool = True, incarnation: str = "i-1", starts: int = 0
    ) -> None:
        self.talk = talk
        self.codec = Codec(Encoding.MSGPACK)
        self._splitter = FrameSplitter()
        talk.opened()
        ((self.hello_id, self.hello),) = [
            (request_id, params) for request_id, _, params in self.asked()
        ]
        assert isinstance(self.hello, Hello)
        self.told: list[Occurrence] = []
        if greets:
            hello = msgspec.structs.replace(HELLO, incarnation=incarnation, starts=starts)
            self.told = self.answer(self.hello_id, hello)

    def asked(self, most_bytes: int | None = None) -> list[tuple[int | str | None, str, Params]]:
        """Take what was sent, all of it or the first bytes; whole requests come out."""
        data = bytes(self.talk.unsent[:most_bytes])
        self.talk.sent(len(data))
        self._splitter.feed(data)
        found: list[tuple[int | str | None, str, Params]] = []
        while (payload := self._splitter.next_frame()) is not None:
            request = self.codec.request(payload)
            params = self.codec.params(request.params, METHODS[request.method])
            found.append((request.id, request.method, params))
        return found

    def answer(self, request_id: int | str | None, result: msgspec.Struct) -> list[Occurrence]:
        return self.talk.receive(self.codec.answer(request_id, result))

    def fail(self, request_id: int | str | None, error: RequestError) -> list[Occurrence]:
        return self.talk.receive(self.codec.failure(request_id, error))

    def start(self, params: ExecStart, subscription: int = 1, *, starts: int = 1) -> int:
        """Ask and answer one start; return the subscription as the conversation numbers it."""
        self.talk.request("exec.start", params)
        ((request_id, _, _),) = self.asked()
        (told,) = self.answer(request_id, started(subscription, starts=starts))
        number = told.result.subscription  # type: ignore[union-attr]
        assert isinstance(number, int)
        return number

    def resume(self, subscription: int, *, last_seq: int = 9) -> Params:
        """Answer the attach that resumes; return what it asked."""
        ((request_id, method, params),) = self.asked()
        assert method == "exec.attach"
        assert self.answer(request_id, attached(subscription, last_seq)) == []
        return params

    def output(self, seq: int, offset: int, data: bytes, subscription: int = 1) -> list[Occurrence]:
        note = OutputNote(
            subscription=subscription,
            exec_id="x",
            seq=seq,
            stream="stdout",
            offset=offset,
            data=data,
        )
        return self.talk.receive(self.codec.note("exec.output", note))

    def gap(
        self, seqs: tuple[int, int], lost_bytes: int | None, offset: int, subscription: int = 1
    ) -> list[Occurrence]:
        note = GapNote(
            subscription=subscription,
            exec_id="x",
            first_seq=seqs[0],
            last_seq=seqs[1],
            stdout_bytes=lost_bytes,
            stderr_bytes=0,
            stdout_offset=offset,
            stderr_offset=0,
        )
        return self.talk.receive(self.codec.note("exec.gap", note))

    def exited(
        self, seq: int, stdout_bytes: int, subscription: int = 1, sha256: str | None = None
    ) -> list[Occurrence]:
        exit = make_exit(stdout_bytes=stdout_bytes)
        exit.stdout.sha256 = sha256
        note = ExitedNote(subscription=subscription, exec_id="x", seq=seq, exit=exit)
        return self.talk.receive(self.codec.note("exec.exited", note))

    def closed(self, seq: int, subscription: int = 1) -> list[Occurrence]:
        closed = Closed(discarded_bytes=0, closed_at=3.0)
        note = ClosedNote(subscription=subscription, exec_id="x", seq=seq, closed=closed)
        return self.talk.receive(self.codec.note("exec.closed", note))


def started(subscription: int | None = 1, *, created: bool = True, starts: int = 1) -> StartAnswer:
    return StartAnswer(
        exec_id="x",
        pid=99,
        created=created,
        starts=starts,
        oom_score_adj=900,
        subscription=subscription,
    )


def attached(subscription: int, last_seq: int = 9, *, after: int = 0) -> AttachAnswer:
    return AttachAnswer(
        subscription=subscription,
        state="running",
        pid=99,
        first_seq=1,
        last_seq=last_seq,
        after=after,
    )
