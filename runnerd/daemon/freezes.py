"""Notice that everything stood still, and give running clocks the time back.

A paused container, a stopped daemon and a suspended virtual machine look alike from inside: the
loop had no turn for long. While any clock runs, the loop has a turn at least every two seconds, so
a gap of more than five was no sleep of its own. The whole gap is added to every running clock,
which is at most those two seconds too much: a command may have a little more time for a freeze,
never less than it was promised. Nothing wakes while no clock runs.

A suspended machine whose kernel knows of it needs none of this: CLOCK_MONOTONIC stands still
then, and that is the clock everything here goes by (never CLOCK_BOOTTIME, which goes on).

The wait for a lost reader (hold_s), the waits of requests and the drain are not put off: they
measure somebody else's patience, who was not frozen.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from .counters import Counters
from .log import Log
from .poller import Owner, Poller, Timer

GAP_S: Final = 5.0
PULSE_S: Final = 2.0


class Frozen(Protocol):
    """Who counts time."""

    def frozen(self, since_s: float, now_s: float) -> None:
        """Everything stood still between these monotonic times."""


class Freezes:
    """The gaps in the loop's turns while anybody counts time.

    Args:
        poller: Whose turns.
        owner: Who is told of a failure.
        log: A line for each freeze.
        counters: Counts them.
    """

    def __init__(self, poller: Poller, owner: Owner, log: Log, counters: Counters) -> None:
        self._poller = poller
        self._owner = owner
        self._log = log
        self._counters = counters
        self._counting: dict[Frozen, None] = {}
        self._turn_s = 0.0
        self._pulse: Timer | None = None
        poller.before_timers = self._turn

    def add(self, counting: Frozen) -> None:
        """Tell it of freezes from now on."""
        if self._pulse is None:
            self._turn_s = time.monotonic()
            self._arm()
        self._counting[counting] = None

    def discard(self, counting: Frozen) -> None:
        """Tell it no more."""
        self._counting.pop(counting, None)
        if not self._counting and self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None

    def _arm(self) -> None:
        self._pulse = self._poller.call_at(time.monotonic() + PULSE_S, self._owner, self._arm)

    def _turn(self, now_s: float) -> None:
        since_s, self._turn_s = self._turn_s, now_s
        if self._pulse is None or now_s - since_s <= GAP_S:
            return
        self._counters.freezes += 1
        self._counters.frozen_s += now_s - since_s
        self._log.warning("frozen", gap_s=round(now_s - since_s, 3), execs=len(self._counting))
        for each in list(self._counting):
            each.frozen(since_s, now_s)
