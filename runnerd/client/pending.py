"""What outlives a connection: a request until it is answered, a subscription until it closes.

Each knows what becomes of it at a loss; Conversation holds them. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from runnerd.protocol.answers import Empty
from runnerd.protocol.requests import Attach, ExecAttach, ExecStart

from .errors import Ambiguous, ClientError
from .repeating import REPEATS, Repeat, may_repeat
from .session import Answer, Failure

if TYPE_CHECKING:
    from runnerd.protocol.fields import Params
    from runnerd.protocol.notes import OutputNote

    from .subscription import Subscription

# What may wait on the client for one exec while others are read. With a window the daemon
# stops sending long before; without one this is where an exec is detached.
QUEUE_BYTES_MAX: Final = 8 * 1024 * 1024

_Attach = TypeVar("_Attach", Attach, ExecAttach)


class Unfollowed(msgspec.Struct, frozen=True):
    """A subscription could not be resumed: the rest of the output does not come.

    Attributes:
        subscription: Whose.
        exec_id: The exec; empty where it was to events.
        error: Why, with the exit in its data where it is known.
    """

    subscription: int
    exec_id: str
    error: ClientError


class Asked:
    """A request without an answer so far.

    Args:
        method: A key of METHODS.
        params: As it is sent next, but for a subscription's number on the wire.

    Attributes:
        ends_at_bytes: Where its frame ends among this connection's outgoing bytes; None = it was
            not made on this connection.
        is_abandoned: Whether nobody cares for its answer: it is not sent later, nor again.
    """

    def __init__(self, method: str, params: Params) -> None:
        self.method = method
        self.params = params
        self.ends_at_bytes: int | None = None
        self.is_abandoned = False

    def lost(self, own_id: int, sent_bytes: int) -> Answer | Failure | None:
        """Take the loss of the connection; repeating.py has the rules.

        Args:
            own_id: The request's id.
            sent_bytes: How much of the connection's outgoing bytes was handed over.

        Returns:
            What is to be told, and then it is over; None if it is sent on the next connection.
        """
        was_sent = self.ends_at_bytes is not None and self.ends_at_bytes <= sent_bytes
        if REPEATS[self.method] is Repeat.MOOT:
            return Answer(own_id, self.method, Empty())
        if self.is_abandoned or (was_sent and not may_repeat(self.method, self.params)):
            error = Ambiguous(self.method, getattr(self.params, "exec_id", None))
            return Failure(own_id, self.method, error)
        if was_sent and isinstance(self.params, ExecAttach):
            self.params = _next_generation(self.params)
        elif was_sent and isinstance(self.params, ExecStart) and self.params.attach is not None:
            attach = _next_generation(self.params.attach)
            self.params = msgspec.structs.replace(self.params, attach=attach)
        self.ends_at_bytes = None
        return None


def _next_generation(attach: _Attach) -> _Attach:
    if attach.subscriber is None:
        return attach
    return msgspec.structs.replace(attach, generation=(attach.generation or 1) + 1)


class Followed:
    """A subscription, over the connections it has had.

    Args:
        checks: What it may be told next.
        attach: What it was opened by.

    Attributes:
        wire_number: Its number on this connection; None = it has none so far.
        is_resuming: Whether an attach that resumes it is under way.
    """

    def __init__(self, checks: Subscription, attach: Attach | ExecAttach) -> None:
        self.checks = checks
        self.wire_number: int | None = None
        self.is_resuming = False
        self._subscriber = attach.subscriber
        self._generation = attach.generation
        self._window_bytes = attach.window_bytes
        self._unacknowledged: dict[int, int] = {}  # bytes by sequence, oldest first
        self._unacknowledged_bytes = 0

    @property
    def may_resume(self) -> bool:
        """Whether what its reader has yet to take leaves room for a new window."""
        window_bytes = self._window_bytes or 0
        # A window above the bound is its reader's own choice, and a wait for nothing would not end.
        is_empty = not self._unacknowledged_bytes
        return is_empty or self._unacknowledged_bytes + window_bytes <= QUEUE_BYTES_MAX

    def resumption(self) -> ExecAttach:
        """Return the attach that goes on after the last record received; it is then under way."""
        if self._subscriber is not None:
            self._generation = (self._generation or 1) + 1
        self.is_resuming = True
        return ExecAttach(
            exec_id=self.checks.exec_id,
            after=self.checks.last_seq,
            streams=self.checks.streams,  # type: ignore[arg-type]
            subscriber=self._subscriber,
            generation=self._generation,
            window_bytes=self._window_bytes,
        )

    def lost(self) -> None:
        """Take the loss of the connection."""
        self.wire_number = None
        self.is_resuming = False

    def took_in(self, note: OutputNote) -> None:
        """Count output that came and has yet to be acknowledged."""
        if self._window_bytes is not None:
            self._unacknowledged[note.seq] = len(note.data)
            self._unacknowledged_bytes += len(note.data)

    def acknowledged(self, seq: int) -> None:
        """Take that its reader took all up to a sequence."""
        while self._unacknowledged and (oldest := next(iter(self._unacknowledged))) <= seq:
            self._unacknowledged_bytes -= self._unacknowledged.pop(oldest)
