"""The spool's file, cut into slots of one size: who has which, and who loses some. No I/O.

A slot let go is used again, the lowest first: the file stays as small as it can, a transcript
that goes round in its share overwrites the same pages, and one that is alone has slots that
follow one another, which are written at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Protocol

from .bounds import KIB

SLOT_BYTES: Final = 128 * KIB  # more than a record, which so lies in two at most
SLOTS_MIN: Final = 8  # an exec's share; with less, what is written is dropped before it is read


class Holder(Protocol):
    """A transcript, as the slots see it."""

    @property
    def slot_count(self) -> int:
        """How many slots it has, those on their way included."""

    @property
    def is_finished(self) -> bool:
        """Whether its exec is closed."""

    def drop_oldest(self) -> bool:
        """Let go of its oldest blocks until a slot is free; False where none can be."""

    def drop_blocks(self) -> bool:
        """Let go of all; False where it has nothing or somebody is waited for."""

    def degrade(self, reason: str, *, is_readable: bool) -> None:
        """Give its spool up for good."""


class Slots:
    """Who has which slots, and who loses some where there are no more.

    A live exec may have its full number while few have any; with many, all shrink alike. Closed
    execs' go before any of a live one, the oldest closed first.

    Args:
        count: How many there are.
        each_max: The most one exec may have.

    Attributes:
        freed: Slots let go of in bulk, for the edge to give the space back.
        on_freed: Called when there are some.
    """

    def __init__(self, count: int, each_max: int) -> None:
        self._free = list(range(count))
        self._count = count
        self._each_max = min(each_max, count)
        self._live: dict[Holder, None] = {}
        self._finished: dict[Holder, None] = {}
        self.freed: set[int] = set()
        self.on_freed: Callable[[], None] = lambda: None

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._count - len(self._free)

    @property
    def share(self) -> int:
        """How many a live exec may have now: two at least, one to let go and one to fill."""
        return max(2, min(self._each_max, self._count // max(1, len(self._live))))

    def take(self, holder: Holder) -> int | None:
        """Give a slot to an exec; None if none can be had."""
        (self._finished if holder.is_finished else self._live).setdefault(holder)
        if holder.slot_count >= self.share and not holder.drop_oldest():
            return None
        if not self._free and not self._make_room(holder):
            return None
        slot = heapq.heappop(self._free)
        self.freed.discard(slot)
        return slot

    def _make_room(self, holder: Holder) -> bool:
        for finished in list(self._finished):
            if finished is not holder and finished.drop_blocks():
                return True
        share = self.share
        for live in list(self._live):
            if live is not holder and live.slot_count > share and live.drop_oldest():
                return True
        return holder.drop_oldest()

    def give_back(self, slots: list[int], *, bulk: bool) -> None:
        """Take slots back.

        Args:
            slots: Which.
            bulk: Whether the space they take is not wanted again at once.
        """
        for slot in slots:
            heapq.heappush(self._free, slot)
        if bulk and slots:
            self.freed.update(slots)
            self.on_freed()

    def take_freed(self) -> list[int]:
        """Return the slots whose space can be given back, in order; each once."""
        freed, self.freed = sorted(self.freed), set()
        return freed

    def holders(self) -> list[Holder]:
        """Return everybody who has had a slot and may have some."""
        return [*self._finished, *self._live]

    def finish(self, holder: Holder) -> None:
        """Its exec is closed."""
        if holder in self._live:
            del self._live[holder]
            self._finished[holder] = None

    def remove(self, holder: Holder) -> None:
        """It has no slots any more and wants none."""
        self._live.pop(holder, None)
        self._finished.pop(holder, None)
