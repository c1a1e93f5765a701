"""What is past and still answered for, packed, and what has been dropped of it. No I/O.

Rule 1: at most so many, dropped in order of acceptance. What is dropped leaves one number behind,
the highest dropped, so that a late copy of a start whose marker has gone cannot run twice.
Rule 2: a record (with argv, listed) becomes a marker (without) by age, by count or on request; a
marker stays until rule 1 drops it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from .past import PackedPast, Past, pack_past, unpack_past


class Settled:
    """Pasts by id, at most `most`.

    Args:
        most: The most to keep, records included.

    Attributes:
        dropped_number: The highest number of acceptance dropped so far; 0 = none was.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._packed: dict[int, bytes] = {}
        self._numbers: dict[str, int] = {}
        self._heap: list[int] = []  # every number in _packed, once each
        self._records: OrderedDict[int, float] = OrderedDict()  # until when, the oldest ends first
        self.dropped_number = 0

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def record_count(self) -> int:
        """How many still have their argv and are listed."""
        return len(self._records)

    def restore(
        self,
        pasts: Iterable[PackedPast],
        dropped: int,
        *,
        now_s: float,
        wall_s: float,
        keep_s: float,
    ) -> list[int]:
        """Take over what earlier incarnations knew, as it is packed; see Registry.restore.

        Args:
            pasts: In any order; of one id the latest counts.
            dropped: The highest number they dropped.
            now_s: Monotonic.
            wall_s: Unix seconds.
            keep_s: How long a record is kept from the exec's end.

        Returns:
            The numbers dropped.
        """
        self.dropped_number = dropped
        in_order = sorted(pasts, key=lambda past: past.number)
        by_id = {past.exec_id: past for past in in_order}
        gone = [past.number for past in in_order if by_id[past.exec_id] is not past]
        for past in by_id.values():
            gone += self._add(past.number, past.exec_id, past.packed)
        records = [past for past in by_id.values() if past.is_record]
        for past in sorted(records, key=lambda past: (-_age_s(past, wall_s), past.number)):
            if past.number in self._packed:
                self._records[past.number] = now_s - _age_s(past, wall_s) + keep_s
        return gone

    @property
    def highest_number(self) -> int:
        """The highest number of acceptance known; 0 = none."""
        return max(self._packed, default=0)

    def packed(self) -> Mapping[int, bytes]:
        """Return every past by number, as pack_past packs it."""
        return self._packed

    def get(self, exec_id: str) -> Past | None:
        """Return what is known of an exec, None where that is nothing."""
        number = self._numbers.get(exec_id)
        return None if number is None else self._unpacked(number)

    def _unpacked(self, number: int) -> Past:
        past = unpack_past(self._packed[number])
        # Nothing is settled with its output; what was packed with it is gone with its daemon.
        if past.transcript in ("kept", "partial"):
            past.transcript = "lost"
        return past

    def add_marker(self, past: Past) -> list[int]:
        """Keep a marker in place of what was kept of the exec; returns the numbers dropped."""
        self._records.pop(past.number, None)
        return self._add(past.number, past.exec_id, pack_past(marker_of(past)))

    def _add(self, number: int, exec_id: str, packed: bytes) -> list[int]:
        if number not in self._packed:
            heapq.heappush(self._heap, number)
        self._packed[number] = packed
        self._numbers[exec_id] = number
        dropped: list[int] = []
        while len(self._packed) > self._most:
            dropped.append(self._drop_first())
        return dropped

    def _drop_first(self) -> int:
        number = heapq.heappop(self._heap)
        exec_id = unpack_past(self._packed.pop(number)).exec_id
        del self._numbers[exec_id]
        self._records.pop(number, None)
        self.dropped_number = max(self.dropped_number, number)
        return number

    def records_over(self, now_s: float, most: int) -> list[Past]:
        """Return the records past their time, and the oldest beyond `most`."""
        over: list[Past] = []
        for at, (number, until_s) in enumerate(self._records.items()):
            if until_s > now_s and len(self._records) - at <= most:
                break
            over.append(self._unpacked(number))
        return over

    def records(self, after: int) -> Iterator[Past]:
        """Return the records accepted after that number, in order of acceptance."""
        numbers = sorted(number for number in self._records if number > after)
        return (self._unpacked(number) for number in numbers)


def marker_of(past: Past) -> Past:
    """Return what stays of it for longest: everything but what only people look at."""
    return msgspec.structs.replace(past, argv=None, cwd=None, user=None, labels=None)


def _age_s(past: PackedPast, wall_s: float) -> float:
    # Of a lost one nobody knows when it ended: at the latest now, when that is found out.
    return 0.0 if past.ended_at is None else max(0.0, wall_s - past.ended_at)
