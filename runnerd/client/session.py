"""The client's side of one connection, without sockets and without a clock.

Rule 1: bytes in, typed events out; requests in, bytes out. How the bytes were split into reads
makes no difference to the events.
Rule 2: nothing is made up. An answer belongs to a request that was made, a record to a
subscription that was opened and comes in its order; all else is a ProtocolViolation. A stream
that ends early is a StreamLost, never an exit.
Rule 3: what a newer daemon may add is passed over: unknown notifications, unknown fields.

After a ProtocolViolation or the stream's end a session is over. What it knew stays readable
(unanswered, subscriptions); conversation.py takes it on to the next connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from runnerd.protocol.answers import ANSWERS, AttachAnswer, StartAnswer
from runnerd.protocol.codec import Codec
from runnerd.protocol.errors import RequestError, invalid
from runnerd.protocol.events import EventNote, EventsAnswer
from runnerd.protocol.framing import (
    Encoding,
    FrameSplitter,
    FramingError,
    beside_payload_bytes,
)
from runnerd.protocol.notes import (
    NOTIFICATIONS,
    ClosedNote,
    ExitedNote,
    GapNote,
    HeartbeatNote,
    OutputNote,
    StoppingNote,
    SupersededNote,
)
from runnerd.protocol.requests import METHODS, ExecAck, ExecAttach, ExecDetach, ExecStart

from .errors import ClientError, ProtocolViolation, RemoteError, StreamLost
from .subscription import EventChecks, Subscription

if TYPE_CHECKING:
    from runnerd.protocol.codec import Incoming
    from runnerd.protocol.fields import Params
    from runnerd.protocol.requests import Attach

# An answer may be larger than any request the daemon takes: a list of a thousand execs, each
# with its argv. The bound is only there so that a stray length cannot ask for gigabytes.
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024


class Answer(msgspec.Struct, frozen=True):
    """A request was answered.

    Attributes:
        request_id: Which, as request() returned it.
        method: Its method.
        result: A struct of the type ANSWERS has for the method.
        opened: The subscription it opened. Later bytes may have closed it already.
    """

    request_id: int
    method: str
    result: msgspec.Struct
    opened: Subscription | None = None


class Failure(msgspec.Struct, frozen=True):
    """A request was refused or failed.

    Attributes:
        request_id: Which; None where the daemon could not tell, so not even read it.
        method: Its method, empty with no request_id.
        error: Why, ready to be raised: what the daemon answered, a RemoteError, or from a
            Conversation also an Ambiguous.
    """

    request_id: int | None
    method: str
    error: ClientError


SubscriptionNote = OutputNote | GapNote | ExitedNote | ClosedNote | SupersededNote | EventNote
Note = SubscriptionNote | StoppingNote
Event = Answer | Failure | Note


class Session:
    """One connection's conversation.

    Args:
        encoding: How messages are written.
        answer_bytes_max: The largest message accepted.

    Attributes:
        subscriptions: Open subscriptions by their number.
        watches: Open subscriptions to events by theirs.
        frame_bytes_max: The largest payload the daemon takes; None = it has not said so yet.
    """

    def __init__(
        self,
        encoding: Encoding = Encoding.MSGPACK,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self._encoding = encoding
        self._codec = Codec(encoding)
        self._splitter = FrameSplitter(answer_bytes_max, encoding)
        self._last_id = 0
        self._unanswered: dict[int, tuple[str, Params]] = {}
        self._resumed: dict[int, Subscription] = {}
        self._detached: set[int] = set()
        self.subscriptions: dict[int, Subscription] = {}
        self.watches: dict[int, EventChecks] = {}
        self.frame_bytes_max: int | None = None

    @property
    def unanswered(self) -> dict[int, str]:
        """The methods of requests without an answer so far, by id, in the order made."""
        return {request_id: method for request_id, (method, _) in self._unanswered.items()}

    def request(
        self, method: str, params: Params, *, resumes: Subscription | None = None
    ) -> tuple[int, bytes]:
        """Make a request.

        Args:
            method: A key of METHODS.
            params: Of the type METHODS has for it.
            resumes: For an exec.attach after its last_seq: the subscription of an earlier
                connection that goes on here, checks and all.

        Returns:
            Its id, and the framed bytes to send.

        Raises:
            RemoteError: If a text in it is no UTF-8, or a number has more than 64 bits, as the
                daemon would refuse it.
        """
        assert type(params) is METHODS[method], f"{method} takes {METHODS[method].__name__}"
        request_id = self._last_id + 1
        try:
            framed = self._codec.call(request_id, method, params)
        except UnicodeEncodeError as error:
            text = f"'{ascii(error.object)[1:-1]}' is not valid UTF-8 text"
            raise RemoteError.before_sending(invalid("params", text)) from error
        except OverflowError as error:
            text = "a number has more than 64 bits"
            raise RemoteError.before_sending(invalid("params", text)) from error
        self._check_size(method, framed)
        self._last_id = request_id
        self._unanswered[request_id] = method, params
        if resumes is not None:
            self._resumed[request_id] = resumes
        if isinstance(params, ExecDetach):
            # What was under way when the daemon read this is no violation, and no news either.
            self._detached.add(params.subscription)
            self.subscriptions.pop(params.subscription, None)
            self.watches.pop(params.subscription, None)
        return request_id, bytes(framed)

    def _check_size(self, method: str, framed: bytes | bytearray) -> None:
        most = self.frame_bytes_max
        size = len(framed) - beside_payload_bytes(self._encoding)
        if most is not None and size > most:
            text = f"{method} makes a frame of {size} bytes; the most is {most}"
            raise RemoteError.before_sending(RequestError("frame_too_large", text))

    def ack(self, subscription: int, seq: int) -> bytes:
        """Make the one notification a client sends: output up to `seq` has been taken."""
        return bytes(self._codec.note("exec.ack", ExecAck(subscription=subscription, seq=seq)))

    def receive(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Take bytes from the daemon.

        Args:
            data: What was read, not empty: the stream's end is told by receive_eof.

        Returns:
            The events they complete, in order; often none.

        Raises:
            ProtocolViolation: If the daemon broke the protocol; its `events` are those that
                came before.
        """
        self._splitter.feed(data)
        events: list[Event] = []
        try:
            while (payload := self._splitter.next_frame()) is not None:
                event = self._event(payload)
                if event is not None:
                    events.append(event)
        except FramingError as error:
            violation = ProtocolViolation(str(error))
            violation.events = events
            raise violation from error
        except ProtocolViolation as violation:
            violation.events = events
            raise
        return events

    def receive_eof(self) -> StreamLost | None:
        """Take the stream's end.

        Returns:
            None if nothing was expected any more; else what was lost, ready to be raised.
        """
        exec_ids = [sub.exec_id for sub in self.subscriptions.values() if not sub.has_exited]
        methods = list(self.unanswered.values())
        if exec_ids:
            what = f"the exit of {', '.join(exec_ids)}"
        elif methods:
            what = f"the answer to {', '.join(methods)}"
        elif self._splitter.pending_bytes:
            what = "the end of a message"
        else:
            return None
        return StreamLost(f"stream ended without {what}", exec_ids=exec_ids, methods=methods)

    def _event(self, payload: bytes) -> Event | None:
        try:
            message = self._codec.incoming(payload)
            if message.method is None:
                return self._answer(message)
            kind = NOTIFICATIONS.get(message.method)
            if kind is None:
                return None
            return self._note(self._codec.decode(message.params, kind))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolViolation(f"no message of this protocol: {error}") from error

    def _answer(self, message: Incoming) -> Answer | Failure:
        request_id = message.id
        if request_id is None and message.error is not None:
            return Failure(None, "", RemoteError(message.error))
        known = self._unanswered.pop(request_id, None) if isinstance(request_id, int) else None
        if known is None or not isinstance(request_id, int):
            raise ProtocolViolation(f"an answer to request {request_id!r}, which was not made")
        method, params = known
        resumes = self._resumed.pop(request_id, None)
        if message.error is not None:
            return Failure(request_id, method, RemoteError(message.error))
        result: msgspec.Struct = self._codec.decode(message.result, ANSWERS[method])
        if isinstance(result, EventsAnswer):
            self.watches[result.subscription] = EventChecks(result.number)
        return Answer(request_id, method, result, self._open(params, result, resumes))

    def _open(
        self, params: Params, result: msgspec.Struct, resumes: Subscription | None
    ) -> Subscription | None:
        if isinstance(params, ExecStart) and isinstance(result, StartAnswer):
            if params.attach is None or result.subscription is None:
                return None
            number = result.subscription
            opened = checks_of_start(result.exec_id, params, params.attach)
        elif isinstance(params, ExecAttach) and isinstance(result, AttachAnswer):
            number = result.subscription
            opened = resumes or Subscription(
                params.exec_id,
                params.streams,
                after_seq=result.after,
                from_start=params.after == 0,
            )
        else:
            return None
        if number in self.subscriptions:
            raise ProtocolViolation(f"subscription {number} was opened twice")
        self.subscriptions[number] = opened
        return opened

    def _note(self, note: msgspec.Struct) -> Note | None:
        if isinstance(note, StoppingNote):
            return note
        assert isinstance(note, SubscriptionNote | HeartbeatNote)
        if isinstance(note, EventNote) and note.subscription in self.watches:
            self.watches[note.subscription].take(note)
            return None if note.kind == "heartbeat" else note
        subscription = self.subscriptions.get(note.subscription)
        if subscription is None or isinstance(note, EventNote):
            if note.subscription in self._detached:
                return None
            raise ProtocolViolation(f"a record of subscription {note.subscription}, not open")
        if isinstance(note, HeartbeatNote):
            subscription.heartbeat(note)
            return None  # it says that there is nothing to say
        if isinstance(note, OutputNote):
            subscription.output(note)
        elif isinstance(note, GapNote):
            subscription.gap(note)
        elif isinstance(note, ExitedNote):
            subscription.exited(note)
        else:
            if isinstance(note, ClosedNote):
                subscription.closed(note)
            del self.subscriptions[note.subscription]
        return note


def checks_of_start(exec_id: str, start: ExecStart, attach: Attach) -> Subscription:
    """Return the checks of a subscription that begins with its exec."""
    return Subscription(exec_id, attach.streams, after_seq=0, from_start=True, hashes=start.sha256)
