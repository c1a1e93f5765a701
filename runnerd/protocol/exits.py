"""How an exec ends, as it is told: the exit, what it used, who was signalled, who is left.

What the platform does not report is null, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "running", "draining", "lingering", "closed"]
Reason = Literal[
    "exited", "cancelled", "deadline", "orphaned", "stalled", "stopped", "lost", "internal"
]
OomVerdict = Literal["none", "child", "possible", "killed", "unknown"]


class StreamCount(msgspec.Struct, kw_only=True):
    """Bytes of one stream: total = kept + dropped.

    Attributes:
        total_bytes: Bytes the command wrote that were read before its exit was published.
        kept_bytes: Bytes still in the transcript.
        dropped_bytes: Bytes read and no longer kept.
        sha256: Hex SHA-256 of all total_bytes, where asked for.
    """

    total_bytes: int
    kept_bytes: int
    dropped_bytes: int
    sha256: str | None = None


class Oom(msgspec.Struct, kw_only=True):
    """What the cgroup's OOM-kill counter did over the exec's life.

    Attributes:
        kills: The counter's rise, or None where it cannot be read.
        verdict: none; child (a rise, the command not killed); possible (a KILL that was not
            ours, a rise, other execs lived meanwhile); killed; unknown (counter unreadable).
    """

    kills: int | None
    verdict: OomVerdict


class Phases(msgspec.Struct, kw_only=True):
    """Where an exec's time went, in milliseconds from its acceptance; None = did not happen.

    Attributes:
        spawned_ms: The job was handed to a shim.
        started_ms: execve had succeeded.
        first_byte_ms: The first output was read.
        exited_ms: The command had exited.
        drained_ms: Its exit was published.
        queued_ms: Before all those: it had waited for its turn, and the hand-over to a shim began.
    """

    spawned_ms: float | None = None
    started_ms: float | None = None
    first_byte_ms: float | None = None
    exited_ms: float | None = None
    drained_ms: float | None = None
    queued_ms: float | None = None


class Exit(msgspec.Struct, kw_only=True):
    """How a command ended. Never made up: code XOR signal, both null only for lost and internal.

    Attributes:
        exec_id: The exec.
        code: 0-255, what the command passed to exit().
        signal: 1-64, the signal that ended it.
        core_dumped: Whether the kernel wrote a core file.
        reason: Who ended it, fixed by whoever acted first.
        forced: Whether KILL was needed.
        started_at: Unix seconds, for people.
        ended_at: Unix seconds, for people.
        wall_s: Seconds from execve to exit, monotonic.
        cpu_user_s: CPU seconds in user mode, of the command and the children it waited for.
        cpu_system_s: CPU seconds in the kernel, of the same.
        peak_rss_bytes: The largest resident set of any of them.
        minor_faults: Page faults without I/O.
        major_faults: Page faults with I/O.
        block_reads: Block input operations.
        block_writes: Block output operations.
        peak_processes: The most of its processes that were seen at once. The daemon looks where it
            has a reason to (usage asked for, a silence, an ending), so there may have been more;
            null where nobody looked.
        peak_tasks: The most threads of all its processes that lived at once, as the kernel
            counted them: never fewer than there were processes. Null where the exec has no cgroup
            of its own that counts them (pids controller, Linux 6.1).
        oom: See Oom.
        phases: See Phases.
        stdout: See StreamCount.
        stderr: See StreamCount; empty where stderr was merged, null, or a terminal's.
    """

    exec_id: str
    code: int | None
    signal: int | None
    core_dumped: bool
    reason: Reason
    forced: bool
    started_at: float | None
    ended_at: float
    wall_s: float | None
    cpu_user_s: float | None
    cpu_system_s: float | None
    peak_rss_bytes: int | None
    minor_faults: int | None
    major_faults: int | None
    block_reads: int | None
    block_writes: int | None
    oom: Oom
    phases: Phases
    stdout: StreamCount
    stderr: StreamCount
    peak_processes: int | None = None
    peak_tasks: int | None = None


class Closed(msgspec.Struct, kw_only=True):
    """Nothing of the exec is left.

    Attributes:
        discarded_bytes: What leftovers wrote after the exit was published; read, thrown away.
        closed_at: Unix seconds, for people.
    """

    discarded_bytes: int
    closed_at: float


class ReceiptProcess(msgspec.Struct, kw_only=True):
    """One process of a tree that was signalled.

    Attributes:
        pid: Its pid then.
        place: group = in the command's group; session = had left the group; outside = had left
            the session.
        found: children = through the parent's child list; scan = through a scan of /proc.
    """

    pid: int
    place: Literal["group", "session", "outside"]
    found: Literal["children", "scan"]


class Survivor(msgspec.Struct, kw_only=True):
    """One process that could not be ended.

    Attributes:
        pid: Its pid.
        reason: D = uninterruptible sleep; user = another user's; other.
        command: Its name, where it could be read.
    """

    pid: int
    reason: Literal["D", "user", "other"]
    command: str | None


class Receipt(msgspec.Struct, kw_only=True):
    """What ending a tree did.

    Attributes:
        grace_s: The grace that was in force.
        termed: Processes sent TERM (each once), at most 200 listed.
        termed_total: How many.
        gone: How many were already gone when their turn came.
        killed: Processes sent KILL, at most 200 listed.
        killed_total: How many.
        survivors: Who is left.
    """

    grace_s: float | None = None
    termed: list[ReceiptProcess] = []
    termed_total: int = 0
    gone: int = 0
    killed: list[ReceiptProcess] = []
    killed_total: int = 0
    survivors: list[Survivor] = []
