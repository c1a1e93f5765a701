"""Who reads one exec's output, and what their progress means for its pipes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from runnerd.core.execs import Exec
from runnerd.core.flow import Subscription

from .poller import Owner, Poller
from .timers import Timers


class Subscriber(Protocol):
    """A connection, as an exec sees it."""

    def wake(self, subscription: Subscription) -> None:
        """Something may be there to be sent."""

    def superseded(self, subscription: Subscription, generation: int | None) -> None:
        """A newer attach of the same name took its place; it is over."""

    def look(self) -> None:
        """A command waits for it: see what its peer has read of what was written."""

    @property
    def is_leaving(self) -> bool:
        """Whether its peer has gone, noticed or not."""


class Readers:
    """The subscriptions of one exec.

    Args:
        its_exec: Whose transcript they read and whose gate they move.
        poller: For the time a lost reader is waited for.
        owner: Who is told of a failure.
        tail_bytes: Says what the exec's tail may cost now.
        on_progress: Called when the pipes may be readable again.
        on_count: Called with how many there are, when that has changed.
    """

    def __init__(
        self,
        its_exec: Exec,
        poller: Poller,
        owner: Owner,
        *,
        tail_bytes: Callable[[], int],
        on_progress: Callable[[], None],
        on_count: Callable[[int], None],
    ) -> None:
        self._exec = its_exec
        self._timers = Timers(poller, owner)
        self._tail_bytes = tail_bytes
        self._on_progress = on_progress
        self._on_count = on_count
        self._subscribers: dict[Subscription, Subscriber] = {}

    def __len__(self) -> int:
        return len(self._subscribers)

    def add(
        self, subscription: Subscription, subscriber: Subscriber, generation: int | None
    ) -> None:
        """Add a reader; the first one of a blocking exec is the one it waits for.

        Args:
            subscription: The reader.
            subscriber: Who sends to it.
            generation: Of its name; it was checked with Names.check.
        """
        gate = self._exec.gate
        holder = gate.holder
        older = self._exec.names.take(subscription, generation)
        if holder is not None and (holder is older or self._subscribers[holder].is_leaving):
            # Its connection's end is a few turns of the loop away; whoever comes back at once
            # must not find the place taken.
            gate.lost(holder, time.monotonic())
        self._subscribers[subscription] = subscriber
        self._on_count(len(self._subscribers))
        gate.taken_by(subscription)
        self.hold_changed()
        if older is not None:
            self._subscribers.pop(older).superseded(older, generation)
        subscriber.wake(subscription)

    def remove(self, subscription: Subscription, *, lost: bool) -> None:
        """Take a reader away: its connection was lost, or it detached."""
        if self._subscribers.pop(subscription, None) is None:
            return
        self._exec.names.release(subscription)
        self._on_count(len(self._subscribers))
        if lost:
            self._exec.gate.lost(subscription, time.monotonic())
        else:
            self._exec.gate.left(subscription)
        self.hold_changed()
        self.advanced()

    def advanced(self) -> bool:
        """A reader took something: say whether the pipes may be read, and go on if so."""
        may_read = self._exec.gate.may_read(self._exec.transcript, self._tail_bytes())
        self._on_progress()
        return may_read

    def look(self) -> None:
        """The command waits: see whether its reader has taken more than is known.

        What had not been read when it was written fitted the tail then, so nobody has looked since;
        it may be too much now that tails have shrunk.
        """
        holder = self._exec.gate.holder
        if holder is not None and holder.counts_arrivals:
            self._subscribers[holder].look()

    def wake(self) -> None:
        """Tell every reader that there may be something."""
        for subscription, subscriber in list(self._subscribers.items()):
            subscriber.wake(subscription)

    def hold_changed(self) -> None:
        """Wait for a lost reader as long as the gate says, and no longer."""
        until_s = self._exec.gate.held_until_s
        if until_s is None:
            self._timers.cancel("hold")
        else:
            self._timers.arm("hold", until_s, self._hold_over)

    def end_hold(self) -> None:
        """Wait for a lost reader no longer: nobody can come back to what is forgotten."""
        if self._exec.gate.held_until_s is not None:
            self._timers.cancel("hold")
            self._hold_over()

    def _hold_over(self) -> None:
        self._exec.gate.open_for_good()
        self.advanced()
