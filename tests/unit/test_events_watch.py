"""Nothing is looked at, made or kept for events once nobody watches them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerd.daemon.events import Events
from runnerd.daemon.memory import Cgroup
from runnerd.daemon.poller import Poller
from runnerd.daemon.pressure import PressureFile

if TYPE_CHECKING:
    from runnerd.protocol.events import EventNote


class Reader:
    """What of an Outgoing events need."""

    def __init__(self) -> None:
        self.woken = 0

    def wake_events(self) -> None:
        self.woken += 1

    def stray(self, error: Exception) -> None:
        raise error


def test_the_first_begins_it_and_the_last_ends_it() -> None:
    kills = [5]
    poller, peer = Poller(), Reader()
    nowhere = PressureFile(Cgroup(None, None), system=Path("/nonexistent"))
    events = Events(poller, peer, lambda: kills[0], nowhere)
    outgoing: Any = peer

    def told(reader: Any) -> list[EventNote]:
        found = []
        while (note := events.log.next_note(reader)) is not None:
            found.append(note)
        return found

    events.put("draining")
    kills[0] = 7  # before anybody asked: no news to who comes later
    events.look_for_kills()
    assert (events.is_watched, events.log.last_number) == (False, 0)
    first = events.add(1, outgoing)
    second = events.add(2, outgoing)
    assert events.answer(first, "serving").pressure is None
    assert len(poller._timers) == 1
    kills[0] = 9
    events.look_for_kills()
    events.look_for_kills()
    for reader in (first, second):
        assert [(note.kind, note.kills) for note in told(reader)] == [("oom_kill", 2)]
    assert peer.woken == 2
    events.remove(first)
    events.remove(first)  # once more changes nothing
    assert events.is_watched
    events.remove(second)
    assert not events.is_watched
    assert poller._next_deadline() == math.inf
    events.put("draining")
    assert (events.log.last_number, peer.woken) == (1, 2)
