"""The journal's thread, with a file that does what a test says."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import ClassVar

import pytest

from runnerd.core.past import Past
from runnerd.daemon.fencing import Fencing
from runnerd.daemon.journal import Journal
from runnerd.daemon.log import Log
from runnerd.daemon.poller import Poller
from tests.harness import wait_for

from .test_journal_file import past

Rows = Mapping[int, Past | bytes | None]


class File:
    """Keeps what it is given; fails where it is told to, at the moment it is told to."""

    errors: ClassVar = (OSError,)

    def __init__(self) -> None:
        self.written: list[tuple[list[int], bool]] = []
        self.fences: list[int] = []
        self.fails = False
        self.is_in_write = threading.Event()
        self.may_go_on = threading.Event()

    def write(self, rows: Rows, meta: Mapping[str, int], *, anew: bool) -> None:
        fails = self.fails
        self.is_in_write.set()
        assert self.may_go_on.wait(10)
        if fails:
            raise OSError(28, "No space left on device")
        self.written.append((sorted(rows), anew))
        self.fences += [meta["fence"]] if "fence" in meta else []

    def close(self) -> None:
        pass


class Place:
    """A journal and the loop it works for, turned by hand."""

    def __init__(self) -> None:
        self.file = File()
        self.poller = Poller()
        self.told: dict[int, bool] = {}
        self.defects: list[Exception] = []
        self.everything = {1: past(1), 2: past(2)}
        self.journal = Journal(
            self.file,  # type: ignore[arg-type]  # all of it that is used
            None,
            poller=self.poller,
            log=Log(fd=2, level="error"),
            everything=lambda: self.everything,
            meta=lambda: {"dropped": 0},
            on_defect=self.defects.append,
        )

    def stray(self, error: Exception) -> None:
        self.defects.append(error)

    def begin(self, number: int) -> None:
        def done(is_written: bool) -> None:
            self.told[number] = is_written

        self.journal.begin(past(number), self, done)

    def turn_until(self, what: str) -> None:
        def turned() -> bool:
            self.poller._handle_ready()
            return bool(eval(what, {"place": self}))

        wait_for(turned)

    def turn_until_idle(self) -> None:
        wait_for(lambda: self.journal._began_s is None)
        self.turn_until("place.journal._done.empty()")


def test_after_a_failure_nothing_is_written_but_everything() -> None:
    """What was on its way already would leave a gap behind it that nobody could see."""
    place = Place()
    place.file.fails = True
    place.begin(1)
    assert place.file.is_in_write.wait(10)
    place.begin(2)  # handed over before anyone has heard of the failure
    place.file.fails = False
    place.file.may_go_on.set()
    place.turn_until("len(place.told) == 2")
    assert place.told == {1: False, 2: False}
    assert not place.journal.is_on
    place.journal.note(past(1))
    place.begin(3)
    place.turn_until("3 in place.told")
    assert place.file.written == []
    place.journal._retry()
    place.journal.note(past(4))  # between the two: behind it
    place.turn_until("place.journal.is_on")
    place.turn_until("len(place.file.written) == 2")
    assert place.file.written == [([1, 2], True), ([4], False)]
    assert not place.defects


def test_a_write_that_hangs_is_noticed_though_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    place.journal.notice_hang()
    place.journal.exited(past(1))  # has nobody who is told
    assert place.file.is_in_write.wait(10)
    place.journal.notice_hang()
    assert place.journal.is_on  # it may take its time
    monkeypatch.setattr("runnerd.daemon.journal.HUNG_S", 0.0)
    place.journal.notice_hang()
    assert not place.journal.is_on
    assert place.journal.reason == "the disk hangs"
    place.journal._retry()  # nothing is piled up behind it
    monkeypatch.undo()
    place.file.may_go_on.set()
    place.turn_until("place.file.written == [([1], False)]")
    place.turn_until_idle()
    assert not place.journal.is_on
    place.journal._retry()
    place.turn_until("place.journal.is_on")
    assert place.file.written == [([1], False), ([1, 2], True)]
    assert not place.defects


def test_a_fence_that_comes_while_all_is_written_anew_is_written_behind_it() -> None:
    """It was told that it is not written, and never was, though the journal was on again."""
    place = Place()
    place.journal._failed("planted")
    place.journal._retry()
    assert place.file.is_in_write.wait(10)
    told: list[bool] = []
    fencing = Fencing(
        None, journal=place.journal, poller=place.poller, owner=place, on_new=lambda _fence: None
    )
    fencing.take(5, told.append)
    fencing.take(5, told.append)
    place.turn_until("not place.journal.is_on")
    assert told == []
    place.file.may_go_on.set()
    place.turn_until("place.file.fences == [5]")
    wait_for(lambda: place.poller._handle_ready() or told)
    assert told == [True, True]
    assert not place.defects


def test_what_is_written_anew_and_was_given_up_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was thrown away then is in no later write: there would be a gap in the middle."""
    place = Place()
    place.journal._failed("planted")
    place.journal._retry()
    assert place.file.is_in_write.wait(10)
    monkeypatch.setattr("runnerd.daemon.journal.BEHIND_MAX", 0)
    place.journal.exited(past(3))
    monkeypatch.undo()
    place.file.may_go_on.set()
    place.turn_until("place.file.written == [([1, 2], True)]")
    place.turn_until_idle()
    assert not place.journal.is_on


def test_what_came_meanwhile_is_one_transaction() -> None:
    place = Place()
    place.begin(1)
    assert place.file.is_in_write.wait(10)
    for number in range(2, 30):
        place.begin(number)
    place.journal.exited(past(2))
    place.file.may_go_on.set()
    place.turn_until("len(place.told) == 29")
    assert place.file.written == [([1], False), (list(range(2, 30)), False)]


def test_what_is_not_urgent_goes_along_or_follows_soon() -> None:
    place = Place()
    place.file.may_go_on.set()
    place.journal.note(past(1))
    place.journal.exited(past(2))
    place.turn_until("place.file.written")
    assert place.file.written == [([1, 2], False)]
    place.journal.note(past(3))
    place.turn_until("len(place.file.written) == 2")
    # Nor does a start overtake it: who is told that it is written may rely on what came before.
    place.journal.note(past(4))
    place.journal.dropped([1], 1)
    place.begin(5)
    place.turn_until("place.told == {5: True}")
    place.journal.note(past(6))
    place.journal.finish()
    assert place.journal.wait_finished(10)
    assert place.file.written[1:] == [([3], False), ([1, 4, 5], False), ([6], False)]


def test_at_the_end_a_journal_that_had_failed_is_tried_once_more() -> None:
    place = Place()
    place.file.may_go_on.set()
    place.file.fails = True
    place.begin(1)
    place.turn_until("1 in place.told")
    place.file.fails = False
    place.journal.finish()
    assert place.journal.wait_finished(10)
    assert place.file.written == [([1, 2], True)]
