"""Who gets what: a conversation's events, each handed to whoever asked for it. No I/O.

An answer goes to its request's taker, a record to its subscription's follower, all else to
`events`. So one connection carries any number of execs, and whoever waits moves all of them on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from runnerd.protocol.answers import AttachAnswer, StartAnswer, WriteAnswer
from runnerd.protocol.events import EventsAnswer
from runnerd.protocol.notes import ClosedNote, OutputNote, StoppingNote, SupersededNote

from .conversation import Conversation, Occurrence
from .errors import ClientError, Interrupted, OutputOverflow
from .pending import QUEUE_BYTES_MAX, Unfollowed
from .session import Answer, Failure, SubscriptionNote

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.protocol.fields import Params

    from .feeding import StdinFeeder

    Record = SubscriptionNote | Unfollowed
    Reply = Answer | Failure
    Later = Callable[[float, Callable[[], None]], None]
    Failed = Callable[[ClientError], None]


class Router:
    """A conversation's takers and followers.

    Args:
        conversation: What is asked and told; driven through this object alone.
        flush: Called after anything was queued to be sent.

    Attributes:
        events: What nobody in particular asked for, oldest first.
    """

    def __init__(self, conversation: Conversation, flush: Callable[[], None]) -> None:
        self.conversation = conversation
        self.events: deque[Occurrence] = deque()
        self._flush = flush
        self._takers: dict[int, Callable[[Reply], None]] = {}
        self._followers: dict[int, Callable[[Record], None]] = {}
        self._detached: set[int] = set()
        self._events_bytes = 0
        self._overflow: OutputOverflow | None = None

    def request(
        self, method: str, params: Params, taker: Callable[[Reply], None] | None = None
    ) -> int:
        """Make a request, sent as soon as the connection allows.

        Args:
            method: A key of METHODS.
            params: Of the type METHODS has for it.
            taker: Gets the answer or failure; None = it goes to `events`.

        Returns:
            The request's id.
        """
        request_id = self.conversation.request(method, params)
        if taker is not None:
            self._takers[request_id] = taker
        self._flush()
        return request_id

    def abandon(self, request_id: int) -> None:
        """Have a late answer thrown away; a subscription it opened is detached."""
        if request_id in self._takers:
            self._takers[request_id] = self._throw_away
            if not self.conversation.abandon(request_id):
                del self._takers[request_id]

    def follow(self, subscription: int, follower: Callable[[Record], None]) -> None:
        """Hand a subscription's records to `follower`, until it is closed or detached."""
        self._followers[subscription] = follower

    def detach(self, subscription: int) -> None:
        """End a subscription, without waiting for the answer; nothing of it is told any more."""
        self._followers.pop(subscription, None)
        self._detached.add(subscription)
        if self.conversation.end is None:
            self.conversation.detach(subscription)
            self._flush()

    def ack(self, subscription: int, seq: int) -> None:
        """Acknowledge a subscription's output up to a sequence."""
        if self.conversation.end is None:
            self.conversation.ack(subscription, seq)
            self._flush()

    def hand_out(self, events: list[Occurrence]) -> None:
        """Give each event to whom it belongs.

        Raises:
            OutputOverflow: If too much output waits in `events`; all of these were handed out. One
                exec is detached at a time, so that each is said.
        """
        # Records of one detached on the way may stand among the rest of these, and only of these.
        self._detached.clear()
        for event in events:
            self._hand_out(event)
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise overflow

    def break_off(self) -> None:
        """End every subscription, and tell so: what came for it may not all have been told."""
        for number, exec_id in self.conversation.subscriptions.items():
            self._hand_out(Unfollowed(number, exec_id, Interrupted()))
            self.detach(number)

    def _hand_out(self, event: Occurrence) -> None:
        if isinstance(event, (Answer, Failure)):
            taker = None if event.request_id is None else self._takers.pop(event.request_id, None)
            if taker is not None:
                taker(event)
                return
        elif not isinstance(event, StoppingNote):
            follower = self._followers.get(event.subscription)
            if isinstance(event, (ClosedNote, SupersededNote, Unfollowed)):
                self._followers.pop(event.subscription, None)
            if follower is not None:
                follower(event)
                return
            if event.subscription in self._detached:
                return
        self._keep(event)

    def _keep(self, event: Occurrence) -> None:
        self.events.append(event)
        if isinstance(event, OutputNote):
            self._events_bytes += len(event.data)
            if self._events_bytes > QUEUE_BYTES_MAX and self._overflow is None:
                self.detach(event.subscription)
                self._overflow = OutputOverflow(event.exec_id, event.seq, QUEUE_BYTES_MAX)

    def take_events(self) -> list[Occurrence]:
        """Return and forget what nobody in particular asked for."""
        taken = [*self.events]
        self.events.clear()
        self._events_bytes = 0
        return taken

    def close(self) -> None:
        """End the conversation; every later use raises. Everything that runs keeps running."""
        if self.conversation.end is None:
            self.conversation.end = ClientError(
                "the client was closed", preserved="what runs keeps running"
            )

    def _throw_away(self, reply: Reply) -> None:
        result = reply.result if isinstance(reply, Answer) else None
        opened = (StartAnswer, AttachAnswer, EventsAnswer)
        if isinstance(result, opened) and result.subscription is not None:
            self.detach(result.subscription)


def feed(router: Router, feeder: StdinFeeder, later: Later, failed: Failed) -> None:
    """Send a feeder's next write, and after each answer the next, while anything moves it on.

    Args:
        router: Whereby.
        feeder: The source's side.
        later: Calls a function once so many seconds have passed.
        failed: Told why feeding ended early, but for a command that no longer reads.
    """

    def taken(reply: Reply) -> None:
        if isinstance(reply, Failure):
            feeder.failed(reply.error)
        elif isinstance(reply.result, WriteAnswer):
            feeder.answered(reply.result)
        if feeder.error is not None:
            failed(feeder.error)
        elif feeder.pause_s is not None:
            later(feeder.pause_s, resume)
        else:
            feed(router, feeder, later, failed)

    def resume() -> None:
        feeder.resume()
        feed(router, feeder, later, failed)

    write = feeder.next_write()
    if write is not None and router.conversation.end is None:
        router.request("exec.write", write, taken)
