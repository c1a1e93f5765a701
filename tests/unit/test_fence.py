"""Who may change the sandbox, once it has had an owner."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.fence import CHANGES, Fence, changes
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import METHODS

FENCES = st.integers(min_value=1, max_value=2**63 - 1)
ASKED = st.one_of(st.none(), st.just("current"), FENCES)


def may_change(fence: Fence, held: int | None) -> bool:
    try:
        fence.check(held)
    except RequestError:
        return False
    return True


def test_a_refusal_says_the_highest_fence_and_that_nothing_changed() -> None:
    with pytest.raises(RequestError) as caught:
        Fence(7).check(6)
    assert caught.value.kind == "fenced"
    assert caught.value.data.fence == 7
    assert caught.value.data.preserved == "nothing ran, nothing changed"


def test_every_method_is_said_to_change_something_or_not() -> None:
    assert set(CHANGES) == set(METHODS)


def test_what_starts_ends_feeds_or_hides_is_a_change_and_looking_is_none() -> None:
    assert {method for method, is_change in CHANGES.items() if is_change} == {
        "exec.start",
        "exec.write",
        "exec.signal",
        "exec.resize",
        "exec.cancel",
        "exec.forget",
        "env.set",
        "sandbox.claim",
        "sandbox.pin",
        "daemon.drain",
        "daemon.undrain",
        "daemon.stop",
    }


def test_an_attach_changes_something_only_under_a_name() -> None:
    assert not changes("exec.attach")
    assert changes("exec.attach", "reader")
    assert not changes("exec.wait", "reader")


def test_before_the_first_fence_everyone_may_change_things() -> None:
    fence = Fence()
    assert may_change(fence, fence.hold(None))
    assert may_change(fence, fence.hold("current"))
    assert fence.highest is None


def test_from_the_first_fence_on_only_its_holder_may() -> None:
    fence = Fence()
    without, operator = fence.hold(None), fence.hold("current")
    owner = fence.hold(5)
    assert fence.highest == 5
    assert may_change(fence, owner)
    assert not may_change(fence, without)
    assert not may_change(fence, operator)


def test_the_same_fence_is_the_same_owner_on_another_connection() -> None:
    fence = Fence(5)
    assert may_change(fence, fence.hold(5))
    assert not fence.is_new(5)


def test_a_lower_fence_only_reads_and_lowers_nothing() -> None:
    fence = Fence(5)
    assert not may_change(fence, fence.hold(4))
    assert fence.highest == 5


def test_a_newer_owner_ends_an_older_one_and_the_override_too() -> None:
    fence = Fence()
    older, operator = fence.hold(5), fence.hold("current")
    assert may_change(fence, operator)
    newer = fence.hold(6)
    assert may_change(fence, newer)
    assert not may_change(fence, older)
    assert not may_change(fence, operator)


@given(st.lists(ASKED, max_size=20))
def test_it_only_grows_and_its_holder_alone_may_change(
    asked: list[int | Literal["current"] | None],
) -> None:
    fence = Fence()
    held: list[int | None] = []
    for each in asked:
        before = fence.highest
        is_new = fence.is_new(each)
        held.append(fence.hold(each))
        assert is_new == (fence.highest != before)
        assert (fence.highest or 0) >= (before or 0)
    numbers = [each for each in asked if isinstance(each, int)]
    assert fence.highest == (max(numbers) if numbers else None)
    for each in held:
        assert may_change(fence, each) == (fence.highest is None or each == fence.highest)
