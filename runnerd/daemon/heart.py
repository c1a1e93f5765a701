"""Heartbeats for subscriptions that are sent nothing: one timer for all of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runnerd.core.flow import Subscription
from runnerd.core.heartbeats import Heartbeats

from .poller import Owner, Poller, Timer

if TYPE_CHECKING:
    from .outgoing import Outgoing


class Heart:
    """The timer, armed only while there are subscriptions.

    Args:
        poller: Calls it.
        owner: Who is told of a failure of its own.
    """

    def __init__(self, poller: Poller, owner: Owner) -> None:
        self._poller = poller
        self._owner = owner
        self._heartbeats: Heartbeats[Outgoing] = Heartbeats()
        self._timer: Timer | None = None

    def add(self, subscription: Subscription, outgoing: Outgoing) -> None:
        """A subscription was opened."""
        self._heartbeats.add(subscription, outgoing, time.monotonic())
        self._arm()

    def remove(self, subscription: Subscription) -> None:
        """It is over."""
        # The timer stays: one wake-up for nothing costs less than arming it for every short exec.
        self._heartbeats.remove(subscription)

    def _arm(self) -> None:
        at_s = self._heartbeats.next_s
        # What is added later is due later, so a timer that is armed is early enough.
        if self._timer is None and at_s is not None:
            self._timer = self._poller.call_at(at_s, self._owner, self._beat)

    def _beat(self) -> None:
        self._timer = None
        try:
            for subscription, outgoing in self._heartbeats.due(time.monotonic()):
                try:
                    outgoing.beat(subscription)
                except Exception as error:  # noqa: BLE001 - that connection's failure alone
                    outgoing.stray(error)
        finally:
            self._arm()
