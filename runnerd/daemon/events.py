"""Who watches events, and what is looked at only while somebody does.

A reader is written to in its turn, as bulk output is: it delays nobody. What its socket does not
take stays in the ring of core/events.py, and is overwritten there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from runnerd.core.events import EventLog, EventReader
from runnerd.core.stalling import PressureLevel
from runnerd.protocol.events import EventNote, EventsAnswer

from .poller import Owner, Poller, Timer
from .pressure import PressureFile

if TYPE_CHECKING:
    from .outgoing import Outgoing

_LOOK_EVERY_S: Final = 2.0  # the kernel reckons its averages anew as often


class Events:
    """All readers of events.

    Args:
        poller: Calls for the next look.
        owner: Who is told of a failure of its own.
        oom_kills: Returns the cgroup's OOM kills so far.
        pressure: Where memory pressure is read.

    Attributes:
        log: What happened lately.
    """

    def __init__(
        self,
        poller: Poller,
        owner: Owner,
        oom_kills: Callable[[], int | None],
        pressure: PressureFile,
    ) -> None:
        self.log = EventLog()
        self._poller = poller
        self._owner = owner
        self._oom_kills = oom_kills
        self._pressure = pressure
        self._readers: dict[EventReader, Outgoing] = {}
        self._timer: Timer | None = None
        self._level = PressureLevel()
        self._kills_seen: int | None = None

    @property
    def is_watched(self) -> bool:
        """Whether anybody would be told: else no event is made."""
        return bool(self._readers)

    def add(self, number: int, outgoing: Outgoing) -> EventReader:
        """Take a reader; it is told what happens from now on."""
        if not self._readers:
            self._begin()
        reader = EventReader(number, self.log.last_number, time.monotonic())
        self._readers[reader] = outgoing
        return reader

    def remove(self, reader: EventReader) -> None:
        """It is told nothing any more."""
        self._readers.pop(reader, None)
        if not self._readers:
            self.log.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def answer(
        self, reader: EventReader, state: Literal["serving", "draining", "stopping"]
    ) -> EventsAnswer:
        """Say where a new reader begins, and how things stand there."""
        return EventsAnswer(
            subscription=reader.number,
            number=reader.after,
            at=time.time(),
            state=state,
            pressure=None if self._pressure.source is None else self._level.level,
            pressure_source=self._pressure.source,
        )

    def put(self, kind: str, **fields: Any) -> None:
        """Tell all readers; `fields` are those of EventNote that are of this kind."""
        if not self._readers:
            return
        self.log.put(EventNote(subscription=0, number=0, at=time.time(), kind=kind, **fields))
        for outgoing in self._readers.values():
            outgoing.wake_events()

    def look_for_kills(self) -> None:
        """Tell of OOM kills since the last look: every 2 s, and before an exit that saw some."""
        if not self._readers:
            return
        kills, seen = self._oom_kills(), self._kills_seen
        self._kills_seen = kills
        if kills is not None and seen is not None and kills > seen:
            self.put("oom_kill", kills=kills - seen)

    def _begin(self) -> None:
        self._kills_seen = self._oom_kills()
        self._level = PressureLevel()
        reading = self._pressure.read()
        if reading is not None:
            self._level.take(reading.some.avg10_percent)  # said in the answer
        self._arm()

    def _arm(self) -> None:
        at_s = time.monotonic() + _LOOK_EVERY_S
        self._timer = self._poller.call_at(at_s, self._owner, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._readers:
            return
        self._arm()
        self.look_for_kills()
        self._look_at_pressure()
        now_s = time.monotonic()
        for reader, outgoing in list(self._readers.items()):
            if self.log.is_due(reader, now_s):
                reader.quiet_since_s = now_s
                outgoing.beat_events(reader)

    def _look_at_pressure(self) -> None:
        reading = self._pressure.read()
        if reading is not None and self._level.take(reading.some.avg10_percent):
            self.put(
                "memory_pressure",
                level=self._level.level,
                some_percent=reading.some.avg10_percent,
                full_percent=None if reading.full is None else reading.full.avg10_percent,
                source=self._pressure.source,
            )
