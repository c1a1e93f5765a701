"""What `events.subscribe` answers and what it tells; see answers.py for the other answers."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

EVENT_KINDS: Final = {
    "exec_started": "execve succeeded: `exec_id`, `pid`",
    "exec_exited": "an exit was published: `exec_id`, `code` or `signal`, `reason`, `oom`",
    "exec_closed": "nothing of an exec is left: `exec_id`",
    "oom_kill": "the kernel killed for want of memory in the daemon's cgroup: `kills`",
    "memory_pressure": "its level changed: `level`, `some_percent`, `full_percent`, `source`",
    "draining": "new work is refused from now on",
    "serving_again": "and is taken again",
    "stopping": "the stop has begun: `cause`",
    "owner_changed": "the sandbox has a new owner: `fence`, `owner` where it is named",
    "events_lost": "`lost` events are not told: this reader was too slow for them",
    "heartbeat": "nothing was told for 5 s: `number` is still that of the last event",
}
"""Every kind: when it is told, and the fields it has."""


class EventsAnswer(msgspec.Struct, kw_only=True):
    """The answer to events.subscribe: how things stand where the events begin.

    Attributes:
        subscription: An integer unique on the connection.
        number: Of the last event before those to come.
        at: Unix seconds.
        state: serving, draining or stopping.
        pressure: The memory pressure's level, normal or high; null where it cannot be read.
        pressure_source: cgroup or system: whose; null with it.
    """

    subscription: int
    number: int
    at: float
    state: Literal["serving", "draining", "stopping"]
    pressure: Literal["normal", "high"] | None
    pressure_source: Literal["cgroup", "system"] | None


class EventNote(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something happened. A field that is absent is null, or is not of this kind.

    Attributes:
        subscription: Whose.
        number: Rises by one with every event; after `events_lost` by as many as it says.
        at: Unix seconds.
        kind: See the table of kinds; one that is not known is to be passed over.
        exec_id: The exec.
        pid: The command's pid.
        code: 0-255, what the command passed to exit().
        signal: 1-64, the signal that ended it.
        reason: Who ended it, as in Exit.
        oom: The verdict, as in Oom.
        kills: How many, since the last such event.
        level: normal or high.
        some_percent: Of the last 10 s, in which some task stood still for want of memory.
        full_percent: In which all did; null where the kernel does not say.
        source: cgroup: the daemon's own; system: the whole machine's, so perhaps others' doing.
        cause: What began the stop, as in daemon.stopping.
        fence: The new owner's.
        owner: Its name.
        lost: How many events were not told; null where a client came back from a lost connection
            and cannot know.
    """

    subscription: int
    number: int
    at: float
    kind: str
    exec_id: str | None = None
    pid: int | None = None
    code: int | None = None
    signal: int | None = None
    reason: str | None = None
    oom: str | None = None
    kills: int | None = None
    level: str | None = None
    some_percent: float | None = None
    full_percent: float | None = None
    source: str | None = None
    cause: str | None = None
    fence: int | None = None
    owner: str | None = None
    lost: int | None = None
