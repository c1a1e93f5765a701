"""Rests: when bulk streams are not read, for how long, and that they always go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import pytest

from runnerd.daemon.resting import REST_S, Rests

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.daemon.poller import Owner, Poller


class Clock:
    """A poller's timers, and a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self._due: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def call_at(self, at_s: float, _owner: object, call: Callable[[], None]) -> None:
        self._due.append((at_s, call))

    def pass_until(self, until_s: float) -> None:
        while self._due:
            at_s, call = self._due[0]
            if at_s > until_s:
                break
            del self._due[0]
            self.now_s = max(self.now_s, at_s)
            call()
        self.now_s = max(self.now_s, until_s)


class Flood:
    """A bulk stream that is read whenever it may be, and how long it rested in all."""

    def __init__(self, rests: Rests, clock: Clock) -> None:
        self._rests = rests
        self._clock = clock
        self._rests_since_s: float | None = None
        self.rested_s = 0.0
        self.resumed = 0

    @property
    def is_resting(self) -> bool:
        return self._rests_since_s is not None

    def turn(self) -> None:
        if self._rests_since_s is None and self._rests.is_on(self._clock.now_s):
            self._rests_since_s = self._clock.now_s
            self._rests.rest(self._clock.now_s, self._resume)

    def _resume(self) -> None:
        assert self._rests_since_s is not None
        self.rested_s += self._clock.now_s - self._rests_since_s
        self._rests_since_s = None
        self.resumed += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def rests(clock: Clock) -> Rests:
    return Rests(cast("Poller", clock), cast("Owner", None))


def test_nobody_rests_while_nothing_starts(rests: Rests, clock: Clock) -> None:
    flood = Flood(rests, clock)
    flood.turn()
    assert not flood.is_resting


def test_a_flood_rests_while_a_command_starts_and_then_goes_on(rests: Rests, clock: Clock) -> None:
    flood = Flood(rests, clock)
    rests.begin(clock.now_s)
    flood.turn()
    assert flood.is_resting
    clock.pass_until(clock.now_s + REST_S + 1e-9)
    assert not flood.is_resting
    assert flood.rested_s == pytest.approx(REST_S)
    flood.turn()
    assert not flood.is_resting


def test_a_further_step_of_the_start_makes_the_rest_longer(rests: Rests, clock: Clock) -> None:
    flood = Flood(rests, clock)
    rests.begin(clock.now_s)
    flood.turn()
    clock.pass_until(clock.now_s + REST_S / 2)
    rests.begin(clock.now_s)
    clock.pass_until(clock.now_s + REST_S * 0.9)
    assert flood.is_resting
    clock.pass_until(clock.now_s + REST_S)
    assert flood.rested_s == pytest.approx(1.5 * REST_S)


def test_nobody_goes_to_rest_once_the_command_has_exited(rests: Rests, clock: Clock) -> None:
    flood = Flood(rests, clock)
    rests.over(rests.begin(clock.now_s))
    flood.turn()
    assert not flood.is_resting


def test_an_exit_does_not_end_the_rest_that_a_later_start_asked_for(
    rests: Rests, clock: Clock
) -> None:
    flood = Flood(rests, clock)
    first = rests.begin(clock.now_s)
    clock.pass_until(clock.now_s + REST_S / 2)
    rests.begin(clock.now_s)
    rests.over(first)
    flood.turn()
    assert flood.is_resting


def test_every_flood_goes_on(rests: Rests, clock: Clock) -> None:
    floods = [Flood(rests, clock) for _ in range(3)]
    rests.begin(clock.now_s)
    for flood in floods:
        flood.turn()
    clock.pass_until(clock.now_s + 1)
    assert [flood.resumed for flood in floods] == [1, 1, 1]


def test_a_flood_has_a_quarter_of_the_time_however_many_commands_start(
    rests: Rests, clock: Clock
) -> None:
    flood = Flood(rests, clock)
    began_s = clock.now_s
    while clock.now_s < began_s + 10:
        rests.begin(clock.now_s)
        flood.turn()
        clock.pass_until(clock.now_s + 0.0005)
    assert 0.70 <= flood.rested_s / 10 <= 0.76
