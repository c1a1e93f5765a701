"""Whose the sandbox is: claimed in one step with the look at whether it is claimed. No I/O.

A fence says which of several owners is the newest; a claim says who that is, and whether there has
been one at all. Whoever creates a sandbox expects it to be unclaimed, whoever resumes one expects
it to be claimed, and of any number who create the same one at once exactly one succeeds. A claim
is never given back: what was somebody's once is not new.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from runnerd.protocol.errors import RequestError
from runnerd.protocol.sandbox_answers import Claim

UNKNOWN = Claim(owner=None, claimed_at=None, incarnation=None, fence=None)
"""It is claimed, and nobody can tell any more by whom."""


class Standing(NamedTuple):
    """A claim in force, and the mark by which its sender is known.

    Attributes:
        claim: As it is told.
        nonce: As its request gave it.
    """

    claim: Claim
    nonce: str | None = None

    def is_by(self, owner: str, nonce: str) -> bool:
        """Whether this is what that request made."""
        return (self.claim.owner, self.nonce) == (owner, nonce)


class Taken(NamedTuple):
    """What became of a claim.

    Attributes:
        standing: What is in force now.
        created: False where it was in force before: the same request again.
        previous: What it took the place of, or None.
    """

    standing: Standing
    created: bool
    previous: Claim | None


class Ownership:
    """Who has claimed the sandbox.

    Args:
        standing: As an earlier incarnation left it, or None.
        incarnation: This daemon start.

    Attributes:
        standing: The claim in force, or None.
    """

    def __init__(self, standing: Standing | None, incarnation: str) -> None:
        self.standing = standing
        self._incarnation = incarnation

    @property
    def claim(self) -> Claim | None:
        """Whose the sandbox is, or None."""
        return None if self.standing is None else self.standing.claim

    def take(
        self,
        owner: str,
        expect: Literal["unclaimed", "claimed", "any"],
        nonce: str | None,
        *,
        held: int | None,
        wall_s: float,
    ) -> Taken:
        """Claim the sandbox, or refuse with nothing changed.

        Args:
            owner: Who claims it.
            expect: Whether it is to be claimed already.
            nonce: The same owner and nonce are the same claim, asked for again.
            held: The fence of the connection; it has passed Fence.check.
            wall_s: Unix seconds, for people.

        Raises:
            RequestError: fenced without a fence, already_claimed, not_claimed.
        """
        if held is None:
            raise RequestError(
                "fenced",
                "a claim needs a fence, and this connection has none",
                hint="say hello with a fence above all before it (runnerctl --fence N)",
            )
        before = self.standing
        if before is not None and nonce is not None and before.is_by(owner, nonce):
            return Taken(before, created=False, previous=None)
        self._check(expect)
        claim = Claim(owner=owner, claimed_at=wall_s, incarnation=self._incarnation, fence=held)
        self.standing = Standing(claim, nonce)
        return Taken(self.standing, created=True, previous=before and before.claim)

    def _check(self, expect: str) -> None:
        claim = self.claim
        if claim is None and expect == "claimed":
            raise RequestError(
                "not_claimed",
                f"nobody has claimed the sandbox, as incarnation {self._incarnation} knows it",
                incarnation=self._incarnation,
            )
        if claim is not None and expect == "unclaimed":
            facts = {key: value for key, value in msgspec.structs.asdict(claim).items() if value}
            raise RequestError("already_claimed", _words(claim), **facts)


def _words(claim: Claim) -> str:
    if claim.owner is None or claim.claimed_at is None:
        return "the sandbox is claimed, and who by cannot be read any more"
    at = datetime.fromtimestamp(claim.claimed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"'{claim.owner}' claimed the sandbox at {at}, of incarnation {claim.incarnation}"
