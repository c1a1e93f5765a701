"""When each subscription that is quiet is due a heartbeat. No I/O, no clock.

One set for all of them, in ticks of a second: a thousand quiet subscriptions are one wake-up a
second at most, and none at all with no subscription. What is sent costs nothing here: whether a
subscription was quiet is looked at when its tick comes.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from .bounds import HEARTBEAT_S
from .flow import Subscription

Sender = TypeVar("Sender")


class Heartbeats(Generic[Sender]):
    """Every open subscription, with who sends for it."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[Subscription, Sender]] = {}
        self._tick_of: dict[Subscription, int] = {}

    def __len__(self) -> int:
        return len(self._tick_of)

    @property
    def next_s(self) -> float | None:
        """When to look next, on the clock of now_s; None with no subscription."""
        return min(self._ticks, default=None)

    def add(self, subscription: Subscription, sender: Sender, now_s: float) -> None:
        """A subscription was opened."""
        subscription.quiet_since_s = now_s
        self._put(subscription, sender)

    def remove(self, subscription: Subscription) -> None:
        """It is over; one that is not known is passed over."""
        tick = self._tick_of.pop(subscription, None)
        if tick is not None:
            del self._ticks[tick][subscription]
            if not self._ticks[tick]:
                del self._ticks[tick]

    def due(self, now_s: float) -> list[tuple[Subscription, Sender]]:
        """Return those to be sent a heartbeat now: nothing was sent for HEARTBEAT_S.

        It comes up to a second late, never early. What is returned counts as sent to.
        """
        found: list[tuple[Subscription, Sender]] = []
        for tick in sorted(each for each in self._ticks if each <= now_s):
            for subscription, sender in self._ticks.pop(tick).items():
                if subscription.quiet_since_s + HEARTBEAT_S <= now_s:
                    subscription.quiet_since_s = now_s
                    found.append((subscription, sender))
                self._put(subscription, sender)
        return found

    def _put(self, subscription: Subscription, sender: Sender) -> None:
        tick = math.ceil(subscription.quiet_since_s + HEARTBEAT_S)
        self._ticks.setdefault(tick, {})[subscription] = sender
        self._tick_of[subscription] = tick
