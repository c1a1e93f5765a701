"""The clocks of one exec: when it is ended though nobody asked. No I/O, no clock.

deadline  its time is over, counted from execve.
orphan    nobody has been attached for so long: since execve, or since the last one left.
stall     no output on any stream, and the tree used under 1 % of one CPU, over a whole window.

None runs unless asked for. All end with the command: what it leaves running is not chased by
them. The stall clock looks at the tree's CPU time (a look costs a walk of the tree) only after a
silence: once a tenth of the window has been silent, and again at a whole window after that look.
So a command that only printed is ended 1.0 to 1.1 windows after its last byte, one that only
computed at most 2 windows after it stopped to. One that is stopped (SIGSTOP) does neither, and
stalls.

Time in which everything stood still (a paused container, a suspended machine) is no time that the
command had: it is added to every running clock, once.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

Due = Literal["deadline", "orphaned", "look"]

BUSY_SHARE: Final = 0.01
_FIRST_LOOK: Final = 0.1  # of the window, silent, before its beginning is looked at


class Look(NamedTuple):
    """The tree's CPU seconds at some time."""

    at_s: float
    cpu_s: float


class Clocks:
    """The clocks of one exec.

    Args:
        deadline_s: Seconds from execve to the end, or None.
        orphan_ttl_s: Seconds without anybody attached, or None.
        stall_s: The window of silence in seconds, or None.
    """

    def __init__(
        self, deadline_s: float | None, orphan_ttl_s: float | None, stall_s: float | None
    ) -> None:
        self._deadline_s = deadline_s
        self._orphan_ttl_s = orphan_ttl_s
        self._stall_s = stall_s
        self._is_running = False
        self._deadline_at_s = math.inf
        self._attached = 0
        self._alone_since_s = math.inf
        self._sign_of_life_s = math.inf
        self._base: Look | None = None

    @property
    def is_any(self) -> bool:
        """Whether any was asked for."""
        return not (self._deadline_s is self._orphan_ttl_s is self._stall_s is None)

    def started(self, at_s: float) -> None:
        """Execve succeeded: all begin. A tree that new has used no CPU time yet."""
        self._is_running = True
        if self._deadline_s is not None:
            self._deadline_at_s = at_s + self._deadline_s
        self._alone_since_s = math.inf if self._attached else at_s
        self._sign_of_life_s = at_s
        self._base = Look(at_s, 0.0)

    def ended(self) -> None:
        """The command has exited: none runs any more."""
        self._is_running = False

    def attached(self, count: int, now_s: float) -> None:
        """So many are attached from now on; the orphan clock runs only while nobody is."""
        if not count:
            self._alone_since_s = now_s
        self._attached = count

    def output(self, now_s: float) -> bool:
        """Something was read from one of its streams; returns whether next_s came nearer.

        It does once in a silence, so that a command that prints all the time moves no timer.
        """
        self._sign_of_life_s = now_s
        if self._base is None:
            return False
        self._base = None
        return self._stall_s is not None

    def looked(self, cpu_s: float | None, now_s: float) -> bool:
        """Take what a look found; returns whether the command has stalled.

        Args:
            cpu_s: CPU seconds of the tree, those of its dead that were waited for included; None
                where nothing could be seen, which proves nothing.
            now_s: Monotonic.
        """
        base, self._base = self._base, None
        self._sign_of_life_s = now_s
        if cpu_s is None or self._stall_s is None:
            return False
        self._base = Look(now_s, cpu_s)
        if base is None or now_s < base.at_s + self._stall_s:
            return False
        # Less than before: processes have ended without being waited for, which is life as well.
        return 0 <= cpu_s - base.cpu_s < BUSY_SHARE * (now_s - base.at_s)

    def frozen(self, since_s: float, now_s: float) -> None:
        """Everything stood still between these times; what began to count within is moved less."""
        if self._deadline_s is not None:
            began_s = self._deadline_at_s - self._deadline_s
            self._deadline_at_s += max(0.0, now_s - max(since_s, began_s))
        self._alone_since_s = _moved(self._alone_since_s, since_s, now_s)
        self._sign_of_life_s = _moved(self._sign_of_life_s, since_s, now_s)
        if self._base is not None:
            self._base = self._base._replace(at_s=_moved(self._base.at_s, since_s, now_s))

    @property
    def next_s(self) -> float:
        """When due() has to be asked next; infinity where nothing runs."""
        return min(at_s for _, at_s in self._ends()) if self._is_running else math.inf

    def due(self, now_s: float) -> Due | None:
        """Return what is due: an end with its reason, or a look at the tree's CPU time."""
        if self._is_running:
            for what, at_s in self._ends():
                if at_s <= now_s:
                    return what
        return None

    def _ends(self) -> tuple[tuple[Due, float], ...]:
        """Each clock and when it ends; where several are due, the first of these is the reason."""
        return (
            ("deadline", self._deadline_at_s),
            ("orphaned", self._orphan_at_s()),
            ("look", self._look_at_s()),
        )

    def _orphan_at_s(self) -> float:
        if self._orphan_ttl_s is None or self._attached:
            return math.inf
        return self._alone_since_s + self._orphan_ttl_s

    def _look_at_s(self) -> float:
        if self._stall_s is None:
            return math.inf
        if self._base is None:
            return self._sign_of_life_s + _FIRST_LOOK * self._stall_s
        return self._base.at_s + self._stall_s


def _moved(at_s: float, since_s: float, now_s: float) -> float:
    return at_s + now_s - max(since_s, at_s) if at_s <= now_s else at_s
