"""Whether the sandbox is idle, since when, and why not."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.activity import WORK, Activity, Facts, Verdict, not_idle
from runnerd.core.bounds import PINS_MAX
from runnerd.core.fence import CHANGES
from runnerd.protocol.errors import RequestError

BOOT_S = 100.0


def look(
    activity: Activity,
    now_s: float,
    facts: Facts = Facts(),  # noqa: B008 - immutable
    *,
    for_s: float = 0.0,
    leftovers_count: bool = False,
) -> Verdict:
    return activity.look(facts, now_s, for_s=for_s, leftovers_count=leftovers_count)


def test_the_boot_counts_as_work() -> None:
    activity = Activity(BOOT_S)
    assert look(activity, BOOT_S + 5, for_s=6).reasons == ["recent_work"]
    verdict = look(activity, BOOT_S + 6, for_s=6)
    assert (verdict.reasons, verdict.idle_for_s) == ([], 6.0)


def test_every_reason_is_named() -> None:
    activity = Activity(BOOT_S)
    activity.pin("p", None, BOOT_S)
    facts = Facts(["e"], ["left"], 2)
    verdict = look(activity, BOOT_S + 1, facts, for_s=10, leftovers_count=True)
    assert verdict.reasons == [
        *("live_execs", "attached_clients", "leftovers", "pin", "recent_work")
    ]
    assert verdict.idle_for_s == 0
    assert "leftovers" not in look(activity, BOOT_S + 1, facts).reasons


def test_the_refusal_says_all_of_them_and_when_to_come_back() -> None:
    activity = Activity(BOOT_S)
    activity.pin("Ann looks", None, BOOT_S)
    facts = Facts([f"e{number}" for number in range(5)], ["left"], 1)
    error = not_idle(look(activity, BOOT_S + 4, facts, for_s=10, leftovers_count=True), 10)
    assert (error.kind, error.data.retry_after_s) == ("busy", 10)
    assert error.data.reasons is not None
    assert len(error.data.reasons) == 5
    assert error.message == (
        "the sandbox is not idle: 5 execs live ('e0', 'e1', 'e2', ...), 1 reader attached, 1 exec "
        "left something running ('left'), pinned ('Ann looks'), it worked less than 10 s ago"
    )
    recent = not_idle(look(Activity(BOOT_S), BOOT_S + 4, for_s=10), 10)
    assert recent.data.retry_after_s == pytest.approx(6)


def test_a_pin_more_than_there_may_be_is_refused_and_changes_nothing() -> None:
    activity = Activity(BOOT_S)
    for number in range(PINS_MAX):
        assert not activity.pin(str(number), None, BOOT_S)
    with pytest.raises(RequestError) as caught:
        activity.pin("one more", None, BOOT_S)
    assert (caught.value.kind, caught.value.data.retry_after_s) == ("busy", 60)
    assert len(activity.pins(BOOT_S)) == PINS_MAX
    assert activity.pin("0", 5.0, BOOT_S)  # one that is there can be set anew
    with pytest.raises(RequestError) as caught:
        activity.pin("one more", None, BOOT_S + 2)
    assert caught.value.data.retry_after_s == 3
    assert not activity.pin("one more", None, BOOT_S + 5)  # and one that is over makes room


def test_work_is_changes_to_execs_their_environment_and_their_owner() -> None:
    assert all(CHANGES[method] for method in WORK)
    assert {method for method, is_change in CHANGES.items() if is_change} - WORK == {
        "exec.start",  # counted as it is accepted
        "exec.forget",  # tidying up
        "sandbox.pin",
        "daemon.drain",
        "daemon.undrain",
        "daemon.stop",
    }


class Happens(NamedTuple):
    """Something, so many seconds after what was before it."""

    after_s: int
    what: Literal["work", "start", "end", "leave", "left", "attach", "detach", "pin", "unpin"]
    ttl_s: int | None
    reason: str


HISTORIES = st.lists(
    st.builds(
        Happens,
        st.integers(0, 5),
        st.sampled_from(
            ["work", "start", "end", "leave", "left", "attach", "detach", "pin", "unpin"]
        ),
        st.none() | st.integers(1, 6),
        st.sampled_from("pq"),
    ),
    max_size=40,
)


class Sandbox:
    """A sandbox beside a diary that says, second by second, what counted."""

    def __init__(self) -> None:
        self.now_s = int(BOOT_S)
        self.activity = Activity(BOOT_S)
        self.execs = 0
        self.leftovers = 0
        self.attached = 0
        self.pins: dict[str, int | None] = {}
        self.busy: set[int] = {self.now_s}  # seconds at which something counted
        self.busy_with_leftovers: set[int] = {self.now_s}

    @property
    def facts(self) -> Facts:
        return Facts(["e"] * self.execs, ["l"] * self.leftovers, self.attached)

    def _note(self) -> None:
        live = [until for until in self.pins.values() if until is None or until >= self.now_s]
        if self.execs or self.attached or live:
            self.busy.add(self.now_s)
        if self.leftovers:
            self.busy_with_leftovers.add(self.now_s)

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self._note()
            self.now_s += 1
        self._note()

    def _ended(self) -> None:
        self.activity.worked(self.now_s)
        self.busy.add(self.now_s)

    def happens(self, event: Happens) -> None:
        self.passes(event.after_s)
        match event.what:
            case "work":
                self._ended()
            case "start":
                self.execs += 1
                self._ended()
            case "end" if self.execs:
                self.execs -= 1
                self._ended()
            case "leave" if self.execs:
                self.execs -= 1
                self.leftovers += 1
                self._ended()
            case "left" if self.leftovers:
                self.leftovers -= 1
                self.activity.leftovers_ended(self.now_s)
                self.busy_with_leftovers.add(self.now_s)
            case "attach":
                self.attached += 1
                self._ended()
            case "detach" if self.attached:
                self.attached -= 1
                self._ended()
            case "pin":
                ends = None if event.ttl_s is None else self.now_s + event.ttl_s
                self.activity.pin(event.reason, event.ttl_s, self.now_s)
                self.pins[event.reason] = ends
            case "unpin":
                self.activity.unpin(event.reason, self.now_s)
                until = self.pins.pop(event.reason, 0)
                if until is None or until > self.now_s:
                    self.busy.add(self.now_s)
            case _:  # there is nothing to end
                pass
        self._note()


@given(HISTORIES, st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_over_any_history_it_is_idle_since_the_last_moment_that_counted(
    history: list[Happens], then_s: int, for_s: int, leftovers_count: bool
) -> None:
    sandbox = Sandbox()
    for event in history:
        sandbox.happens(event)
    sandbox.passes(then_s)
    now_s = sandbox.now_s
    verdict = look(
        sandbox.activity, now_s, sandbox.facts, for_s=for_s, leftovers_count=leftovers_count
    )
    busy = sandbox.busy | (sandbox.busy_with_leftovers if leftovers_count else set())
    assert verdict.idle_for_s == now_s - max(busy)
    pinned = {reason for reason, until in sandbox.pins.items() if until is None or until > now_s}
    assert {pin.reason for pin in verdict.pins} == pinned
    assert ("live_execs" in verdict.reasons) == (sandbox.execs > 0)
    assert ("attached_clients" in verdict.reasons) == (sandbox.attached > 0)
    assert ("leftovers" in verdict.reasons) == (leftovers_count and sandbox.leftovers > 0)
    assert ("pin" in verdict.reasons) == bool(pinned)
    if not verdict.reasons:
        assert verdict.idle_for_s >= for_s
    elif verdict.reasons == ["recent_work"]:
        assert verdict.idle_for_s < for_s


@given(HISTORIES, st.lists(st.booleans(), max_size=40))
def test_looking_changes_nothing(history: list[Happens], looks: list[bool]) -> None:
    looked, not_looked = Sandbox(), Sandbox()
    for at, event in enumerate(history):
        looked.happens(event)
        not_looked.happens(event)
        if looks[at % len(looks)] if looks else False:
            look(looked.activity, looked.now_s, looked.facts)
    for leftovers_count in (False, True):
        assert look(
            looked.activity, looked.now_s, looked.facts, leftovers_count=leftovers_count
        ) == look(
            not_looked.activity,
            not_looked.now_s,
            not_looked.facts,
            leftovers_count=leftovers_count,
        )
