"""The fence and its durability: a new owner is answered once it can no longer be forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from runnerd.core.bounds import FENCE_WAIT_S
from runnerd.core.fence import Fence

from .journal import Journal
from .poller import Owner, Poller

Told = Callable[[bool], None]


class Fencing:
    """Take the fences of hellos.

    A new one is in force at once, for everybody else; its own connection goes on when it is
    written, or after FENCE_WAIT_S, and is told which.

    Args:
        highest: As an earlier incarnation left it, or None.
        journal: Where it is written.
        poller: For the time that may take.
        owner: Who is told of a failure.
        on_new: Told of each fence that is higher than all before.
    """

    def __init__(
        self,
        highest: int | None,
        *,
        journal: Journal,
        poller: Poller,
        owner: Owner,
        on_new: Callable[[int], None],
    ) -> None:
        self.fence = Fence(highest)
        self._journal = journal
        self._poller = poller
        self._owner = owner
        self._on_new = on_new
        self._waiting: list[Told] | None = None  # for the highest; None = they have been told
        self._unwritten: int | None = None  # the highest, until that is written or the journal off

    def take(self, asked: int | Literal["current"] | None, told: Told) -> int | None:
        """Take a hello's fence; `told` is called with whether the highest is written.

        Returns:
            What the connection holds; see Fence.hold.
        """
        is_new = self.fence.is_new(asked)
        held = self.fence.hold(asked)
        if is_new:
            assert held is not None
            self._on_new(held)
        if is_new and self._journal.exists:
            self._write(told)
        elif self._waiting is not None and held == self.fence.highest:
            self._waiting.append(told)
        else:
            told(self._journal.is_on and self._unwritten is None)
        return held

    def _write(self, told: Told) -> None:
        # Whoever waits for a lower one is told when that is written: before this, and once.
        waiting = self._waiting = [told]

        def written(is_written: bool) -> None:  # noqa: FBT001 - an answer, not a mode
            if self._waiting is waiting:
                self._waiting = None
            calls = waiting[:]
            waiting.clear()
            for call in calls:
                call(is_written)

        timer = self._poller.call_at(
            time.monotonic() + FENCE_WAIT_S, self._owner, lambda: written(False)
        )

        fence = self._unwritten = self.fence.highest
        assert fence is not None

        def done(is_written: bool) -> None:  # noqa: FBT001 - an answer, not a mode
            timer.cancel()
            # If it is not, the journal is off, and on again once all is written, the highest too.
            if self._unwritten == fence:
                self._unwritten = None
            written(is_written)

        self._journal.raise_fence(fence, self._owner, done)
