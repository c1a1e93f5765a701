"""Floods rest for a moment while a command starts.

A command that writes without end keeps one processor busy and its reading another. What starts
beside it then waits for a processor at each step: the journal's thread, the shim, the command
itself; on two processors the slowest of a hundred starts took four times as long. So a bulk stream
is not read from the acceptance of a start until that command's exit, for 3 ms at each of its steps
at most. Its pipe fills, its writer sleeps, and both processors are free.

No command waits for a reader by this, nor for long: floods have a quarter of the time whatever
starts, and all of it while nothing does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .effects import each_of

if TYPE_CHECKING:
    from .poller import Owner, Poller

REST_S: Final = 0.003
_SHARE: Final = 0.75  # of the time that may be rested
_CREDIT_MAX_S: Final = 0.03  # what may be rested without a pause, when there was none for long


class Rests:
    """Says when floods rest, and wakes them.

    Args:
        poller: For the end of a rest.
        owner: Who is told of a failure.
    """

    def __init__(self, poller: Poller, owner: Owner) -> None:
        self._poller = poller
        self._owner = owner
        self._until_s = 0.0
        self._credit_s = _CREDIT_MAX_S
        self._settled_s = 0.0
        self._resting: list[Callable[[], None]] = []
        self._is_armed = False

    def begin(self, now_s: float) -> float:
        """Let floods rest for a start's next step; returns what `over` wants to know."""
        self._settle(now_s)
        if self._credit_s > 0:
            self._until_s = now_s + REST_S
        return self._until_s

    def over(self, until_s: float) -> None:
        """That start is through; where no later one has begun, nobody else goes to rest.

        Those at rest stay for what is left of their time: who asked has yet to hear of the exit.
        """
        if until_s == self._until_s:
            self._until_s = 0.0

    def is_on(self, now_s: float) -> bool:
        """Whether a bulk stream is to rest now."""
        return now_s < self._until_s

    def rest(self, now_s: float, resume: Callable[[], None]) -> None:
        """Take a flood to rest; `resume` is called at its end, which is soon."""
        self._settle(now_s)
        self._resting.append(resume)
        if not self._is_armed:
            self._arm()

    def _arm(self) -> None:
        self._is_armed = True
        self._poller.call_at(self._until_s, self._owner, self._check)

    def _check(self) -> None:
        now_s = time.monotonic()
        if self.is_on(now_s):
            self._arm()  # another start has begun meanwhile
            return
        self._is_armed = False
        self._settle(now_s)
        resting, self._resting = self._resting, []
        each_of(*resting)

    def _settle(self, now_s: float) -> None:
        passed_s, self._settled_s = now_s - self._settled_s, now_s
        rested_s = passed_s if self._resting else 0.0
        self._credit_s = min(_CREDIT_MAX_S, self._credit_s + passed_s * _SHARE - rested_s)
