"""Readers with names: which attach of a name is in force. No I/O.

Rule 1: a name is one reader. An attach of a name that is in use replaces the older subscription,
which is told; most often its connection is dead and nobody has noticed yet.
Rule 2: generations only rise. An attach with a lower generation than the one in force, or with
none where there is one, comes from an older life of that reader, and is refused. An equal one is
the same life coming back.
Rule 3: a generation is remembered after its subscription has gone. At most NAMES_MAX names are
known of one exec; the one idle for longest makes room, never the one the command waits for.
"""

from __future__ import annotations

from typing import NamedTuple

from runnerd.protocol.errors import RequestError

from .bounds import NAMES_MAX
from .flow import Gate, Subscription

_RETRY_S = 1.0


class _Known(NamedTuple):
    generation: int | None
    subscription: Subscription | None


class Names:
    """The names of one exec's readers.

    Args:
        gate: The exec's; the name it waits for is not forgotten.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._known: dict[str, _Known] = {}  # the one unused for longest first

    def check(self, name: str | None, generation: int | None) -> None:
        """Refuse an attach that `take` could not serve; nothing is changed.

        Raises:
            RequestError: superseded where a higher generation is in force; busy where every name
                that may be known is in use.
        """
        if name is None:
            return
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= NAMES_MAX and self._idle_name() is None:
                raise RequestError(
                    "busy",
                    f"{NAMES_MAX} names subscribe to this exec; that is the most",
                    retry_after_s=_RETRY_S,
                )
        elif known.generation is not None and (generation or 0) < known.generation:
            what = "none" if generation is None else str(generation)
            raise RequestError(
                "superseded",
                f"generation {known.generation} of '{name}' is in force; this one is {what}",
                generation=known.generation,
            )

    def in_use(self, name: str | None) -> bool:
        """Whether a subscription of that name is open, which an attach of it would supersede."""
        known = None if name is None else self._known.get(name)
        return known is not None and known.subscription is not None

    def take(self, subscription: Subscription, generation: int | None) -> Subscription | None:
        """Put a subscription in force; `check` has let it pass.

        Returns:
            The one it supersedes, which is over.
        """
        name = subscription.subscriber
        if name is None:
            return None
        older = self._known.pop(name, None)
        if older is None and len(self._known) >= NAMES_MAX:
            idle = self._idle_name()
            assert idle is not None
            del self._known[idle]
        self._known[name] = _Known(generation, subscription)
        if older is None or older.subscription is None:
            return None
        older.subscription.over = True
        return older.subscription

    def release(self, subscription: Subscription) -> None:
        """A subscription has ended: its generation, where it had one, stays known."""
        name = subscription.subscriber
        if name is None:
            return
        known = self._known.get(name)
        if known is None or known.subscription is not subscription:
            return
        del self._known[name]
        if known.generation is not None:
            self._known[name] = known._replace(subscription=None)

    def _idle_name(self) -> str | None:
        for name, known in self._known.items():
            if known.subscription is None and name != self._gate.subscriber:
                return name
        return None
