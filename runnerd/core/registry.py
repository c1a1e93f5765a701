"""Which execs there are and were, and who may start another. No I/O, no clock.

Rule 1: a start never adopts. An id that is live, kept or settled is refused, or it is the same
start again (id, nonce and content) and gets the first answer again.
Rule 2: the registry is asked before any admission; admission before anything is made.
Rule 3: a live exec is never dropped. Finished ones go by count, by age and by bytes, the oldest
first; what is left of one is a settled marker, which knows whose start it was and how it ended.
Rule 4: a marker goes in order of acceptance, and a start whose sender knew less than what has gone
is refused: it may have run.
Rule 5: a cancel of an id never seen leaves a tombstone, and the start that meets it is refused.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from runnerd.protocol.answers import TranscriptState
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart

from .admission import RETRY_S, MemoryUse, check_memory
from .bounds import Bounds
from .budget import TailBudget
from .digest import Content
from .execs import Exec
from .past import PackedPast, Past
from .remembered import same_start
from .settled import Settled, marker_of
from .slots import Slots
from .tombstones import Tombstones


class Registry:
    """All execs of one incarnation in order of acceptance, and what is known of earlier ones.

    Args:
        bounds: The limits in force.
        incarnation: This daemon start.
        slots: Where transcripts' blocks lie on disk, None where there is no spool.

    Attributes:
        starts: Starts accepted so far, by earlier incarnations too where they are known.
        state: serving, draining or stopping; only serving admits a start.
        budget: What all transcripts may cost together.
    """

    def __init__(self, bounds: Bounds, incarnation: str = "", slots: Slots | None = None) -> None:
        self._bounds = bounds
        self._incarnation = incarnation
        self._execs: OrderedDict[str, Exec] = OrderedDict()
        self._live: dict[str, Exec] = {}
        self._finished: OrderedDict[str, Exec] = OrderedDict()
        self._settled = Settled(bounds.settled_execs_max)
        self._tombstones = Tombstones()
        self._newly_settled: list[Past] = []
        self._dropped: list[int] = []
        self.budget = TailBudget(bounds, slots)
        self.starts = 0
        self.state: Literal["serving", "draining", "stopping"] = "serving"

    def restore(
        self, pasts: Iterable[PackedPast], starts: int, *, dropped: int, now_s: float, wall_s: float
    ) -> None:
        """Take over what earlier incarnations knew, before the first start.

        Their output is gone with them: a transcript that was kept is lost.

        Args:
            pasts: What is known, in any order; of one id the latest counts.
            starts: Starts accepted by them; numbering goes on from there.
            dropped: Their `dropped_number`, or `starts` where that is not known for certain.
            now_s: Monotonic.
            wall_s: Unix seconds: how long ago an exec ended cannot be told otherwise.
        """
        assert not self.starts
        assert not self._execs
        self._dropped += self._settled.restore(
            pasts, dropped, now_s=now_s, wall_s=wall_s, keep_s=self._bounds.finished_s_max
        )
        self.starts = max(starts, dropped, self._settled.highest_number)
        self.expire(now_s)

    @property
    def live_count(self) -> int:
        """How many execs are not closed, starting ones included."""
        return len(self._live)

    @property
    def settled_count(self) -> int:
        """How many execs are known by no more than what is settled, earlier ones included."""
        return len(self._settled)

    @property
    def dropped_number(self) -> int:
        """The highest number of acceptance of which nothing is known any more; 0 = none."""
        return self._settled.dropped_number

    def get(self, exec_id: str) -> Exec:
        """Return an exec that is live or kept.

        Raises:
            RequestError: exec_unknown.
        """
        found = self._execs.get(exec_id)
        if found is None:
            raise RequestError("exec_unknown", f"there is no exec '{exec_id}'")
        return found

    def past(self, exec_id: str) -> Past | None:
        """Return what is known of an exec that is settled or an earlier incarnation's."""
        return self._settled.get(exec_id)

    def past_of(self, its_exec: Exec) -> Past:
        """Return all that is to be known of an exec by those who come after."""
        return Past(
            exec_id=its_exec.exec_id,
            number=its_exec.number,
            incarnation=self._incarnation,
            nonce=its_exec.nonce,
            digest=its_exec.digest,
            accepted_at=its_exec.accepted_at,
            pid=its_exec.pid,
            oom_score_adj=its_exec.oom_score_adj,
            journaled=its_exec.journaled,
            exit=its_exec.exit,
            closed=its_exec.closed,
            transcript=its_exec.transcript.state,
            argv=its_exec.argv,
            cwd=its_exec.cwd,
            user=its_exec.user,
            labels=its_exec.labels,
        )

    def everything(self) -> dict[int, Past | bytes]:
        """Return all that those who come after are to know, by number; what is packed, packed."""
        known: dict[int, Past | bytes] = dict(self._settled.packed())
        return known | {each.number: self.past_of(each) for each in self._execs.values()}

    def live(self) -> list[Exec]:
        """Return every live exec, oldest first."""
        return list(self._live.values())

    def recall(
        self, exec_id: str, content: Content | None, horizon: int | None, now_s: float
    ) -> Exec | Past | None:
        """Return the exec that this start made when it came before; None for a new one.

        Args:
            exec_id: The id it is for.
            content: What it asks for; None without a nonce.
            horizon: `starts` as its sender knew it before the first send, if it says so.
            now_s: Monotonic.

        Raises:
            RequestError: exec_exists, nonce_reused, exec_lost, cancelled or history_lost.
        """
        known = self._execs.get(exec_id) or self._settled.get(exec_id)
        if known is not None:
            return same_start(known, content)
        nonce = None if content is None else content.nonce
        if self._tombstones.meets(exec_id, nonce, now_s):
            raise RequestError("cancelled", f"exec '{exec_id}' was cancelled before its start")
        self._refuse_without_history(exec_id, horizon)
        return None

    def _refuse_without_history(self, exec_id: str, horizon: int | None) -> None:
        if horizon is None:
            return
        if horizon > self.starts:
            raise RequestError(
                "history_lost",
                f"horizon: {horizon} starts are not known here, only {self.starts}; "
                f"'{exec_id}' was not started",
                field="horizon",
            )
        if horizon < self.dropped_number:
            raise RequestError(
                "history_lost",
                f"horizon: starts after {horizon} have been dropped, up to "
                f"{self.dropped_number}; '{exec_id}' was not started",
                field="horizon",
            )

    def accept(
        self,
        exec_id: str,
        params: ExecStart,
        *,
        cwd: str,
        now_s: float,
        wall_s: float,
        oom_kills: int | None,
        content: Content | None = None,
        memory: MemoryUse | None = None,
    ) -> Exec:
        """Take a start that `recall` does not know, or refuse it with nothing changed.

        Raises:
            RequestError: stopping, draining or busy.
        """
        assert exec_id not in self._execs, "a start never adopts"
        assert self._settled.get(exec_id) is None, "a start never adopts"
        self._admit(exec_id)
        if params.admission == "check":
            check_memory(memory, self._bounds.admit_memory_percent, exec_id)
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
        accepted.content = content
        self._execs[exec_id] = self._live[exec_id] = accepted
        return accepted

    def _admit(self, exec_id: str) -> None:
        if self.state == "stopping":
            raise RequestError("stopping", f"the daemon is stopping; '{exec_id}' was not started")
        if self.state == "draining":
            raise RequestError("draining", f"the daemon is draining; '{exec_id}' was not started")
        if self.live_count >= self._bounds.live_execs_max:
            raise RequestError(
                "busy",
                f"{self.live_count} execs are live; the most is {self._bounds.live_execs_max}",
                retry_after_s=RETRY_S,
            )
        if self.budget.used_bytes > 2 * self._bounds.transcript_total_bytes_max:
            self.budget.relieve()  # readers may have let go since anything was written
        if self.budget.used_bytes > 2 * self._bounds.transcript_total_bytes_max:
            raise RequestError(
                "busy",
                f"{self.budget.used_bytes} bytes of output wait for readers that do not read",
                retry_after_s=RETRY_S,
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
        """Drop finished execs beyond the count or age, and tombstones past their time.

        Records of earlier incarnations count as the oldest.
        """
        most = self._bounds.finished_execs_max - len(self._finished)
        for past in self._settled.records_over(now_s, max(0, most)):
            self._settle(past)
        while self._finished:
            oldest = next(iter(self._finished.values()))
            assert oldest.closed_s is not None
            too_many = len(self._finished) > self._bounds.finished_execs_max
            if not too_many and oldest.closed_s + self._bounds.finished_s_max > now_s:
                break
            self._let_go(oldest, "evicted")
        self._tombstones.expire(now_s)

    def forget(self, exec_id: str) -> None:
        """Let go of a closed exec's record and output; of a settled one nothing changes.

        Raises:
            RequestError: exec_live, exec_unknown.
        """
        past = self._settled.get(exec_id)
        if past is not None:
            if past.is_record:
                self._settle(past)
            return
        its_exec = self.get(exec_id)
        if its_exec.is_live:
            raise RequestError(
                "exec_live", f"exec '{exec_id}' is {its_exec.state.shown}: it is not closed"
            )
        self._let_go(its_exec, "forgotten")

    def _let_go(self, its_exec: Exec, transcript: TranscriptState) -> None:
        self.budget.remove(its_exec.transcript)
        del self._finished[its_exec.exec_id], self._execs[its_exec.exec_id]
        self._settle(msgspec.structs.replace(self.past_of(its_exec), transcript=transcript))

    def _settle(self, past: Past) -> None:
        marker = marker_of(past)
        self._newly_settled.append(marker)
        self._dropped += self._settled.add_marker(marker)

    def take_settled(self) -> list[Past]:
        """Return the markers left by records dropped since the last call, oldest first.

        The edges let go of those execs too, and the journal keeps the marker in place of the
        record. Take these before `take_dropped`: one may be in both.
        """
        settled, self._newly_settled = self._newly_settled, []
        return settled

    def take_dropped(self) -> list[int]:
        """Return the numbers of those of whom nothing is known any more since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def bury(self, exec_id: str, now_s: float, *, if_nonce: str | None = None) -> None:
        """Leave a tombstone for an id never seen, or whose start is still on its way."""
        self._tombstones.bury(exec_id, if_nonce, now_s)

    def page(
        self,
        cursor: int | None,
        limit: int,
        *,
        states: frozenset[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[list[Exec | Past], int | None]:
        """Return execs in order of acceptance, and where the next page begins.

        Those of earlier incarnations come first, as long as more than their marker is kept.

        Args:
            cursor: Only execs accepted after this number.
            limit: The most to return.
            states: Only those in one of these states, in the protocol's words.
            labels: Only those that carry all of these.
        """
        found: list[Exec | Past] = []
        after = cursor or 0
        execs = (each for each in self._execs.values() if each.number > after)
        known: Iterator[Exec | Past] = itertools.chain(self._settled.records(after), execs)
        for each in known:
            if states is not None and _state_shown(each) not in states:
                continue
            its_labels = each.labels or {}
            if any(its_labels.get(key) != value for key, value in (labels or {}).items()):
                continue
            if len(found) == limit:
                return found, found[-1].number
            found.append(each)
        return found, None


def _state_shown(known: Exec | Past) -> str:
    return "closed" if isinstance(known, Past) else known.state.shown
