"""The clocks of one exec at work: a timer for whatever is next, looks, and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from runnerd.core.clocks import Clocks
from runnerd.protocol.exits import Reason

from .freezes import Freezes
from .poller import Owner, Poller
from .timers import Timers


class ClockWatch:
    """Runs an exec's clocks from execve to the command's exit.

    Args:
        clocks: What they say.
        poller: Calls at their times.
        owner: Who is told of a failure.
        freezes: Tells of time that nobody had.
        look: Returns the tree's CPU seconds, None where it cannot be seen.
        end: Ends the exec.
    """

    def __init__(
        self,
        clocks: Clocks,
        poller: Poller,
        owner: Owner,
        freezes: Freezes,
        look: Callable[[], float | None],
        end: Callable[[Reason], None],
    ) -> None:
        self._clocks = clocks
        self._timers = Timers(poller, owner)
        self._freezes = freezes
        self._look = look
        self._end = end

    def start(self) -> None:
        """The command runs."""
        self._freezes.add(self)
        self._changed()

    def stop(self) -> None:
        """The command has exited, or is being ended."""
        self._clocks.ended()
        self._freezes.discard(self)
        self._timers.cancel_all()

    def output_read(self) -> None:
        """It has written something."""
        if self._clocks.output(time.monotonic()):
            self._changed()

    def readers_counted(self, count: int) -> None:
        """So many are attached; the first may be before the command runs, its start's own."""
        self._clocks.attached(count, time.monotonic())
        self._changed()

    def frozen(self, since_s: float, now_s: float) -> None:
        """Everything stood still between these times."""
        self._clocks.frozen(since_s, now_s)
        self._changed()

    def _changed(self) -> None:
        # What is next may be nearer or further than it was; once all have ended, nothing is.
        if self._clocks.next_s < math.inf:
            self._timers.arm("next", self._clocks.next_s, self._due)
        else:
            self._timers.cancel("next")

    def _due(self) -> None:
        now_s = time.monotonic()
        what = self._clocks.due(now_s)
        if what is None:
            self._changed()
        elif what != "look":
            self._end_by(what)
        elif self._clocks.looked(self._look(), now_s):
            self._end_by("stalled")
        else:
            self._changed()

    def _end_by(self, reason: Reason) -> None:
        # One end is all a clock has to ask for: the grace and the KILL after it are the shim's.
        self.stop()
        self._end(reason)
