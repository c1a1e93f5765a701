"""Which attach of a name is in force, and who a command waits for by name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runnerd.core.blocks import Record
from runnerd.core.bounds import HEARTBEAT_S
from runnerd.core.budget import TailBudget
from runnerd.core.flow import Gate, Subscription, chunk_bytes
from runnerd.core.heartbeats import Heartbeats
from runnerd.core.names import Names
from runnerd.protocol.errors import RequestError

from .core_parts import NOW_S, SMALL, fill, make_transcript

HOLD_S = 30.0
NAMES = [None, "a", "b"]
GENERATIONS = st.none() | st.integers(1, 3)


@dataclass
class Reader:
    """One subscription, and what its client made of it."""

    subscription: Subscription
    generation: int | None
    has_seq: int


class NamesMachine(RuleBasedStateMachine):
    """One exec, its gate and its names, beside a plain model of what was promised.

    The edges are modelled as the daemon's Readers: check, then make, then take and hand over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.budget = TailBudget(SMALL)
        self.transcript = make_transcript(self.budget)
        self.readers: list[Reader] = []
        self.known: dict[str, int] = {}  # the highest generation, where there was one
        self.waits_for: str | None = None
        self.got: dict[str, int] = {}  # what a name's clients have for certain
        self.floor_seq = 1  # the first kept when the present holder began to be waited for

    @initialize(flow=st.sampled_from(["block", "block", "drop"]), name=st.sampled_from(NAMES))
    def begin(self, flow: str, name: str | None) -> None:
        self.gate = Gate("block" if flow == "block" else "drop", HOLD_S, NOW_S, name)
        self.names = Names(self.gate)
        self.waits_for = name if flow == "block" else None

    def in_force(self, name: str | None) -> Reader | None:
        found = [each for each in self.readers if each.subscription.subscriber == name]
        assert name is None or len(found) <= 1
        return found[0] if found and name is not None else None

    @rule(
        name=st.sampled_from(NAMES),
        generation=GENERATIONS,
        window_bytes=st.none() | st.integers(1, 600),
        back=st.integers(0, 2),
    )
    def attach(
        self, name: str | None, generation: int | None, window_bytes: int | None, back: int
    ) -> None:
        generation = generation if name is not None else None
        if name is not None and (generation or 0) < self.known.get(name, 0):
            with pytest.raises(RequestError) as caught:
                self.names.check(name, generation)
            assert caught.value.data.generation == self.known[name]
            return
        self.names.check(name, generation)
        older = self.in_force(name)
        has_seq = max(0, self.got.get(name or "", 0) - back)
        subscription = Subscription(
            1,
            self.transcript,
            streams=["stdout"],
            after=has_seq,
            window_bytes=window_bytes,
            subscriber=name,
        )
        was_free = self.gate.flow == "block" and self.gate.holder is None
        taken = self.names.take(subscription, generation)
        assert taken is (None if older is None else older.subscription)
        if older is not None:
            assert older.subscription.over
            was_free = was_free or self.gate.holder is older.subscription
            self.gate.lost(older.subscription, NOW_S)
            self.readers.remove(older)
        self.gate.taken_by(subscription)
        self.readers.append(Reader(subscription, generation, has_seq))
        if generation is not None and name is not None:
            self.known[name] = generation
        if was_free and self.waits_for in (None, name):
            assert self.gate.holder is subscription
            self.waits_for = name
            self.floor_seq = self.transcript.first_seq
        else:
            assert self.gate.holder is not subscription

    @rule(at=st.integers(0, 5), lost=st.booleans())
    def leave(self, at: int, lost: bool) -> None:
        if not self.readers:
            return
        reader = self.readers.pop(at % len(self.readers))
        was_holder = self.gate.holder is reader.subscription
        self.names.release(reader.subscription)
        (self.gate.lost(reader.subscription, NOW_S) if lost else None)
        if not lost:
            self.gate.left(reader.subscription)
        if was_holder:
            assert self.gate.flow == ("block" if lost else "drop")
            self.waits_for = self.waits_for if lost else None

    @rule()
    def hold_is_over(self) -> None:
        if self.gate.holder is None:
            self.gate.open_for_good()
            self.waits_for = None

    @rule(size=st.integers(100, 400), times=st.integers(1, 30))
    def command_writes(self, size: int, times: int) -> None:
        for _ in range(times):
            if not self.gate.may_read(self.transcript, self.budget.tail_bytes):
                return
            self.transcript.append(0, b"x" * min(size, chunk_bytes(self.budget.tail_bytes)))

    @rule()
    def others_want_the_memory(self) -> None:
        fill(make_transcript(self.budget), self.budget, SMALL.tail_bytes_max)

    @rule(at=st.integers(0, 1), most=st.integers(1, 30))
    def is_sent(self, at: int, most: int) -> None:
        """Sent is not arrived: nothing changes but what may be acknowledged."""
        if not self.readers:
            return
        reader = self.readers[at % len(self.readers)]
        for _ in range(most):
            item = reader.subscription.next_item()
            if item is None:
                return
            if isinstance(item, Record):
                reader.has_seq = item.seq

    @rule(times=st.integers(1, 4))
    def much_is_written_and_sent(self, times: int) -> None:
        """As fast as it is sent: what counts as needed is all that holds the command."""
        for _ in range(times):
            self.command_writes(400, 30)
            for at in range(len(self.readers)):
                self.is_sent(at, 30)

    @rule(at=st.integers(0, 5))
    def arrives(self, at: int) -> None:
        """The client acknowledges, or the edge for it, and the name has it for good."""
        if not self.readers:
            return
        reader = self.readers[at % len(self.readers)]
        reader.subscription.ack(reader.subscription.cursor_seq)
        name = reader.subscription.subscriber
        if name is not None:
            self.got[name] = max(self.got.get(name, 0), reader.subscription.cursor_seq)

    @invariant()
    def what_the_name_waited_for_has_not_got_is_kept(self) -> None:
        if self.gate.flow != "block" or self.gate.subscriber is None:
            return
        first_needed = self.got.get(self.gate.subscriber, 0) + 1
        assert self.transcript.first_seq <= max(first_needed, self.floor_seq)

    @invariant()
    def nobody_else_is_waited_for(self) -> None:
        assert self.gate.subscriber == self.waits_for
        if self.gate.holder is not None and self.waits_for is not None:
            assert self.gate.holder.subscriber == self.waits_for
        if self.gate.flow == "drop":
            assert self.gate.holder is None


TestNames = NamesMachine.TestCase
TestNames.settings = settings(max_examples=200, stateful_step_count=40)


def quiet() -> Subscription:
    return Subscription(1, make_transcript(), streams=["stdout"])


def test_heartbeats_come_within_a_second_after_the_quiet_and_never_early() -> None:
    beats: Heartbeats[str] = Heartbeats()
    assert beats.next_s is None
    subscriptions = [quiet() for _ in range(100)]
    for at, each in enumerate(subscriptions):
        beats.add(each, str(at), NOW_S + at / 100)
    ticks: list[float] = []
    sent: dict[Subscription, float] = {}
    while (now_s := beats.next_s) is not None and now_s <= NOW_S + 4 * HEARTBEAT_S:
        ticks.append(now_s)
        for each, _ in beats.due(now_s):
            last_s = sent.get(each, NOW_S + subscriptions.index(each) / 100)
            assert HEARTBEAT_S <= now_s - last_s <= HEARTBEAT_S + 1
            sent[each] = now_s
    assert len(sent) == 100
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(ticks))
    for each in subscriptions:
        beats.remove(each)
        beats.remove(each)
    assert (beats.next_s, len(beats)) == (None, 0)


def test_what_was_sent_puts_the_heartbeat_off() -> None:
    beats: Heartbeats[str] = Heartbeats()
    each = quiet()
    beats.add(each, "a", NOW_S)
    each.quiet_since_s = NOW_S + 3
    assert beats.due(NOW_S + HEARTBEAT_S) == []
    assert beats.next_s == NOW_S + 3 + HEARTBEAT_S
    assert beats.due(NOW_S + 3 + HEARTBEAT_S) == [(each, "a")]
    assert beats.due(NOW_S + 3 + HEARTBEAT_S) == []
