"""What happened lately, for whoever watches. No I/O, no clock.

One ring of events for all readers, each a cursor into it: a thousand cost what one does, and one
that does not read holds nothing back. Where it stood may have been overwritten meanwhile; then it
is told first how many events it lost, never nothing. Without a reader nothing is kept, and no
event is even made.

Numbers go on for as long as the daemon lives, but only while somebody reads: they say whether one
reader heard all from its first on, not how much ever happened.
"""

from __future__ import annotations

from collections import deque

import msgspec

from runnerd.protocol.events import EventNote

from .bounds import EVENTS_MAX, HEARTBEAT_S


class EventReader:
    """One subscription to events.

    Args:
        number: On its connection.
        after: The last event's number so far.
        now_s: Monotonic.

    Attributes:
        quiet_since_s: When something was last sent to it.
    """

    def __init__(self, number: int, after: int, now_s: float) -> None:
        self.number = number
        self.after = after
        self.quiet_since_s = now_s


class EventLog:
    """The ring.

    Attributes:
        last_number: Of the newest event, 0 before the first.
    """

    def __init__(self) -> None:
        self._kept: deque[EventNote] = deque(maxlen=EVENTS_MAX)
        self.last_number = 0

    def put(self, event: EventNote) -> None:
        """Number an event and keep it; beyond EVENTS_MAX the oldest goes."""
        self.last_number = event.number = self.last_number + 1
        self._kept.append(event)

    def clear(self) -> None:
        """Nobody reads any more."""
        self._kept.clear()

    def has_more(self, reader: EventReader) -> bool:
        """Whether there is something that a reader has not been told."""
        return reader.after < self.last_number

    def next_note(self, reader: EventReader) -> EventNote | None:
        """Return what a reader is told next, None where it knows all; its cursor moves on."""
        if not self.has_more(reader):
            return None
        first = self._kept[0].number
        if reader.after + 1 < first:
            lost = first - 1 - reader.after
            reader.after = first - 1
            return EventNote(
                subscription=reader.number,
                number=reader.after,
                at=self._kept[0].at,
                kind="events_lost",
                lost=lost,
            )
        event = self._kept[reader.after + 1 - first]
        reader.after += 1
        return msgspec.structs.replace(event, subscription=reader.number)

    def is_due(self, reader: EventReader, now_s: float) -> bool:
        """Whether a reader has heard nothing for HEARTBEAT_S, with nothing on its way to it."""
        return not self.has_more(reader) and reader.quiet_since_s + HEARTBEAT_S <= now_s
