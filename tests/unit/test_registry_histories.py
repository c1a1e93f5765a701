"""Random histories of the registry against the plain truth, kept beside it.

Starts come, are sent again, fail, exit and close; execs are cancelled, forgotten and expire; the
daemon is restarted with what a journal would have kept, built from the registry's own hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runnerd.core.bounds import TOMBSTONE_S, Bounds
from runnerd.core.digest import content_of
from runnerd.core.execs import Exec
from runnerd.core.past import Past, look_into, pack_past, unpack_past
from runnerd.core.registry import Registry
from runnerd.core.remembered import check_owner
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart

from .core_parts import NOW_S, WALL_S, exit_status, start_params

FEW = Bounds(live_execs_max=3, finished_execs_max=2, finished_s_max=60.0, settled_execs_max=3)
IDS = "abcdef"
T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what a call gives, or the kind of its refusal."""
    try:
        return call(), None
    except RequestError as error:
        return None, error.kind


class Sent(NamedTuple):
    """One start as its sender first sent it; sent again it is the same to the last field."""

    exec_id: str
    nonce: str | None
    horizon: int | None

    def params(self, *, other: bool = False) -> ExecStart:
        return start_params(
            exec_id=self.exec_id,
            nonce=self.nonce,
            horizon=self.horizon,
            labels={"other": "yes"} if other else {},
        )


class Known:
    """What is true of one exec: where it stands and whose it is."""

    def __init__(self, sent: Sent, number: int, *, other: bool) -> None:
        self.sent = sent
        self.number = number
        self.other = other
        self.place = "live"  # live, kept, record (an earlier incarnation's), marker
        self.has_exited = False
        self.ended_s = 0.0
        self.turn = 0  # of those closed at one instant
        self.transcript = "kept"


class RegistryMachine(RuleBasedStateMachine):
    """Every rule says what must happen, from the truth alone, and then looks."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(FEW, "first")
        self.now_s = NOW_S
        self.known: dict[str, Known] = {}
        self.tombs: dict[tuple[str, str | None], float] = {}
        self.sent: list[Sent] = []
        self.ran: dict[tuple[str, str], int] = {}  # commands that ran, of starts with a horizon
        self.starts = 0
        self.dropped_number = 0
        self.journal: dict[str, Past] = {}
        self.incarnations = 1
        self.closes_seen = 0

    # -------------------------------------------------------------- the truth

    def at(self, *places: str) -> list[Known]:
        return [each for each in self.known.values() if each.place in places]

    def wall_s(self) -> float:
        return WALL_S + self.now_s - NOW_S

    def settle(self, known: Known) -> None:
        known.place = "marker"
        self.drop()

    def drop(self) -> None:
        while len(self.at("record", "marker")) > FEW.settled_execs_max:
            first = min(self.at("record", "marker"), key=lambda each: each.number)
            self.dropped_number = max(self.dropped_number, first.number)
            del self.known[first.sent.exec_id]

    def expire(self) -> None:
        """The record closed longest ago goes first; those of earlier incarnations before all."""
        for place in ("record", "kept"):
            ended = sorted(self.at(place), key=lambda each: (each.ended_s, each.turn, each.number))
            for each in ended:
                is_old = each.ended_s + FEW.finished_s_max <= self.now_s
                if is_old or len(self.at("record", "kept")) > FEW.finished_execs_max:
                    if place == "kept":
                        each.transcript = "evicted"
                    self.settle(each)

    def expected(self, sent: Sent, *, other: bool) -> str | None:
        """Return the refusal a start must meet; None where it is answered or made."""
        known = self.known.get(sent.exec_id)
        if known is not None:
            if sent.nonce is None or known.sent.nonce != sent.nonce:
                return "exec_exists"
            if known.other != other:
                return "nonce_reused"
            lost = known.place in ("record", "marker") and not known.has_exited
            return "exec_lost" if lost else None
        for tomb in ((sent.exec_id, None), (sent.exec_id, sent.nonce)):
            if self.tombs.get(tomb, 0.0) > self.now_s:
                return "cancelled"
        if sent.horizon is not None and not self.dropped_number <= sent.horizon <= self.starts:
            return "history_lost"
        if self.registry.state == "draining":
            return "draining"
        return "busy" if len(self.at("live")) == FEW.live_execs_max else None

    # -------------------------------------------------------------- the registry

    def start(self, sent: Sent, *, other: bool = False) -> None:
        expected, was = self.expected(sent, other=other), self.known.get(sent.exec_id)
        answer, refused = attempt(lambda: self.recall_or_accept(sent, other=other))
        assert refused == expected
        if answer is None:
            return
        if was is not None:
            assert (answer.exec_id, answer.number) == (sent.exec_id, was.number)
            assert isinstance(answer, Exec) == (was.place in ("live", "kept"))
            return
        assert isinstance(answer, Exec)
        self.starts += 1
        assert answer.number == self.starts
        self.known[sent.exec_id] = Known(sent, self.starts, other=other)
        self.write(answer)
        if sent.horizon is not None:
            key = (sent.exec_id, str(sent.nonce))
            self.ran[key] = self.ran.get(key, 0) + 1
            assert self.ran[key] == 1, "a second run of one start"

    def recall_or_accept(self, sent: Sent, *, other: bool) -> Exec | Past:
        params = sent.params(other=other)
        content = content_of(params)
        known = self.registry.recall(sent.exec_id, content, sent.horizon, self.now_s)
        return known or self.registry.accept(
            sent.exec_id,
            params,
            content=content,
            cwd="/",
            now_s=self.now_s,
            wall_s=self.wall_s(),
            oom_kills=0,
        )

    def write(self, its_exec: Exec) -> None:
        """As the journal does: at the acceptance, the exit and the close."""
        past = self.registry.past_of(its_exec)
        self.journal[past.exec_id] = unpack_past(pack_past(past))

    def take(self) -> None:
        """As the journal does with what the registry lets go of."""
        for past in self.registry.take_settled():
            self.journal[past.exec_id] = unpack_past(pack_past(past))
        by_number = {past.number: exec_id for exec_id, past in self.journal.items()}
        for number in self.registry.take_dropped():
            del self.journal[by_number[number]]

    def pick(self, at: int, *, exited: bool | None = None) -> Exec | None:
        live = [each for each in self.registry.live() if exited in (None, each.has_exited)]
        return live[at % len(live)] if live else None

    # -------------------------------------------------------------- what happens

    @rule(exec_id=st.sampled_from(IDS), has_nonce=st.booleans(), has_horizon=st.booleans())
    def first_send(self, exec_id: str, has_nonce: bool, has_horizon: bool) -> None:
        nonce = f"n{len(self.sent)}" if has_nonce else None
        horizon = self.starts if has_nonce and has_horizon else None
        self.sent.append(Sent(exec_id, nonce, horizon))
        self.start(self.sent[-1])

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 1000), other=st.booleans())
    def send_again(self, at: int, other: bool) -> None:
        self.start(self.sent[at % len(self.sent)], other=other)

    @rule(exec_id=st.sampled_from(IDS))
    def send_from_another_history(self, exec_id: str) -> None:
        self.start(Sent(exec_id, "alien", self.starts + 1))

    @rule(at=st.integers(0, 2))
    def start_fails(self, at: int) -> None:
        its_exec = self.pick(at, exited=False)
        if its_exec is None or its_exec.pid is not None:
            return
        its_exec.start_failed()
        self.registry.failed(its_exec)
        del self.journal[its_exec.exec_id]
        sent = self.known.pop(its_exec.exec_id).sent
        if sent.horizon is not None:
            self.ran[sent.exec_id, str(sent.nonce)] -= 1

    @rule(at=st.integers(0, 2))
    def exits(self, at: int) -> None:
        its_exec = self.pick(at, exited=False)
        if its_exec is None:
            return
        its_exec.started(100, 900, self.now_s, self.wall_s())
        its_exec.exited(exit_status(at_s=self.now_s), by_itself=True)
        its_exec.drained(self.now_s, self.wall_s(), oom_kills=0, starts=self.registry.starts)
        self.known[its_exec.exec_id].has_exited = True
        self.known[its_exec.exec_id].ended_s = self.now_s
        self.write(its_exec)

    @rule(at=st.integers(0, 2))
    def closes(self, at: int) -> None:
        its_exec = self.pick(at, exited=True)
        if its_exec is None:
            return
        its_exec.emptied(self.now_s, self.wall_s())
        self.write(its_exec)
        known = self.known[its_exec.exec_id]
        known.place, known.ended_s = "kept", self.now_s
        self.closes_seen += 1
        known.turn = self.closes_seen
        self.registry.closed(its_exec, self.now_s)
        self.expire()

    @rule(exec_id=st.sampled_from(IDS))
    def forget(self, exec_id: str) -> None:
        known = self.known.get(exec_id)
        expected = None
        if known is None or known.place == "live":
            expected = "exec_unknown" if known is None else "exec_live"
        assert attempt(lambda: self.registry.forget(exec_id)) == (None, expected)
        if expected is not None or known is None:
            return
        if known.place == "kept":
            known.transcript = "forgotten"
        if known.place != "marker":
            self.settle(known)

    @rule(exec_id=st.sampled_from(IDS), at=st.integers(0, 1000), is_bound=st.booleans())
    def cancel(self, exec_id: str, at: int, is_bound: bool) -> None:
        if_nonce = self.sent[at % len(self.sent)].nonce if is_bound and self.sent else None
        known = self.known.get(exec_id)
        if known is None:
            self.registry.bury(exec_id, self.now_s, if_nonce=if_nonce)
            self.tombs[exec_id, if_nonce] = self.now_s + TOMBSTONE_S
            self.expire()
            return
        kept = {each.exec_id: each for each in self.registry.page(None, 100)[0]}
        found = kept.get(exec_id) or self.registry.past(exec_id)
        assert found is not None
        is_owner = if_nonce in (None, known.sent.nonce)
        refused = attempt(lambda: check_owner(found, if_nonce))[1]
        assert refused == (None if is_owner else "not_owner")

    @rule(seconds=st.sampled_from([0.5, 20.0, 61.0, TOMBSTONE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.registry.expire(self.now_s)
        self.expire()

    @rule(is_draining=st.booleans())
    def drain(self, is_draining: bool) -> None:
        self.registry.state = "draining" if is_draining else "serving"

    @rule()
    def restart(self) -> None:
        """All that was live is lost, whatever it was doing; tombstones and output are gone."""
        self.take()
        dropped = self.registry.dropped_number
        self.incarnations += 1
        self.registry = Registry(FEW, f"i{self.incarnations}")
        self.registry.restore(
            [look_into(pack_past(past)) for past in self.journal.values()],
            self.starts,
            dropped=dropped,
            now_s=self.now_s,
            wall_s=self.wall_s(),
        )
        self.tombs.clear()
        for each in self.at("live", "kept", "record"):
            if not each.has_exited:
                each.ended_s = self.now_s
            each.place, each.turn = "record", 0
        for each in self.known.values():
            if each.transcript == "kept":
                each.transcript = "lost"
        self.drop()
        self.expire()

    # -------------------------------------------------------------- what is always so

    @invariant()
    def what_is_known_is_known(self) -> None:
        self.take()
        listed, cursor = self.registry.page(None, 100)
        expected = sorted(self.at("live", "kept", "record"), key=lambda each: each.number)
        assert [each.number for each in listed] == [each.number for each in expected]
        assert cursor is None
        for exec_id in IDS:
            past, known = self.registry.past(exec_id), self.known.get(exec_id)
            assert (past is None) == (known is None or known.place in ("live", "kept"))
            if past is not None and known is not None:
                assert past.transcript == known.transcript
                assert past.is_lost != known.has_exited
                assert past.is_record == (known.place == "record")
                assert (past.number, past.nonce) == (known.number, known.sent.nonce)

    @invariant()
    def a_live_exec_is_never_dropped_and_counts_are_bounded(self) -> None:
        live = sorted(each.number for each in self.at("live"))
        assert sorted(each.number for each in self.registry.live()) == live
        assert self.registry.live_count == len(live) <= FEW.live_execs_max
        assert len(self.at("kept", "record")) <= FEW.finished_execs_max
        assert self.registry.settled_count == len(self.at("record", "marker"))
        assert self.registry.settled_count <= FEW.settled_execs_max
        assert (self.registry.starts, self.registry.dropped_number) == (
            self.starts,
            self.dropped_number,
        )

    @invariant()
    def the_journal_keeps_what_is_known_and_no_more(self) -> None:
        self.take()
        assert self.journal.keys() == self.known.keys()
        for exec_id, past in self.journal.items():
            assert past.number == self.known[exec_id].number


TestRegistryHistories = RegistryMachine.TestCase
TestRegistryHistories.settings = settings(max_examples=150, stateful_step_count=50)
