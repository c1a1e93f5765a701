"""The clocks of one exec at work: a timer for whatever is next, looks, and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from runnerd.core.clocks import Clocks
from runnerd.protocol.answers import Reason

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
        """Begin."""
        self._freezes.add(self)
        self.changed()

    def stop(self) -> None:
        """The command has exited."""
        self._clocks.ended()
        self._freezes.discard(self)
        self._timers.cancel_all()

    def changed(self) -> None:
        """What is next may be nearer or further than it was."""
        if self._clocks.next_s < math.inf:
            self._timers.arm("next", self._clocks.next_s, self._due)
        else:
            self._timers.cancel("next")

    def frozen(self, since_s: float, now_s: float) -> None:
        """Everything stood still between these times."""
        self._clocks.frozen(since_s, now_s)
        self.changed()

    def _due(self) -> None:
        now_s = time.monotonic()
        reason = self._reason(now_s)
        if reason is None:
            self.changed()
            return
        # One end is all a clock has to ask for: the grace and the KILL after it are the shim's.
        self.stop()
        self._end(reason)

    def _reason(self, now_s: float) -> Reason | None:
        what = self._clocks.due(now_s)
        if what == "look":
            return "stalled" if self._clocks.looked(self._look(), now_s) else None
        return what
