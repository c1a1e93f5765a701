"""What outlives a connection: requests until they are answered, subscriptions until they close.

Sans-IO and without a clock, as a Session is, and over any number of Sessions one after the other:
opened() begins a connection, lost() ends it, and everything between is bytes in, events out. Who
drives it (link.py, async_link.py) only moves bytes and decides when to connect again.

Rule 1: a request keeps its id over connections, and is answered once: by the daemon, or at a loss
by Ambiguous where it must not be repeated. repeating.py has the rules.
Rule 2: a subscription keeps its number over connections. It is resumed after the last sequence
received and with the same checks going on; where it has a subscriber name, under that and the
next generation. What cannot be resumed is an Unfollowed event: never an exit, never silence. A
start that was sent again and is answered without its subscription is resumed from its first byte.
Rule 3: every hello after the first names the incarnation. Another one ends the conversation as
DaemonRestarted, before any effect.
Rule 4: every start has an exec_id, a nonce and a horizon, so that it can be repeated, and where it
is attached to a name, so that the command waits for this client to come back. An attach has a
name only where its caller gave one: a reader that changes nothing for others needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from runnerd.protocol.answers import AttachAnswer, StartAnswer
from runnerd.protocol.daemon_answers import HelloAnswer
from runnerd.protocol.daemon_requests import EventsSubscribe, Hello, Ping
from runnerd.protocol.events import EventNote, EventsAnswer
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import ClosedNote, OutputNote, StoppingNote, SupersededNote
from runnerd.protocol.requests import (
    PROTOCOL_VERSIONS,
    Attach,
    ExecAck,
    ExecAttach,
    ExecDetach,
    ExecStart,
)

from .errors import (
    ClientError,
    DaemonRestarted,
    ProtocolViolation,
    RemoteError,
    StreamLost,
)
from .numbering import Numbering
from .pending import Asked, Followed, Unfollowed
from .session import Answer, Event, Failure, Session, SubscriptionNote, checks_of_start

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.protocol.fields import Params

    from .subscription import Subscription

_NOBODY: Final = 0  # the daemon numbers subscriptions from 1

Occurrence = Event | Unfollowed


class Conversation:
    """One client's conversation with one incarnation of a daemon.

    Args:
        client: Who is calling, for the daemon's log.
        incarnation: The daemon start expected, None = whichever answers first.
        fence: The owner's, said in every hello; see Hello.
        token: The secret the daemon asks for, said in every hello.
        encoding: How messages are written.
        mint: Returns a new secret word of 32 characters of 0-9 a-f, for ids, nonces and names.

    Attributes:
        hello: What the daemon said of itself, last; None before the first.
        starts: The highest number of starts the daemon has told of: the next start's horizon.
        is_greeted: Whether there is a connection whose hello was answered.
        is_turned_away: Whether this connection's hello was refused, but another's may not be.
        end: Why nothing can be asked or told any more, once that is so.
    """

    def __init__(
        self,
        *,
        mint: Callable[[], str],
        client: str | None = None,
        incarnation: str | None = None,
        fence: int | Literal["current"] | None = None,
        token: str | None = None,
        encoding: Encoding = Encoding.MSGPACK,
    ) -> None:
        self.hello: HelloAnswer | None = None
        self.starts = 0
        self.end: ClientError | None = None
        self._client = client
        self._incarnation = incarnation
        self._fence: int | Literal["current"] | None = fence
        self._token = token
        self._encoding = encoding
        self._mint = mint
        self._name = f"c-{mint()[:16]}"
        self._is_stopping = False
        self._last_id = 0
        self._names = 0
        self._asked: dict[int, Asked] = {}
        self._numbers = Numbering()
        self._disconnect()

    def _disconnect(self) -> None:
        self.is_greeted = False
        self.is_turned_away = False
        self._session: Session | None = None
        self._hello_id = 0
        self._wire_ids: dict[int, int] = {}
        self._resuming: dict[int, int] = {}
        self._unsent = bytearray()
        self._queued_bytes = 0
        self._sent_bytes = 0

    @property
    def is_owed_heartbeats(self) -> bool:
        """Whether the daemon would say something within seconds, if only that nothing happened."""
        return self._numbers.is_on_wire

    # The outgoing bytes

    @property
    def unsent(self) -> bytearray:
        """What is to be handed to the socket next; say sent() of what it took."""
        return self._unsent

    def sent(self, count_bytes: int) -> None:
        """Take that the first `count_bytes` of `unsent` were handed over."""
        self._sent_bytes += count_bytes  # first: interrupted here, too much counts as sent
        del self._unsent[:count_bytes]

    def _queue(self, framed: bytes) -> int:
        self._unsent += framed
        self._queued_bytes += len(framed)
        return self._queued_bytes

    # Requests

    def prepared(self, params: ExecStart) -> ExecStart:
        """Return a start that can be repeated: with an id, a nonce, a horizon, a subscriber."""
        attach = params.attach
        if attach is not None:
            attach = msgspec.structs.replace(
                attach,
                subscriber=self._next_name() if attach.subscriber is None else attach.subscriber,
                generation=1 if attach.generation is None else attach.generation,
            )
        horizon = self.starts if params.horizon is None else params.horizon
        return msgspec.structs.replace(
            params,
            exec_id=f"x-{self._mint()[:16]}" if params.exec_id is None else params.exec_id,
            nonce=self._mint() if params.nonce is None else params.nonce,
            horizon=horizon,
            attach=attach,
        )

    def request(self, method: str, params: Params) -> int:
        """Make a request; it is sent at once or, without a connection, on the next one.

        Args:
            method: A key of METHODS, but for hello.
            params: Of the type METHODS has for it. A subscription in it is one of this
                conversation's numbers.

        Returns:
            Its id, by which its answer or failure is told.

        Raises:
            RemoteError: If a text in it is no UTF-8, or a number has more than 64 bits, as the
                daemon would refuse it.
            ClientError: `end`, if the conversation is over.
        """
        if self.end is not None:
            raise self.end
        if isinstance(params, ExecStart):
            params = self.prepared(params)
        elif isinstance(params, ExecAttach) and params.subscriber is not None:
            params = msgspec.structs.replace(params, generation=params.generation or 1)
        elif isinstance(params, ExecAck):
            self._acknowledged(params.subscription, params.seq)
        asked = Asked(method, params)
        if self.is_greeted:
            self._send(self._last_id + 1, asked)
        elif isinstance(params, ExecDetach):
            # At once: where the next attempt is lost before its hello, it is never sent.
            self._numbers.forget(params.subscription)
        self._last_id += 1
        self._asked[self._last_id] = asked
        return self._last_id

    def _next_name(self) -> str:
        self._names += 1
        return f"{self._name}.{self._names}"

    def _send(self, own_id: int, asked: Asked) -> None:
        assert self._session is not None
        wire_id, framed = self._session.request(*self._as_sent_now(asked))
        self._wire_ids[wire_id] = own_id
        asked.ends_at_bytes = self._queue(framed)
        if isinstance(asked.params, ExecDetach):
            self._numbers.forget(asked.params.subscription)

    def _as_sent_now(self, asked: Asked) -> tuple[str, Params]:
        params = asked.params
        if not isinstance(params, (ExecDetach, ExecAck)):
            return asked.method, params
        wire_number = self._numbers.on_wire(params.subscription)
        was_opened = self._numbers.was_given(params.subscription)
        if isinstance(params, ExecAck) and was_opened and wire_number is None:
            # It is over, or its next window begins anew: only an answer is owed, and that is alike.
            return "ping", Ping()
        number = wire_number or _NOBODY
        return asked.method, msgspec.structs.replace(params, subscription=number)

    def abandon(self, request_id: int) -> bool:
        """Stop caring for a request: it is not sent later, nor again.

        Returns:
            Whether its answer may still be told; not where it was never sent.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return False
        asked.is_abandoned = True
        if asked.ends_at_bytes is None:
            del self._asked[request_id]
            return False
        return True

    def ack(self, subscription: int, seq: int) -> None:
        """Acknowledge a subscription's output up to a sequence."""
        self._acknowledged(subscription, seq)
        followed = self._numbers.followed.get(subscription)
        if followed is not None and followed.wire_number is not None:
            assert self._session is not None
            self._queue(self._session.ack(followed.wire_number, seq))

    def _acknowledged(self, subscription: int, seq: int) -> None:
        followed = self._numbers.followed.get(subscription)
        if followed is None:
            return
        followed.acknowledged(seq)
        if self.is_greeted and followed.wire_number is None and not followed.is_resuming:
            self._resume(subscription, followed)

    def detach(self, subscription: int) -> None:
        """End a subscription: nothing of it is told any more."""
        wire_number = self._numbers.on_wire(subscription)
        self._numbers.forget(subscription)
        if wire_number is not None and self._session is not None:
            self._detach(wire_number)

    def _detach(self, wire_number: int) -> None:
        assert self._session is not None
        wire_id, framed = self._session.request("exec.detach", ExecDetach(subscription=wire_number))
        self._resuming[wire_id] = _NOBODY
        self._queue(framed)

    @property
    def subscriptions(self) -> dict[int, str]:
        """Its open subscriptions, by number: whose output, "" for events."""
        return self._numbers.exec_ids

    # Connections

    def opened(self) -> None:
        """Begin a connection: the hello is queued, all else waits for its answer."""
        assert self._session is None
        assert self.end is None
        self._session = Session(self._encoding)
        hello = Hello(
            protocol=[*PROTOCOL_VERSIONS],
            client=self._client,
            incarnation=self._incarnation,
            fence=self._fence,
            token=self._token,
        )
        self._hello_id, framed = self._session.request("hello", hello)
        self._queue(framed)

    def receive(self, data: bytes | bytearray | memoryview) -> list[Occurrence]:
        """Take bytes of the connection; not empty, its end is told by lost().

        Returns:
            What they complete, in order. `end` may be set afterwards: what is returned came
            before it.
        """
        assert self._session is not None
        try:
            events = self._session.receive(data)
        except ProtocolViolation as violation:
            events = violation.events
            self.end = violation
        return [told for event in events for told in self._take(event)]

    def lost(self) -> list[Occurrence]:
        """End the connection; afterwards `opened` may begin the next one.

        Interrupted, it can be called again, and counts nothing as never sent that was.

        Returns:
            The answers of requests that are over with it, in the order made.
        """
        self._numbers.lost()
        told: list[Occurrence] = []
        for own_id, asked in [*self._asked.items()]:
            event = asked.lost(own_id, self._sent_bytes)
            if event is not None:
                del self._asked[own_id]
                told.append(event)
        self._disconnect()
        if self._is_stopping and self.end is None:
            self.end = self.lost_error()
        return told

    def lost_error(self) -> StreamLost:
        """Say what is lost if no further connection comes."""
        exec_ids, methods = self._open_ends()
        if exec_ids:
            what = f"stream ended without the exit of {', '.join(exec_ids)}"
        elif methods:
            what = f"stream ended without the answer to {', '.join(methods)}"
        elif self.hello is None:
            what = "stream ended without the answer to hello"
        else:
            what = "the daemon ended the connection"
        return StreamLost(what, exec_ids=exec_ids, methods=methods)

    def _open_ends(self) -> tuple[list[str], list[str]]:
        checks = [followed.checks for followed in self._numbers.followed.values()]
        exec_ids = [each.exec_id for each in checks if not each.has_exited]
        return exec_ids, [asked.method for asked in self._asked.values()]

    # What comes in

    def _take(self, event: Event) -> list[Occurrence]:
        if isinstance(event, Answer):
            return self._take_answer(event)
        if isinstance(event, Failure):
            return self._take_failure(event)
        if isinstance(event, StoppingNote):
            self._is_stopping = True
            return [event]
        return self._take_note(event)

    def _take_answer(self, answer: Answer) -> list[Occurrence]:
        result = answer.result
        if answer.request_id == self._hello_id:
            assert isinstance(result, HelloAnswer)
            return self._greet(result)
        if answer.request_id in self._resuming:
            number = self._resuming.pop(answer.request_id)
            return self._take_resumed(number, result)
        own_id = self._wire_ids.pop(answer.request_id)
        asked = self._asked.pop(own_id)
        if isinstance(result, StartAnswer):
            self.starts = max(self.starts, result.starts)
            if result.subscription is None and not asked.is_abandoned:
                result.subscription = self._follow_anyway(asked.params, result.exec_id)
        if isinstance(result, (StartAnswer, AttachAnswer)) and answer.opened is not None:
            assert result.subscription is not None
            result.subscription = self._opened_by(asked.params, answer.opened, result.subscription)
        if isinstance(result, EventsAnswer):
            number = self._numbers.watch()
            self._numbers.put_on_wire(number, result.subscription)
            result.subscription = number
        return [Answer(own_id, asked.method, result)]

    def _take_resumed(self, number: int, result: object) -> list[Occurrence]:
        if not isinstance(result, (AttachAnswer, EventsAnswer)):
            return []  # a detach of ours
        if not self._numbers.put_on_wire(number, result.subscription):
            self._detach(result.subscription)  # forgotten while this was under way
            return []
        if isinstance(result, AttachAnswer):
            self._numbers.followed[number].is_resuming = False
            return []
        # Nobody knows what happened between the two connections: that much is said.
        return [
            EventNote(subscription=number, number=result.number, at=result.at, kind="events_lost")
        ]

    def _opened_by(self, params: Params, checks: Subscription, wire_number: int) -> int:
        attach = params.attach if isinstance(params, ExecStart) else params
        assert isinstance(attach, (Attach, ExecAttach))
        number = self._numbers.follow(Followed(checks, attach))
        self._numbers.put_on_wire(number, wire_number)
        return number

    def _follow_anyway(self, params: Params, exec_id: str) -> int | None:
        """Have a start that was recognised and got no subscription attached to, or told why not.

        Returns:
            The subscription; None where the start asked for none.
        """
        assert isinstance(params, ExecStart)
        if params.attach is None:
            return None
        checks = checks_of_start(exec_id, params, params.attach)
        followed = Followed(checks, params.attach)
        number = self._numbers.follow(followed)
        self._resume(number, followed)
        return number

    def _take_failure(self, failure: Failure) -> list[Occurrence]:
        if failure.request_id == self._hello_id or (
            # Without an id where the daemon did not even wait for the hello.
            failure.request_id is None and not self.is_greeted
        ):
            self._refused(failure.error)
            return []
        if failure.request_id is None:
            return [failure]
        if failure.request_id in self._resuming:
            number = self._resuming.pop(failure.request_id)
            exec_id = self._numbers.forget(number)
            return [] if exec_id is None else [Unfollowed(number, exec_id, failure.error)]
        own_id = self._wire_ids.pop(failure.request_id)
        asked = self._asked.pop(own_id)
        return [Failure(own_id, asked.method, failure.error)]

    def _take_note(self, note: SubscriptionNote) -> list[Occurrence]:
        number = self._numbers.ours(note.subscription)
        if number is None:
            return []  # detached: what was under way is no news
        note.subscription = number
        if isinstance(note, EventNote):
            return [note]
        followed = self._numbers.followed[number]
        if isinstance(note, OutputNote):
            followed.took_in(note)
        elif isinstance(note, (ClosedNote, SupersededNote)):
            self._numbers.forget(number)
        return [note]

    def _greet(self, hello: HelloAnswer) -> list[Occurrence]:
        self.hello = hello
        self._incarnation = hello.incarnation
        assert self._session is not None
        self._session.frame_bytes_max = hello.limits.frame_bytes
        self.starts = max(self.starts, hello.starts)
        self.is_greeted = True
        for number, followed in self._numbers.followed.items():
            self._resume(number, followed)
        for number in self._numbers.watched:
            wire_id, framed = self._session.request("events.subscribe", EventsSubscribe())
            self._resuming[wire_id] = number
            self._queue(framed)
        told: list[Occurrence] = []
        for own_id, asked in [*self._asked.items()]:
            try:
                self._send(own_id, asked)
            except RemoteError as error:
                del self._asked[own_id]
                told.append(Failure(own_id, asked.method, error))
        return told

    def _resume(self, number: int, followed: Followed) -> None:
        if not followed.may_resume:
            return  # once its reader has taken some: ack() looks again
        assert self._session is not None
        params = followed.resumption()
        wire_id, framed = self._session.request("exec.attach", params, resumes=followed.checks)
        self._resuming[wire_id] = number
        self._queue(framed)

    def _refused(self, error: ClientError) -> None:
        if self.hello is None:
            self.end = error
        elif error.kind == "incarnation_changed":
            assert self._incarnation is not None
            exec_ids, methods = self._open_ends()
            self.end = DaemonRestarted(self._incarnation, exec_ids=exec_ids, methods=methods)
        elif not (isinstance(error, RemoteError) and error.data.retryable):
            self.end = error
        self.is_turned_away = True
