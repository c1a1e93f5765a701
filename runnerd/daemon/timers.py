"""The timers of one owner, by name: arming one again replaces it."""

from __future__ import annotations

from collections.abc import Callable

from .poller import Owner, Poller, Timer


class Timers:
    """A few named timers.

    Args:
        poller: Calls them.
        owner: Whom they work for.
    """

    def __init__(self, poller: Poller, owner: Owner) -> None:
        self._poller = poller
        self._owner = owner
        self._armed: dict[str, Timer] = {}

    def arm(self, name: str, at_s: float, call: Callable[[], None]) -> None:
        """Call at a monotonic time; what was armed under that name is not called."""
        self.cancel(name)
        self._armed[name] = self._poller.call_at(at_s, self._owner, call)

    def cancel(self, name: str) -> None:
        """Do not call."""
        timer = self._armed.pop(name, None)
        if timer is not None:
            timer.cancel()

    def cancel_all(self) -> None:
        """Call none of them."""
        for name in list(self._armed):
            self.cancel(name)
