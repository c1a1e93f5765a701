"""Marks left by cancels that came before their starts. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict

from .bounds import TOMBSTONE_S, TOMBSTONES_MAX


class Tombstones:
    """Each lasts TOMBSTONE_S, and there are at most TOMBSTONES_MAX.

    One bound to a nonce is met by the start with that nonce alone: any other start of the id is
    not what was cancelled, and may run. One that is bound to none is met by every start of the id.
    Beyond the most the oldest goes before its time, and the start it was left for would run: that
    takes more than 4,096 cancels of ids never seen within 15 minutes.
    """

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[str, str | None], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def bury(self, exec_id: str, if_nonce: str | None, now_s: float) -> None:
        """Leave one, or renew it."""
        self._until_s.pop((exec_id, if_nonce), None)
        self._until_s[exec_id, if_nonce] = now_s + TOMBSTONE_S
        self.expire(now_s)

    def meets(self, exec_id: str, nonce: str | None, now_s: float) -> bool:
        """Whether a start of that id, with that nonce or none, meets one."""
        either = (exec_id, None), (exec_id, nonce)
        return any(self._until_s.get(each, 0.0) > now_s for each in either)

    def expire(self, now_s: float) -> None:
        """Take away those past their time, and the oldest beyond the most."""
        while self._until_s:
            oldest, until_s = next(iter(self._until_s.items()))
            if until_s > now_s and len(self._until_s) <= TOMBSTONES_MAX:
                break
            del self._until_s[oldest]
