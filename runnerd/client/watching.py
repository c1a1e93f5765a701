"""Events as one client sees them: what came and has not been taken. No I/O.

Both clients' watches are this with a way to wait. A watch outlives its connection: it subscribes
again on the next one, and says first that events may have been missed between the two, by an
`events_lost` whose `lost` is null.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from runnerd.protocol.events import EventNote, EventsAnswer

from .errors import ClientError
from .pending import Unfollowed

if TYPE_CHECKING:
    import msgspec

    from .routing import Record, Router

QUEUED_MAX: Final = 8192
# What may wait for a caller that is busy elsewhere; as in the daemon, more is lost and counted.


class Watching:
    """The state of a watch.

    Attributes:
        began: How things stood where the events begin: state and memory pressure.
    """

    def __init__(self, router: Router, answer: msgspec.Struct) -> None:
        assert isinstance(answer, EventsAnswer)
        self.began = answer
        self._router = router
        self._queue: deque[EventNote] = deque()
        self._overflown: EventNote | None = None
        self._broken: ClientError | None = None
        router.follow(answer.subscription, self.receive)

    def close(self) -> None:
        """Be told nothing more."""
        if self._broken is None:
            self._router.detach(self.began.subscription)
            self._broken = ClientError("the watch was closed", hint="use client.events() anew")
        self._queue.clear()
        self._overflown = None

    def receive(self, record: Record) -> None:
        """Take an event; called by the client."""
        if isinstance(record, Unfollowed):
            self._broken = record.error
        elif isinstance(record, EventNote):
            self._queue.append(record)
            if len(self._queue) > QUEUED_MAX:
                self._overflow(self._queue.popleft())

    def _overflow(self, lost: EventNote) -> None:
        before = 0 if self._overflown is None else self._overflown.lost
        more = lost.lost if lost.kind == "events_lost" else 1
        self._overflown = EventNote(
            subscription=lost.subscription,
            number=lost.number,
            at=lost.at,
            kind="events_lost",
            lost=None if before is None or more is None else before + more,
        )

    @property
    def _has_news(self) -> bool:
        return bool(self._queue) or self._broken is not None

    def _take(self) -> EventNote | None:
        """Return the next event, None where none has come.

        Raises:
            ClientError: Why none will come, once all that came was taken.
        """
        if self._overflown is not None:
            lost, self._overflown = self._overflown, None
            return lost
        if self._queue:
            return self._queue.popleft()
        if self._broken is not None:
            raise self._broken
        return None
