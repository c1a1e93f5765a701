"""Every reader of events hears all from its first on, in order, or how many it did not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.bounds import EVENTS_MAX, HEARTBEAT_S
from runnerd.core.events import EventLog, EventReader
from runnerd.core.stalling import PressureLevel
from runnerd.protocol.events import EventNote
from tests.unit.core_parts import NOW_S


def put(log: EventLog, count: int = 1) -> None:
    for _ in range(count):
        log.put(EventNote(subscription=0, number=0, at=1.0, kind="draining"))


def take(log: EventLog, reader: EventReader, most: int) -> list[EventNote]:
    found: list[EventNote] = []
    while len(found) < most and (note := log.next_note(reader)) is not None:
        found.append(note)
    return found


def test_a_reader_hears_from_its_first_event_on_and_no_earlier_one() -> None:
    log = EventLog()
    early = EventReader(7, log.last_number, NOW_S)
    put(log, 2)
    late = EventReader(9, log.last_number, NOW_S)
    assert not log.has_more(late)
    put(log)
    assert [(note.subscription, note.number) for note in take(log, early, 9)] == [
        (7, 1), (7, 2), (7, 3),
    ]  # fmt: skip
    assert [(note.subscription, note.number) for note in take(log, late, 9)] == [(9, 3)]
    assert log.next_note(early) is None


def test_a_reader_that_does_not_read_is_told_how_many_it_lost_and_goes_on() -> None:
    log = EventLog()
    reader = EventReader(1, 0, NOW_S)
    put(log, EVENTS_MAX)
    assert take(log, reader, 1)[0].kind == "draining"  # the bound itself loses nothing
    put(log, 10)
    lost, following = take(log, reader, 2)
    assert (lost.kind, lost.lost, lost.number) == ("events_lost", 9, 10)
    assert (following.kind, following.number) == ("draining", 11)


@given(
    steps=st.lists(
        st.one_of(st.tuples(st.just("put"), st.integers(1, 2 * EVENTS_MAX)),
                  st.tuples(st.integers(0, 2), st.integers(1, EVENTS_MAX))),
        max_size=25,
    )
)  # fmt: skip
def test_what_is_told_and_what_is_counted_as_lost_is_all_there_was(
    steps: list[tuple[str | int, int]],
) -> None:
    log = EventLog()
    readers = [EventReader(number, 0, NOW_S) for number in range(3)]
    heard = [0, 0, 0]

    def hear(at: int, most: int) -> None:
        for note in take(log, readers[at], most):
            heard[at] += note.lost if note.lost is not None else 1
            assert note.number == heard[at]

    for what, count in steps:
        if isinstance(what, int):
            hear(what, count)
        else:
            put(log, count)
    for at in range(3):
        hear(at, 1 << 30)
    assert heard == [log.last_number] * 3


def test_a_heartbeat_is_for_who_knows_all_and_has_heard_nothing() -> None:
    log = EventLog()
    reader = EventReader(1, 0, NOW_S)
    assert not log.is_due(reader, NOW_S + HEARTBEAT_S - 0.1)
    assert log.is_due(reader, NOW_S + HEARTBEAT_S)
    put(log)
    assert not log.is_due(reader, NOW_S + HEARTBEAT_S)  # that event is the sign of life


def test_pressure_at_the_edge_is_one_event() -> None:
    level = PressureLevel()
    readings = (9.9, 10.0, 90.0, 9.0, 5.0, 11.0, 4.9, 0.0)
    changed = [(each, level.level) for each in readings if level.take(each)]
    assert changed == [(10.0, "high"), (4.9, "normal")]
