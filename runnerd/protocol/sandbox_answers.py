"""Answers about the sandbox: whose it is, what keeps it from counting as idle."""

from __future__ import annotations

from typing import Literal

import msgspec

IdleReason = Literal["live_execs", "attached_clients", "leftovers", "recent_work", "pin"]


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """Whose the sandbox is. All null: it is claimed, and what was written of it cannot be read.

    Attributes:
        owner: As claimed.
        claimed_at: Unix seconds, for people.
        incarnation: The daemon start that was asked.
        fence: The fence it was claimed with.
    """

    owner: str | None
    claimed_at: float | None
    incarnation: str | None
    fence: int | None


class ClaimAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.claim.

    Attributes:
        claim: The claim in force, see Claim.
        created: False where the same claim had been made before, and was asked for again.
        previous: The claim it took the place of; null where there was none, or for one asked for
            again.
        durable: Whether it outlives this daemon and a loss of power.
    """

    claim: Claim
    created: bool
    previous: Claim | None
    durable: bool


class Pin(msgspec.Struct, kw_only=True):
    """What keeps the sandbox from counting as idle, on purpose.

    Attributes:
        reason: As given.
        age_s: Seconds since it was set, or set again.
        left_s: Seconds until it ends by itself; null = it does not.
    """

    reason: str
    age_s: float
    left_s: float | None


class PinAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.pin.

    Attributes:
        was_pinned: Whether there was a pin of that reason.
        pins: All there are now, oldest first.
    """

    was_pinned: bool
    pins: list[Pin]


class ActivityAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.activity.

    Attributes:
        idle: Whether daemon.drain would take place under the same condition.
        idle_for_s: Seconds since the last work ended; 0 while something counts as activity.
        reasons: Why it is not idle: live_execs, attached_clients, leftovers (where they count),
            recent_work, pin; empty where it is.
        execs: Ids of the execs whose command lives or whose exit is still to come, the first 100.
        execs_total: How many.
        attached_total: Subscriptions to execs that are not closed, leftovers included.
        leftovers: Ids of the execs of which only what the command left running lives, the first
            100.
        leftovers_total: How many.
        pins: Oldest first.
        state: serving, draining or stopping.
    """

    idle: bool
    idle_for_s: float
    reasons: list[IdleReason]
    execs: list[str]
    execs_total: int
    attached_total: int
    leftovers: list[str]
    leftovers_total: int
    pins: list[Pin]
    state: Literal["serving", "draining", "stopping"]
