"""What may be asked twice, and when to try again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.client.repeating import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    GONE_S,
    REPEATS,
    Patience,
    Repeat,
    may_repeat,
)
from runnerd.protocol.daemon_requests import SandboxClaim
from runnerd.protocol.fields import Params
from runnerd.protocol.requests import METHODS, ExecSignal, ExecStart, ExecWrite


def test_every_method_has_a_rule() -> None:
    """A method added to the protocol must not be repeated, or lost, by default."""
    assert [*REPEATS] == [*METHODS]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (ExecStart(argv=["x"]), False),
        (ExecStart(argv=["x"], exec_id="x"), False),
        (ExecStart(argv=["x"], exec_id="x", nonce="n"), True),
        (ExecWrite(exec_id="x", data=b"a"), False),
        (ExecWrite(exec_id="x", data=b"a", offset=0), True),
        (ExecSignal(exec_id="x", signal="TERM"), False),
        (SandboxClaim(owner="o", expect="any"), False),
        (SandboxClaim(owner="o", expect="any", nonce="n"), True),
    ],
)
def test_only_what_the_daemon_can_tell_from_a_second_one_is_repeated(
    params: Params, expected: bool
) -> None:
    (method,) = [name for name, kind in METHODS.items() if kind is type(params)]
    assert may_repeat(method, params) is expected


def test_what_has_a_second_effect_is_never_repeated() -> None:
    assert [name for name, rule in REPEATS.items() if rule is Repeat.NEVER] == ["exec.signal"]


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_the_waits_double_up_to_eight_seconds_and_are_all_jitter(draws: list[float]) -> None:
    numbers = iter(draws)
    patience = Patience(1e6, lambda: next(numbers))
    for attempt, drawn in enumerate(draws):
        patience.lost(100.0)
        assert patience.next_at_s is not None
        longest_s = min(BACKOFF_FIRST_S * 2**attempt, BACKOFF_MAX_S)
        assert patience.next_at_s == pytest.approx(100.0 + drawn * longest_s)


def test_no_patience_is_no_second_attempt() -> None:
    patience = Patience(0, lambda: 0.5)
    patience.lost(5.0)
    assert patience.next_at_s is None


def test_patience_ends_with_one_last_attempt_at_its_end() -> None:
    patience = Patience(10.0, lambda: 1.0)
    times_s = [0.0]
    for _ in itertools.count():
        patience.lost(times_s[-1])
        if patience.next_at_s is None:
            break
        times_s.append(patience.next_at_s)
    assert times_s == [0.0, 0.5, 1.5, 3.5, 7.5, 10.0]


def test_where_nobody_listens_it_ends_sooner() -> None:
    patience = Patience(1000.0, lambda: 0.5)
    patience.lost(0.0)
    patience.refused(1.0)
    patience.refused(1.0 + GONE_S - 0.1)
    assert patience.next_at_s == 1.0 + GONE_S
    patience.refused(1.0 + GONE_S)
    assert patience.next_at_s is None


def test_a_listener_that_comes_back_begins_the_patience_for_it_anew() -> None:
    patience = Patience(1000.0, lambda: 0.5)
    patience.refused(0.0)
    patience.lost(4.0)
    patience.refused(6.0)
    assert patience.next_at_s is not None


def test_after_a_hello_the_next_loss_is_a_first_one() -> None:
    patience = Patience(10.0, lambda: 1.0)
    for now_s in (0.0, 1.0, 2.0):
        patience.lost(now_s)
    patience.greeted()
    patience.lost(50.0)
    assert patience.next_at_s == 50.0 + BACKOFF_FIRST_S
