"""Describe execs and the daemon itself, for inspect, list and info."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from runnerd.core.life import State
from runnerd.core.past import Past
from runnerd.protocol.answers import ExecInfo, Holder, StartAnswer, Usage
from runnerd.protocol.daemon_answers import DaemonInfo
from runnerd.protocol.exits import Exit
from runnerd.protocol.requests import PROTOCOL_VERSIONS

from .linux import PR_GET_DUMPABLE, prctl
from .processes import process_infos
from .procfs import Stat, holds_one_of, read_stat
from .procfs import tree as descendants
from .running import Running

if TYPE_CHECKING:
    from .service import Service

_NAMES_LISTED: Final = 200


def exec_info(
    service: Service,
    running: Running,
    *,
    usage: bool,
    tree: bool = False,
    holders: bool = False,
) -> ExecInfo:
    """Describe one exec.

    Args:
        service: The daemon's shared parts.
        running: The exec.
        usage: Whether to read its processes' use of memory and CPU.
        tree: Whether to describe each process.
        holders: Whether to look who keeps its pipes open after the exit.
    """
    its_exec = running.exec
    transcript, stdin = its_exec.transcript, its_exec.stdin
    members: list[Stat] | None = []
    lingers = its_exec.state in (State.DRAINING, State.LINGERING)
    if ((usage or tree) and its_exec.is_live) or (holders and lingers):
        members = _members(running)
    return ExecInfo(
        exec_id=its_exec.exec_id,
        state=its_exec.state.shown,  # type: ignore[arg-type]
        argv=its_exec.argv,
        cwd=its_exec.cwd,
        user=its_exec.user,
        labels=its_exec.labels,
        pid=its_exec.pid if its_exec.status is None else None,
        incarnation=service.incarnation,
        accepted=its_exec.number,
        accepted_at=its_exec.accepted_at,
        age_s=time.monotonic() - its_exec.accepted_s,
        flow=its_exec.gate.flow,
        first_seq=transcript.first_seq,
        last_seq=transcript.last_seq,
        stdin_accepted_bytes=0 if stdin is None else stdin.accepted_bytes,
        stdin_open=stdin is not None and stdin.is_open and not stdin.eof,
        subscriptions=len(running.readers),
        transcript=transcript.state,
        pty=running.streams.terminal_size,
        spool=transcript.spool.state,
        spool_reason=transcript.spool.reason,
        ending=its_exec.ending,
        survivors=its_exec.survivors,
        holders=_holders(running, members) if holders and lingers and members else [],
        exit=its_exec.exit,
        closed=its_exec.closed,
        usage=_usage(running, members) if usage and members is not None else None,
        processes=process_infos(members) if tree and members else [],
        output_bytes=sum(transcript.total_bytes),
    )


def past_info(past: Past) -> ExecInfo:
    """Describe an exec of which no more is known than how it ended, if that."""
    return ExecInfo(
        exec_id=past.exec_id,
        state="closed",
        argv=past.argv,
        cwd=past.cwd,
        user=past.user,
        labels=past.labels or {},
        pid=None,
        incarnation=past.incarnation,
        accepted=past.number,
        accepted_at=past.accepted_at,
        age_s=max(0.0, time.time() - past.accepted_at),
        flow=None,
        first_seq=None,
        last_seq=None,
        stdin_accepted_bytes=None,
        stdin_open=False,
        subscriptions=0,
        transcript=past.transcript,
        output_bytes=None if past.exit is None else _output_bytes(past.exit),
        exit=past.exit,
        closed=past.closed,
    )


def _output_bytes(its_exit: Exit) -> int:
    return its_exit.stdout.total_bytes + its_exit.stderr.total_bytes


def start_answer(past: Past) -> StartAnswer:
    """Answer a start again whose exec is past: as the first time, but for the subscription."""
    assert past.pid is not None
    return StartAnswer(
        exec_id=past.exec_id,
        pid=past.pid,
        created=False,
        starts=past.number,
        oom_score_adj=past.oom_score_adj,
        journaled=past.journaled,
    )


def _members(running: Running) -> list[Stat] | None:
    """Return its living processes, None where we cannot look."""
    try:
        found = running.tree.adopted_members()
        if found is None:
            found = [] if running.tree.shim_pid is None else descendants(running.tree.shim_pid)
    except OSError:
        return None
    living = [stat for stat in found if stat.state not in "ZX"]
    running.exec.saw_processes(len(living))
    return living


def _usage(running: Running, members: list[Stat]) -> Usage:
    shim = None if running.tree.shim_pid is None else read_stat(running.tree.shim_pid)
    return Usage(
        processes=len(members),
        rss_bytes=sum(stat.rss_bytes for stat in members),
        cpu_s=(0.0 if shim is None else shim.waited_cpu_s)
        + sum(stat.cpu_s + stat.waited_cpu_s for stat in members),
    )


def _holders(running: Running, members: list[Stat]) -> list[Holder]:
    links = running.streams.links()
    if not links:
        return []
    seen = [(stat, holds_one_of(stat.pid, links)) for stat in members]
    certain = [
        Holder(pid=stat.pid, command=stat.command, certain=True) for stat, holds in seen if holds
    ]
    return certain or [
        Holder(pid=stat.pid, command=stat.command, certain=False)
        for stat, holds in seen
        if holds is None
    ]


def own_rss_bytes() -> int | None:
    """Return the daemon's own resident set, None where we cannot look."""
    try:
        stat = read_stat(os.getpid())
    except OSError:
        return None
    return None if stat is None else stat.rss_bytes


def daemon_info(service: Service) -> DaemonInfo:
    """Describe the daemon."""
    counters, registry = service.counters, service.registry
    return DaemonInfo(
        version=service.version,
        protocol=list(PROTOCOL_VERSIONS),
        incarnation=service.incarnation,
        pid=os.getpid(),
        uid=os.geteuid(),
        socket=service.socket_path,
        state=registry.state,
        started_at=service.started_at,
        uptime_s=time.monotonic() - service.started_s,
        python=sys.version.split()[0],
        guard=service.guard.kind,
        subreaper=service.is_subreaper,
        dumpable=bool(prctl(PR_GET_DUMPABLE)),
        rss_bytes=own_rss_bytes(),
        state_directory=service.state_path,
        journal=service.journal.is_on,
        journal_reason=service.journal.reason,
        fence=service.fencing.fence.highest,
        claim=service.claiming.ownership.claim,
        claim_durable=service.claiming.is_durable,
        claim_reason=None if service.claiming.is_durable else service.claiming.reason,
        starts=registry.starts,
        live_execs=registry.live_count,
        connections=counters.connections,
        subscriptions=counters.subscriptions,
        parked_shims=service.pool.parked,
        stray_failures=counters.stray_failures.total(),
        kill_leaves=service.leaves.kill,
        memory_leaves=service.leaves.memory,
        oom_order=service.oom_order,
        memory_admission=service.memory_gauge.info(),
        spool_directory=service.spool.place.directory,
        spool_reason=service.spool.place.reason,
        limits=service.limits,
        features=service.features,
        env_set=service.launcher.environment.changed(to_set=True)[:_NAMES_LISTED],
        env_unset=service.launcher.environment.changed(to_set=False)[:_NAMES_LISTED],
        warnings=service.warnings_now(),
    )
