"""The table is total, and every path through it ends."""

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.life import IMPOSSIBLE, LIVE, TRANSITIONS, Event, State, after
from runnerd.protocol import exits

PAIRS = [*itertools.product(State, Event)]
OVER = {State.FAILED, State.CLOSED}


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_state_and_event_is_written_down_once(state: State, event: Event) -> None:
    """A pair is either possible or impossible, and never both or neither."""
    assert (event in TRANSITIONS[state]) != ((state, event) in IMPOSSIBLE)


@pytest.mark.parametrize(("state", "event"), [*IMPOSSIBLE])
def test_an_impossible_event_is_refused_with_its_reason(state: State, event: Event) -> None:
    assert IMPOSSIBLE[state, event]
    with pytest.raises(AssertionError, match=IMPOSSIBLE[state, event]):
        after(state, event)


def test_only_what_is_over_is_not_live() -> None:
    assert set(State) - LIVE == OVER
    for state in OVER:
        assert set(TRANSITIONS[state].values()) == {state}


def test_every_state_but_failed_has_a_word_in_the_protocol() -> None:
    words = {state.shown for state in State if state is not State.FAILED}
    assert words == set(get_args(exits.State))


@pytest.mark.parametrize("state", [*LIVE])
def test_every_live_state_leads_to_an_end(state: State) -> None:
    reached = {state}
    while grown := {to for each in reached for to in TRANSITIONS[each].values()} - reached:
        reached |= grown
    assert State.CLOSED in reached
    assert (State.FAILED in reached) == (state is State.STARTING)


@given(st.lists(st.integers(min_value=0), max_size=30))
def test_each_fact_happens_once_and_closed_needs_them_all(choices: list[int]) -> None:
    state = State.STARTING
    history: list[Event] = []
    for choice in choices:
        possible = [*TRANSITIONS[state]]
        event = possible[choice % len(possible)]
        state = after(state, event)
        history.append(event)
    facts = [event for event in history if event not in {Event.END, Event.SHIM_LOST}]
    if state is State.FAILED:
        assert facts[0] is Event.START_FAILED
        assert set(facts[1:]) <= {Event.EMPTY}
        return
    assert len(facts) == len(set(facts))
    assert facts[:2] == [Event.STARTED, Event.EXITED][: len(facts)]
    is_closed = {Event.DRAINED, Event.EMPTY} <= set(facts)
    assert (state is State.CLOSED) == is_closed


@given(st.sampled_from(State), st.sampled_from([Event.END, Event.SHIM_LOST]))
def test_what_comes_from_outside_is_possible_at_any_time_and_ends_nothing(
    state: State, event: Event
) -> None:
    """A request and a killed shim choose their moment; neither moves the exec by itself."""
    assert after(state, event) is state
