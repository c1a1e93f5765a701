"""Whether the sandbox is idle, since when, and why not. No I/O, no clock.

Rule 1: what counts is an exec whose command lives or whose exit is still to come, somebody attached
to an exec, a pin, and work within the time asked for.
Rule 2: looking is no activity: neither is a connection, nor a read, nor a reader of what is over.
Rule 3: what a command left running is listed, and counts only where that is asked for.
Rule 4: `idle_for_s` is counted from the last moment at which anything counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from runnerd.protocol.errors import RequestError
from runnerd.protocol.sandbox_answers import IdleReason, Pin

from .bounds import PINS_MAX

WORK: Final = frozenset(
    {
        "exec.write",
        "exec.signal",
        "exec.resize",
        "exec.cancel",
        "env.set",
        "sandbox.claim",  # or a sandbox just resumed would be stopped under its new owner
    }
)
"""Requests that are work once they are not refused. A start is, as it is accepted."""

_NAMED: Final = 3
_UNPIN_S: Final = 60.0  # when to come back where no pin ends by itself


class Facts(NamedTuple):
    """What there is right now.

    Attributes:
        execs: Ids of execs whose command lives or whose exit is still to come.
        leftovers: Ids of execs of which only what the command left running lives.
        attached: Subscriptions to all of these.
    """

    execs: Sequence[str] = ()
    leftovers: Sequence[str] = ()
    attached: int = 0


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        reasons: Why it is not idle; empty where it is.
        idle_for_s: Seconds since anything counted; 0 while something does.
        facts: What there was.
        pins: Oldest first.
    """

    reasons: list[IdleReason]
    idle_for_s: float
    facts: Facts
    pins: list[Pin]


class _Pin(NamedTuple):
    since_s: float
    until_s: float | None


class Activity:
    """What is remembered of it. All times are monotonic seconds.

    Args:
        now_s: When the daemon began; that counts as work.
    """

    def __init__(self, now_s: float) -> None:
        self._worked_s = now_s
        self._leftovers_s = now_s
        self._pins: dict[str, _Pin] = {}

    def worked(self, now_s: float) -> None:
        """Work was asked for, or something that counts has just ended."""
        self._worked_s = max(self._worked_s, now_s)

    def leftovers_ended(self, now_s: float) -> None:
        """What a command left running has just ended."""
        self._leftovers_s = max(self._leftovers_s, now_s)

    def pin(self, reason: str, ttl_s: float | None, now_s: float) -> bool:
        """Keep it from being idle; returns whether there was a pin of that reason.

        Args:
            reason: Why; what the pin is known by.
            ttl_s: Seconds until it ends by itself, None = it does not.
            now_s: Monotonic.

        Raises:
            RequestError: busy where there are PINS_MAX others.
        """
        self._expire(now_s)
        was_pinned = self._pins.pop(reason, None) is not None
        if len(self._pins) >= PINS_MAX:
            ends = [pin.until_s - now_s for pin in self._pins.values() if pin.until_s is not None]
            raise RequestError(
                "busy",
                f"the sandbox has {PINS_MAX} pins; that is the most",
                hint="end one that is no longer needed (runnerctl unpin)",
                retry_after_s=min(ends, default=_UNPIN_S),
            )
        self._pins[reason] = _Pin(now_s, None if ttl_s is None else now_s + ttl_s)
        return was_pinned

    def unpin(self, reason: str, now_s: float) -> bool:
        """End a pin; returns whether there was one."""
        self._expire(now_s)
        was_pinned = self._pins.pop(reason, None) is not None
        if was_pinned:
            self.worked(now_s)
        return was_pinned

    def pins(self, now_s: float) -> list[Pin]:
        """Return those in force, oldest first."""
        self._expire(now_s)
        return [
            Pin(
                reason=reason,
                age_s=now_s - pin.since_s,
                left_s=None if pin.until_s is None else pin.until_s - now_s,
            )
            for reason, pin in self._pins.items()
        ]

    def _expire(self, now_s: float) -> None:
        over = {
            reason: pin.until_s
            for reason, pin in self._pins.items()
            if pin.until_s is not None and pin.until_s <= now_s
        }
        for reason, until_s in over.items():
            del self._pins[reason]
            self.worked(until_s)

    def look(self, facts: Facts, now_s: float, *, for_s: float, leftovers_count: bool) -> Verdict:
        """Judge.

        Args:
            facts: What there is now.
            now_s: Monotonic.
            for_s: How many seconds without work make it idle; 0 = none.
            leftovers_count: Whether leftovers keep it from being idle.
        """
        pins = self.pins(now_s)
        last_s = max(self._worked_s, self._leftovers_s) if leftovers_count else self._worked_s
        reasons: list[IdleReason] = []
        if facts.execs:
            reasons.append("live_execs")
        if facts.attached:
            reasons.append("attached_clients")
        if facts.leftovers and leftovers_count:
            reasons.append("leftovers")
        if pins:
            reasons.append("pin")
        idle_for_s = 0.0 if reasons else max(0.0, now_s - last_s)
        if now_s - last_s < for_s:
            reasons.append("recent_work")
        return Verdict(reasons, idle_for_s, facts, pins)


def not_idle(verdict: Verdict, for_s: float) -> RequestError:
    """Return the refusal of what was to be done to an idle sandbox only.

    Args:
        verdict: As Activity.look found it, with reasons.
        for_s: For how long it was to be idle.
    """
    facts = verdict.facts
    words = {
        "live_execs": f"{_count(len(facts.execs), 'exec')} live ({_named(facts.execs)})",
        "attached_clients": f"{_count(facts.attached, 'reader')} attached",
        "leftovers": f"{_count(len(facts.leftovers), 'exec')} left something running "
        f"({_named(facts.leftovers)})",
        "recent_work": f"it worked less than {for_s:g} s ago",
        "pin": f"pinned ({_named([pin.reason for pin in verdict.pins])})",
    }
    why = ", ".join(words[reason] for reason in verdict.reasons)
    return RequestError(
        "busy",
        f"the sandbox is not idle: {why}",
        hint="try again once it is idle; sandbox.activity, or runnerctl activity, shows why not",
        reasons=verdict.reasons,
        # The work that has just been seen is over now at the earliest.
        retry_after_s=max(0.1, for_s - verdict.idle_for_s),
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_NAMED])
    return f"{shown}, ..." if len(names) > _NAMED else shown
