"""Which execs there are, and who may start another. No I/O, no clock.

Rule 1: a start never adopts. An id that is live or kept is refused, whatever its content.
Rule 2: the registry is asked before any admission; admission before anything is made.
Rule 3: a live exec is never dropped. Finished ones go by count, by age and by bytes, the oldest
first; a dropped one keeps nothing but the fact that it was.
Rule 4: a cancel of an id never seen leaves a tombstone, and the start that meets it is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart

from .bounds import TOMBSTONE_S, TOMBSTONES_MAX, Bounds
from .execs import Exec
from .spool import Slots
from .transcript import TailBudget

_RETRY_S = 1.0


class Registry:
    """All execs of one incarnation, in order of acceptance.

    Args:
        bounds: The limits in force.
        slots: Where transcripts' blocks lie on disk, None where there is no spool.

    Attributes:
        starts: Starts accepted so far.
        state: serving, draining or stopping; only serving admits a start.
        budget: What all transcripts may cost together.
    """

    def __init__(self, bounds: Bounds, slots: Slots | None = None) -> None:
        self._bounds = bounds
        self._execs: OrderedDict[str, Exec] = OrderedDict()
        self._live: dict[str, Exec] = {}
        self._finished: OrderedDict[str, Exec] = OrderedDict()
        self._tombstones: OrderedDict[str, float] = OrderedDict()
        self._dropped: list[str] = []
        self.budget = TailBudget(bounds, slots)
        self.starts = 0
        self.state: Literal["serving", "draining", "stopping"] = "serving"

    @property
    def live_count(self) -> int:
        """How many execs are not closed, starting ones included."""
        return len(self._live)

    def get(self, exec_id: str) -> Exec:
        """Return an exec that is live or kept.

        Raises:
            RequestError: exec_unknown.
        """
        found = self._execs.get(exec_id)
        if found is None:
            raise RequestError("exec_unknown", f"there is no exec '{exec_id}'")
        return found

    def live(self) -> list[Exec]:
        """Return every live exec, oldest first."""
        return list(self._live.values())

    def accept(
        self,
        exec_id: str,
        params: ExecStart,
        *,
        cwd: str,
        now_s: float,
        wall_s: float,
        oom_kills: int | None,
    ) -> Exec:
        """Take a start, or refuse it with nothing changed.

        Raises:
            RequestError: exec_exists, cancelled, stopping, draining or busy.
        """
        self._refuse_known(exec_id, now_s)
        self._admit(exec_id)
        self.starts += 1
        accepted = Exec(
            exec_id,
            self.starts,
            params,
            cwd=cwd,
            now_s=now_s,
            wall_s=wall_s,
            budget=self.budget,
            oom_kills=oom_kills,
            alone=not self._live,
        )
        self._execs[exec_id] = self._live[exec_id] = accepted
        return accepted

    def _refuse_known(self, exec_id: str, now_s: float) -> None:
        known = self._execs.get(exec_id)
        if known is not None:
            state = "live" if known.is_live else "finished"
            raise RequestError(
                "exec_exists", f"exec '{exec_id}' exists and is {state}", state=state
            )
        if self._tombstones.get(exec_id, 0.0) > now_s:
            raise RequestError("cancelled", f"exec '{exec_id}' was cancelled before its start")

    def _admit(self, exec_id: str) -> None:
        if self.state == "stopping":
            raise RequestError("stopping", f"the daemon is stopping; '{exec_id}' was not started")
        if self.state == "draining":
            raise RequestError("draining", f"the daemon is draining; '{exec_id}' was not started")
        if self.live_count >= self._bounds.live_execs_max:
            raise RequestError(
                "busy",
                f"{self.live_count} execs are live; the most is {self._bounds.live_execs_max}",
                retry_after_s=_RETRY_S,
            )
        if self.budget.used_bytes > 2 * self._bounds.transcript_total_bytes_max:
            self.budget.relieve()  # readers may have let go since anything was written
        if self.budget.used_bytes > 2 * self._bounds.transcript_total_bytes_max:
            raise RequestError(
                "busy",
                f"{self.budget.used_bytes} bytes of output wait for readers that do not read",
                retry_after_s=_RETRY_S,
            )

    def failed(self, failed: Exec) -> None:
        """Undo the acceptance of a start that failed: its id is free again."""
        del self._execs[failed.exec_id], self._live[failed.exec_id]

    def closed(self, closed: Exec, now_s: float) -> None:
        """Nothing of an exec is left: keep its record as long as there is room."""
        del self._live[closed.exec_id]
        self._finished[closed.exec_id] = closed
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Drop finished execs beyond the count or age, and tombstones past their time."""
        while self._finished:
            oldest = next(iter(self._finished.values()))
            assert oldest.closed_s is not None
            too_many = len(self._finished) > self._bounds.finished_execs_max
            if not too_many and oldest.closed_s + self._bounds.finished_s_max > now_s:
                break
            self.budget.remove(oldest.transcript)
            del self._finished[oldest.exec_id], self._execs[oldest.exec_id]
            self._dropped.append(oldest.exec_id)
        while self._tombstones:
            exec_id, until_s = next(iter(self._tombstones.items()))
            if until_s > now_s and len(self._tombstones) <= TOMBSTONES_MAX:
                break
            del self._tombstones[exec_id]

    def take_dropped(self) -> list[str]:
        """Return the ids dropped since the last call: the edges let go of them too."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def bury(self, exec_id: str, now_s: float) -> None:
        """Leave a tombstone for an id never seen."""
        self._tombstones.pop(exec_id, None)
        self._tombstones[exec_id] = now_s + TOMBSTONE_S
        self.expire(now_s)

    def page(
        self,
        cursor: int | None,
        limit: int,
        *,
        states: frozenset[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[list[Exec], int | None]:
        """Return execs in order of acceptance, and where the next page begins.

        Args:
            cursor: Only execs accepted after this number.
            limit: The most to return.
            states: Only those in one of these states, in the protocol's words.
            labels: Only those that carry all of these.
        """
        found: list[Exec] = []
        for each in self._execs.values():
            if each.number <= (cursor or 0):
                continue
            if states is not None and each.state.shown not in states:
                continue
            if any(each.labels.get(key) != value for key, value in (labels or {}).items()):
                continue
            if len(found) == limit:
                return found, found[-1].number
            found.append(each)
        return found, None
