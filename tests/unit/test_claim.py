"""Whose the sandbox is: of any number who create it one succeeds, who resumes it says so."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.claim import UNKNOWN, Ownership, Standing, Taken
from runnerd.core.fence import Fence
from runnerd.protocol.errors import RequestError
from runnerd.protocol.sandbox_answers import Claim

Expect = Literal["unclaimed", "claimed", "any"]
WALL_S = 1_700_000_000.0


def take(
    ownership: Ownership,
    owner: str = "a",
    expect: Expect = "any",
    nonce: str | None = None,
    held: int | None = 1,
) -> Taken | RequestError:
    try:
        return ownership.take(owner, expect, nonce, held=held, wall_s=WALL_S)
    except RequestError as error:
        return error


def test_a_claim_without_a_fence_is_refused_and_says_what_it_needs() -> None:
    ownership = Ownership(None, "i")
    error = take(ownership, held=None)
    assert isinstance(error, RequestError)
    assert error.kind == "fenced"
    assert "needs a fence" in error.message
    assert ownership.claim is None


def test_already_claimed_says_who_since_when_and_which_incarnation() -> None:
    claim = Claim(owner="first", claimed_at=WALL_S, incarnation="before", fence=3)
    error = take(Ownership(Standing(claim), "now"), expect="unclaimed", held=4)
    assert isinstance(error, RequestError)
    assert (error.kind, error.data.layer) == ("already_claimed", "sandbox")
    assert (error.data.owner, error.data.claimed_at) == ("first", WALL_S)
    assert (error.data.incarnation, error.data.fence) == ("before", 3)
    assert error.message == (
        "'first' claimed the sandbox at 2023-11-14 22:13:20 UTC, of incarnation before"
    )


def test_not_claimed_says_which_incarnation_knows_of_none() -> None:
    error = take(Ownership(None, "now"), expect="claimed")
    assert isinstance(error, RequestError)
    assert (error.kind, error.data.incarnation) == ("not_claimed", "now")


def test_what_cannot_be_read_is_somebodys() -> None:
    ownership = Ownership(Standing(UNKNOWN), "i")
    error = take(ownership, expect="unclaimed")
    assert isinstance(error, RequestError)
    assert (error.kind, error.data.owner) == ("already_claimed", None)
    taken = take(ownership, "b", expect="claimed")
    assert isinstance(taken, Taken)
    assert taken.previous == UNKNOWN
    assert ownership.claim is not None
    assert ownership.claim.owner == "b"


class Try(NamedTuple):
    owner: str
    expect: Expect
    nonce: str | None
    fence: int | None
    restarts: bool


TRIES = st.lists(
    st.builds(
        Try,
        st.sampled_from("abc"),
        st.sampled_from(["unclaimed", "claimed", "any"]),
        st.sampled_from([None, "m", "n"]),
        st.none() | st.integers(1, 4),
        st.booleans(),
    ),
    max_size=30,
)


@given(TRIES)
def test_over_any_history_of_owners_and_restarts(tries: list[Try]) -> None:
    """Beside a plain account of who was told what: nobody is told twice that it was new."""
    ownership, fence = Ownership(None, "i0"), Fence()
    account: list[tuple[str, str | None, str, int]] = []  # owner, nonce, incarnation, fence
    created_new = 0
    for number, each in enumerate(tries):
        if each.restarts:
            ownership = Ownership(ownership.standing, f"i{number}")
        held = fence.hold(each.fence)
        before = ownership.standing
        last = account[-1] if account else None
        try:
            fence.check(held)
        except RequestError:
            continue
        outcome = take(ownership, each.owner, each.expect, each.nonce, held)
        if held is None:
            expected = "fenced"
        elif last is not None and each.nonce is not None and last[:2] == (each.owner, each.nonce):
            expected = "again"
        elif last is not None and each.expect == "unclaimed":
            expected = "already_claimed"
        elif last is None and each.expect == "claimed":
            expected = "not_claimed"
        else:
            expected = "taken"
        if isinstance(outcome, RequestError):
            assert outcome.kind == expected
            assert ownership.standing == before
            continue
        assert outcome.standing == ownership.standing
        assert ("taken" if outcome.created else "again") == expected
        if outcome.created:
            assert (outcome.previous is None) == (last is None)
            created_new += last is None
            assert held is not None
            incarnation = outcome.standing.claim.incarnation
            assert incarnation is not None
            account.append((each.owner, each.nonce, incarnation, held))
        else:
            assert ownership.standing == before
        claim = ownership.claim
        assert claim is not None
        assert (claim.owner, claim.incarnation, claim.fence) == (
            account[-1][0],
            *account[-1][2:],
        )
    assert created_new <= 1
