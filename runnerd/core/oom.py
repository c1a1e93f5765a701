"""What the rise of an OOM-kill counter says about one exec. Evidence first, then a verdict."""

from __future__ import annotations

from runnerd.protocol.exits import Oom

SIGKILL = 9


def oom_verdict(
    before: int | None, after: int | None, *, signal: int | None, ours: bool, alone: bool
) -> Oom:
    """Judge an exit by the counter's rise over the exec's life.

    Args:
        before: The cgroup's OOM kills at the start; None = unreadable.
        after: The same at the exit.
        signal: The signal that ended the command, or None.
        ours: Whether runnerd sent it a KILL.
        alone: Whether no other exec can have been meant: none lived meanwhile, or the counter is
            that of a cgroup of its own.

    Returns:
        kills and verdict: `killed` only where nothing else can have been meant.
    """
    if before is None or after is None:
        return Oom(kills=None, verdict="unknown")
    kills = max(0, after - before)
    if not kills:
        return Oom(kills=0, verdict="none")
    if signal != SIGKILL or ours:
        return Oom(kills=kills, verdict="child")
    return Oom(kills=kills, verdict="killed" if alone else "possible")
