"""Every metric of the daemon: its name, what it tells, and where its number comes from.

No label's value comes from a user: each is one of a few words of the daemon's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .counters import Histogram
    from .service import Service

LIVE_STATES: Final = ("starting", "running", "draining", "lingering")


class Number(NamedTuple):
    """A metric without labels, or an `info` with a constant 1.

    Attributes:
        name: Without _total.
        text: What it tells.
        value: None where it cannot be told here.
        gauge: Whether it goes up and down.
    """

    name: str
    text: str
    value: float | None
    gauge: bool = False


class Labelled(NamedTuple):
    """A metric with one label.

    Attributes:
        name: Without _total.
        text: What it tells.
        label: The label's name.
        values: By the label's value.
        gauge: Whether they go up and down.
    """

    name: str
    text: str
    label: str
    values: Mapping[str, int]
    gauge: bool = False


class Durations(NamedTuple):
    """A histogram, in seconds.

    Attributes:
        name: Of the family.
        text: What it tells.
        histogram: What was counted.
    """

    name: str
    text: str
    histogram: Histogram


Family = Number | Labelled | Durations


def _states(service: Service) -> dict[str, int]:
    states = dict.fromkeys(LIVE_STATES, 0)
    for each in service.registry.live():
        states[each.state.shown] += 1
    return states


def _output_bytes(service: Service) -> dict[str, int]:
    stdout, stderr = (service.counters.output_bytes[name] for name in ("stdout", "stderr"))
    for each in service.registry.live():
        if each.exit is None:
            stdout += each.transcript.total_bytes[0]
            stderr += each.transcript.total_bytes[1]
    return {"stdout": stdout, "stderr": stderr}


def _dropped_bytes(service: Service) -> int:
    return service.counters.dropped_bytes + sum(
        sum(each.transcript.dropped_bytes) for each in service.registry.live() if each.exit is None
    )


def _first_byte(service: Service) -> Histogram:
    return service.counters.first_byte.with_more(
        each.phases.first_byte_ms / 1000
        for each in service.registry.live()
        if each.exit is None and each.phases.first_byte_ms is not None
    )


def exec_families(the: Service) -> Iterator[Family]:
    """Yield what the commands do."""
    yield Number("runnerd_execs_started", "Commands started.", the.counters.started)
    yield Labelled(
        "runnerd_exec_start_failures",
        "Starts that failed, by stage.",
        "stage",
        the.counters.start_failures,
    )
    yield Labelled(
        "runnerd_execs_exited",
        "Exits published, by reason.",
        "reason",
        the.counters.exited,
    )
    yield Labelled(
        "runnerd_execs", "Execs not closed, by state.", "state", _states(the), gauge=True
    )
    yield Durations(
        "runnerd_exec_start_duration_seconds",
        "From acceptance to execve.",
        the.counters.start_duration,
    )
    yield Durations(
        "runnerd_exec_first_byte_duration_seconds",
        "From acceptance to the first output, of execs that had any.",
        _first_byte(the),
    )
    yield Durations(
        "runnerd_exec_duration_seconds",
        "From execve to exit.",
        the.counters.exec_duration,
    )
    yield Number(
        "runnerd_survivors",
        "Processes KILL did not end in time.",
        the.counters.survivors,
    )
    yield Number(
        "runnerd_oom_kills",
        "Processes the kernel has killed for memory in the daemon's cgroup and those of its execs.",
        the.oom_kills_seen(),
    )
    yield Labelled("runnerd_output_bytes", "Output read, by stream.", "stream", _output_bytes(the))
    yield Number(
        "runnerd_output_dropped_bytes",
        "Output read and not kept for readers, up to the exit.",
        _dropped_bytes(the),
    )
    yield Number(
        "runnerd_transcript_bytes",
        "Memory that all transcripts cost.",
        the.registry.budget.used_bytes,
        gauge=True,
    )
    yield Number(
        "runnerd_spool_bytes",
        "Disk space that all transcripts take.",
        the.spool.used_bytes,
        gauge=True,
    )
    yield Number(
        "runnerd_spool_degraded",
        "Transcripts given up on disk: it failed, filled up or was too slow.",
        the.counters.spool_degraded,
    )


def daemon_families(the: Service) -> Iterator[Family]:
    """Yield what the daemon does."""
    yield Number(
        "runnerd_connections",
        "Open connections.",
        the.counters.connections,
        gauge=True,
    )
    yield Number(
        "runnerd_subscriptions",
        "Open subscriptions.",
        the.counters.subscriptions,
        gauge=True,
    )
    yield Number(
        "runnerd_subscriptions_superseded",
        "Subscriptions that a newer attach of the same name ended.",
        the.counters.superseded,
    )
    yield Labelled(
        "runnerd_refusals",
        "Requests and connections refused, by kind.",
        "kind",
        the.counters.refusals,
    )
    yield Labelled(
        "runnerd_stray_failures",
        "Failures survived, by task.",
        "task",
        the.counters.stray_failures,
    )
    yield Labelled(
        "runnerd_starts_unjournaled",
        "Starts that went on without being in the journal, by reason.",
        "reason",
        the.counters.starts_unjournaled,
    )
    yield Number(
        "runnerd_journal",
        "Whether there is a working journal.",
        the.journal.is_on,
        gauge=True,
    )
    yield Number(
        "runnerd_journal_failures",
        "How often the journal failed.",
        the.journal.failures,
    )
    yield Number(
        "runnerd_audit_lines",
        "Changes written down, where --audit asks for it.",
        None if the.audit is None else the.audit.written,
    )
    yield Number(
        "runnerd_audit_lines_lost",
        "Changes not written down.",
        None if the.audit is None else the.audit.lost,
    )
    yield Labelled(
        "runnerd_tokens_refused",
        "Hellos without the token, or with another one.",
        "what",
        the.counters.tokens_refused,
    )
    yield Number(
        "runnerd_signals_refused",
        "Stop signals sent by the daemon's own descendants, not obeyed.",
        the.counters.signals_refused,
    )
    yield Number(
        "runnerd_accept_failures",
        "Connections not accepted for want of descriptors or memory.",
        the.counters.accept_failures,
    )
    yield Number(
        "runnerd_socket_rebinds",
        "Times that the socket's file was gone and was bound again.",
        the.counters.socket_rebinds,
    )
    yield Number(
        "runnerd_connections_stuck",
        "Connections closed because their peer did not read.",
        the.counters.connections_stuck,
    )
    yield Number("runnerd_shims_lost", "Shims that died early.", the.counters.shims_lost)
    yield Number(
        "runnerd_orphans_reaped",
        "Children reaped that were no shim and no command.",
        the.reaper.orphans,
    )
    yield Number(
        "runnerd_freezes",
        "Times that everything stood still while a clock ran.",
        the.counters.freezes,
    )
    yield Number(
        "runnerd_frozen_seconds",
        "How long, in all.",
        round(the.counters.frozen_s, 3),
    )
    yield Number("runnerd_log_lines_dropped", "Log lines lost.", the.log.dropped)
    yield Number(
        "runnerd_event_loop_lag_seconds",
        "By how much the loop was late at most, in the last minute, as far as it was looked at.",
        round(the.pulse.worst_lag_s(), 6),
        gauge=True,
    )
