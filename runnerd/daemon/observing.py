"""What happens, told where it is kept: to the counters, the log, the journal, and who watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerd.core.execs import Exec
from runnerd.core.registry import Registry
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Exit
from runnerd.protocol.sandbox_answers import Claim

from .counters import Counters

if TYPE_CHECKING:
    from .events import Events
    from .journal import Journal
    from .log import Log


class Observer:
    """Told of every turn in an exec's life, and the daemon's own, by whoever brought it about.

    Args:
        counters: The daemon's.
        log: Where lines go.
        journal: What the next incarnation is to know.
        registry: Says what is to be known of an exec.
        events: Who watches.
    """

    def __init__(
        self, counters: Counters, log: Log, journal: Journal, registry: Registry, events: Events
    ) -> None:
        self._counters = counters
        self._log = log
        self._journal = journal
        self._registry = registry
        self._events = events

    def started(self, its_exec: Exec) -> None:
        """An exec started: execve succeeded."""
        self._counters.started += 1
        self._counters.start_duration.observe((its_exec.phases.started_ms or 0.0) / 1000)
        self._log.debug("exec_started", exec_id=its_exec.exec_id, pid=its_exec.pid)
        if self._journal.exists:
            self._journal.note(self._registry.past_of(its_exec))
        if self._events.is_watched:
            self._events.put("exec_started", exec_id=its_exec.exec_id, pid=its_exec.pid)

    def unjournaled(self, why: str) -> None:
        """A start goes on without being in the journal: there is none, it failed, or is slow."""
        self._counters.starts_unjournaled[why] += 1

    def start_failed(self, its_exec: Exec, error: RequestError) -> None:
        """A start failed."""
        self._counters.start_failures[error.data.stage or error.kind] += 1
        self._log.debug("exec_start_failed", exec_id=its_exec.exec_id, error=error.message)

    def exited(self, its_exec: Exec, its_exit: Exit) -> None:
        """An exit was published."""
        counters = self._counters
        counters.exited[its_exit.reason] += 1
        counters.output_bytes["stdout"] += its_exit.stdout.total_bytes
        counters.output_bytes["stderr"] += its_exit.stderr.total_bytes
        counters.dropped_bytes += its_exit.stdout.dropped_bytes + its_exit.stderr.dropped_bytes
        if its_exec.has_own_oom_kills:
            counters.leaf_oom_kills += its_exit.oom.kills or 0
        if its_exec.phases.first_byte_ms is not None:
            counters.first_byte.observe(its_exec.phases.first_byte_ms / 1000)
        counters.exec_duration.observe(its_exit.wall_s or 0.0)
        self._log.debug(
            "exec_exited",
            exec_id=its_exec.exec_id,
            code=its_exit.code,
            signal=its_exit.signal,
            reason=its_exit.reason,
            wall_s=its_exit.wall_s,
        )
        if self._journal.exists:
            self._journal.exited(self._registry.past_of(its_exec))
        if self._events.is_watched:
            if its_exit.oom.kills:
                self._events.look_for_kills()
            self._events.put(
                "exec_exited",
                exec_id=its_exec.exec_id,
                code=its_exit.code,
                signal=its_exit.signal,
                reason=its_exit.reason,
                oom=its_exit.oom.verdict,
            )

    def closed(self, its_exec: Exec) -> None:
        """Nothing of an exec is left."""
        self._log.debug("exec_closed", exec_id=its_exec.exec_id)
        if self._journal.exists:
            self._journal.note(self._registry.past_of(its_exec))
        if self._events.is_watched:
            self._events.put("exec_closed", exec_id=its_exec.exec_id)

    def draining(self, connection: int) -> None:
        """All new work is refused from now on, as a connection asked."""
        self._log.info("draining", connection=connection)
        self._events.put("draining")

    def serving_again(self, connection: int) -> None:
        """New work is taken again, as a connection asked."""
        self._log.info("serving_again", connection=connection)
        self._events.put("serving_again")

    def stopping(self, cause: str) -> None:
        """The stop has begun; stopping.py logs it, with who began it."""
        self._events.put("stopping", cause=cause)

    def claimed(self, claim: Claim, previous: Claim | None, connection: int) -> None:
        """A claim was taken, from whoever had it before."""
        self._log.info(
            "claimed",
            connection=connection,
            owner=claim.owner,
            fence=claim.fence,
            previous=None if previous is None else previous.owner,
        )
        if claim.fence is not None:
            self.owner_changed(claim.fence, claim.owner)

    def owner_changed(self, fence: int, owner: str | None = None) -> None:
        """The sandbox has a new owner: a higher fence, or a claim that names one."""
        self._events.put("owner_changed", fence=fence, owner=owner)
