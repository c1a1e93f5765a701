"""When an exec is ended though nobody asked, and that no time counts in which all stood still."""

import math
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.clocks import BUSY_SHARE, Clocks

NOW_S: Final = 1000.0
TENTH: Final = 0.1


def clocks(
    *, deadline_s: float | None = None, orphan_ttl_s: float | None = None, stall_s: Any = None
) -> Clocks:
    made = Clocks(deadline_s, orphan_ttl_s, stall_s)
    made.started(NOW_S)
    return made


def test_none_runs_unless_asked_for() -> None:
    none = clocks()
    assert not none.is_any
    assert none.next_s == math.inf
    none.attached(0, NOW_S)
    none.output(NOW_S)
    assert none.due(NOW_S + 1e12) is None


@pytest.mark.parametrize("name", ["deadline_s", "orphan_ttl_s", "stall_s"])
def test_none_runs_before_the_start_or_after_the_end(name: str) -> None:
    one = Clocks(**{"deadline_s": None, "orphan_ttl_s": None, "stall_s": None} | {name: 1.0})
    assert one.is_any
    assert one.next_s == math.inf
    one.started(NOW_S)
    assert one.next_s == NOW_S + 1
    one.ended()
    assert (one.next_s, one.due(NOW_S + 5)) == (math.inf, None)


def test_a_deadline_is_due_at_its_time() -> None:
    its = clocks(deadline_s=2.0)
    assert its.due(NOW_S + 1.999) is None
    assert its.due(NOW_S + 2) == "deadline"


def test_an_orphan_is_one_nobody_is_attached_to() -> None:
    its = clocks(orphan_ttl_s=2.0)
    its.attached(1, NOW_S + 1)
    assert its.next_s == math.inf
    its.attached(2, NOW_S + 2)
    its.attached(1, NOW_S + 50)
    assert its.due(NOW_S + 60) is None, "one of two has left"
    its.attached(0, NOW_S + 100)
    assert its.due(NOW_S + 101.9) is None
    assert its.due(NOW_S + 102) == "orphaned"


def test_a_silent_idle_tree_has_stalled_after_its_window() -> None:
    its = clocks(stall_s=10.0)
    assert its.next_s == NOW_S + 10
    assert its.due(NOW_S + 10) == "look"
    assert its.looked(10 * BUSY_SHARE * 0.99, NOW_S + 10)


def test_one_percent_of_a_cpu_is_life() -> None:
    its = clocks(stall_s=10.0)
    assert not its.looked(10 * BUSY_SHARE, NOW_S + 10)
    assert its.next_s == NOW_S + 20
    assert its.looked(10 * BUSY_SHARE, NOW_S + 20)


def test_output_begins_the_window_anew() -> None:
    its = clocks(stall_s=10.0)
    assert its.output(NOW_S + 3), "the next look came nearer"
    assert not its.output(NOW_S + 4), "once in a silence is enough to move a timer"
    assert its.next_s == NOW_S + 5
    assert not its.looked(7.0, NOW_S + 5), "the beginning of the window, whatever was used before"
    assert its.next_s == NOW_S + 15
    assert its.looked(7.0, NOW_S + 15)


def test_what_cannot_be_seen_proves_nothing() -> None:
    its = clocks(stall_s=10.0)
    assert not its.looked(None, NOW_S + 10)
    assert its.next_s == NOW_S + 11
    assert not its.looked(0.0, NOW_S + 11)
    assert its.looked(0.0, NOW_S + 21)


def test_less_cpu_time_than_before_is_life() -> None:
    """Processes have ended that nobody waited for; their time is in no account any more."""
    its = clocks(stall_s=10.0)
    its.looked(5.0, NOW_S + 10)
    assert not its.looked(4.0, NOW_S + 20)
    assert its.looked(4.0, NOW_S + 30)


@pytest.mark.parametrize(
    ("fields", "due"),
    [({"deadline_s": 10.0}, "deadline"), ({"orphan_ttl_s": 10.0}, "orphaned"),
     ({"stall_s": 10.0}, "look")],
)  # fmt: skip
def test_frozen_time_is_added_once(fields: dict[str, float], due: str) -> None:
    its = clocks(**fields)
    its.frozen(NOW_S + 4, NOW_S + 104)
    assert its.next_s == NOW_S + 110
    assert its.due(NOW_S + 109.9) is None
    its.frozen(NOW_S + 105, NOW_S + 205)
    assert its.next_s == NOW_S + 210
    assert its.due(NOW_S + 210) == due


@pytest.mark.parametrize("name", ["deadline_s", "orphan_ttl_s", "stall_s"])
def test_a_clock_that_began_within_the_freeze_gets_no_more_than_its_share(name: str) -> None:
    """A start can be served between the end of a freeze and the moment it is noticed."""
    its = clocks(**{name: 10.0})
    its.frozen(NOW_S - 50, NOW_S + 1)
    assert its.next_s == NOW_S + 11


@given(
    stall_s=st.floats(0.5, 100),
    signs=st.lists(st.floats(0.01, 50), max_size=20),
    is_output=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_a_stall_comes_one_to_two_windows_after_the_last_sign_of_life(
    stall_s: float, signs: list[float], is_output: list[bool]
) -> None:
    """Whatever came before; and never while a sign of life came within the last window."""
    its = clocks(stall_s=stall_s)
    now_s, cpu_s, last_s, last_was_output = NOW_S, 0.0, NOW_S, True
    for gap_s, prints in zip(signs, is_output, strict=False):
        until_s = now_s + gap_s
        while its.next_s <= until_s:
            now_s = its.next_s
            if its.looked(cpu_s, now_s):
                assert now_s - last_s >= stall_s * 0.999
                return
        now_s = last_s = until_s
        last_was_output = prints
        if prints:
            its.output(now_s)
        else:
            cpu_s += 2 * stall_s * BUSY_SHARE
    for _ in range(4):
        now_s = its.next_s
        if its.looked(cpu_s, now_s):
            break
    late = (1 + TENTH if last_was_output else 2) * 1.001
    assert stall_s * 0.999 <= now_s - last_s <= stall_s * late
