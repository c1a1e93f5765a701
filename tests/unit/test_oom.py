"""A verdict says no more than the counter and the signal prove."""

import pytest

from runnerd.core.oom import SIGKILL, oom_verdict
from runnerd.protocol.exits import Oom, OomVerdict

SIGTERM = 15


@pytest.mark.parametrize("signal", [None, SIGTERM, SIGKILL])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, Oom(kills=None, verdict="unknown")),
        (None, 3, Oom(kills=None, verdict="unknown")),
        (3, None, Oom(kills=None, verdict="unknown")),
        (0, 0, Oom(kills=0, verdict="none")),
        (3, 3, Oom(kills=0, verdict="none")),
        (3, 1, Oom(kills=0, verdict="none")),  # another cgroup's counter: no evidence
    ],
)
def test_without_a_rise_nothing_else_matters(
    before: int | None,
    after: int | None,
    expected: Oom,
    signal: int | None,
    ours: bool,
    alone: bool,
) -> None:
    assert oom_verdict(before, after, signal=signal, ours=ours, alone=alone) == expected


@pytest.mark.parametrize(
    ("signal", "ours", "alone", "verdict"),
    [
        (None, False, True, "child"),
        (None, False, False, "child"),
        (None, True, True, "child"),
        (None, True, False, "child"),
        (SIGTERM, False, True, "child"),
        (SIGTERM, False, False, "child"),
        (SIGTERM, True, True, "child"),
        (SIGTERM, True, False, "child"),
        (SIGKILL, False, True, "killed"),
        (SIGKILL, False, False, "possible"),
        (SIGKILL, True, True, "child"),
        (SIGKILL, True, False, "child"),
    ],
)
@pytest.mark.parametrize("rise", [1, 7])
def test_a_rise_is_judged_by_who_can_have_been_meant(
    signal: int | None, ours: bool, alone: bool, verdict: OomVerdict, rise: int
) -> None:
    expected = Oom(kills=rise, verdict=verdict)
    assert oom_verdict(2, 2 + rise, signal=signal, ours=ours, alone=alone) == expected
