"""The daemon's parts, put together once, and what they tell each other.

What an exec's life leaves in the counters, the log and the journal is in observing.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

import runnerd
from runnerd.core.activity import Activity
from runnerd.core.bounds import Bounds, limits_of
from runnerd.core.digest import content_of
from runnerd.core.execs import Exec
from runnerd.core.past import Past
from runnerd.core.registry import Registry
from runnerd.protocol.daemon_answers import OomOrder
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import METHODS, ExecStart

from .admission import MemoryGauge
from .audit import Audit
from .audit_file import AuditFile
from .cgroup import Leaves
from .claiming import Claiming
from .counters import Counters
from .events import Events
from .fencing import Fencing
from .freezes import Freezes
from .guard import CAUSE_ERROR, CAUSE_STOP, Guard
from .heart import Heart
from .journal import Journal
from .launcher import Launcher
from .listening import Listener
from .log import Log
from .memory import OomCounter
from .observing import Observer
from .pipes import BigPipes
from .poller import Poller
from .pressure import PressureFile
from .pulse import Pulse
from .reaper import Reaper
from .remembering import Memory
from .resting import Rests
from .running import OnStart, Running
from .shims import ShimPool
from .spares import Spares
from .spool import Spooler
from .spool_file import SpoolPlace
from .stdin_pump import StdinTotals
from .tokens import Token

if TYPE_CHECKING:
    from .connection import Connection
    from .metrics_port import MetricsPort

EXIT_SOFTWARE = 70  # EX_SOFTWARE, sysexits.h: an uncaught error of our own
_EXPIRE_EVERY_S = 30.0
_SAY_HELD_S = 5.0


class Service:
    """One running daemon.

    Args:
        bounds: The limits in force.
        spool_place: Where transcripts go on disk.
        log: Where lines go.
        guard: Holds the stop deadline.
        poller: Descriptors and timers.
        pool: Shims.
        spares: Descriptors held back.
        leaves: Cgroups of execs.
        launcher: Starts.
        reaper: Waits.
        oom_counter: The cgroup's counter.
        oom_order: What was found about it at boot.
        listener: The socket.
        memory_gauge: What is in use of its limit.
        pressure: Where memory pressure is read.
        memory: What earlier incarnations left, and where this one may leave something.
        token: What every hello must carry; None = nothing.
        audit_file: Where changes are written down; None = nowhere.

    Attributes:
        running: Every exec that is live or kept, by id.
        observer: Told of what happens.
        events: Who watches that.
        connections: Open connections.
        pulse: How late the loop is, and whether the socket can be reached.
        metrics_port: Serves the metrics by HTTP, where that was asked for.
        all_children_ours: Whether every process that can become the daemon's child comes from an
            exec.
        incarnation: A random id of this start.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything meets
        self,
        *,
        bounds: Bounds,
        spool_place: SpoolPlace,
        log: Log,
        guard: Guard,
        poller: Poller,
        pool: ShimPool,
        spares: Spares,
        leaves: Leaves,
        incarnation: str,
        launcher: Launcher,
        reaper: Reaper,
        oom_counter: OomCounter,
        oom_order: OomOrder,
        listener: Listener,
        pressure: PressureFile,
        memory_gauge: MemoryGauge,
        is_subreaper: bool,
        all_children_ours: bool,
        warnings: list[str],
        memory: Memory,
        token: Token | None,
        audit_file: AuditFile | None,
    ) -> None:
        self.bounds = bounds
        self.log = log
        self.guard = guard
        self.poller = poller
        self.pool = pool
        self.spares = spares
        self.leaves = leaves
        self.launcher = launcher
        self.reaper = reaper
        self.oom_order = oom_order
        self.memory_gauge = memory_gauge
        self.socket_path = listener.path
        self.pressure = pressure
        self.is_subreaper = is_subreaper
        self.all_children_ours = all_children_ours
        self.warnings = warnings
        self.counters = Counters()
        self.pulse = Pulse(poller, self, log, self.counters, listener)
        self.freezes = Freezes(poller, self, log, self.counters)
        self.incarnation = incarnation
        self.registry = Registry(bounds, self.incarnation, spool_place.slots)
        self.state_path = memory.path
        self.state_trouble = memory.trouble
        self.journal = Journal(
            memory.file,
            memory.reason,
            poller=poller,
            log=log,
            everything=self.registry.everything,
            meta=self._meta,
            on_defect=lambda error: self.uncaught("journal", error),
        )
        self.events = Events(poller, self, oom_counter.read, pressure)
        self.observer = Observer(self.counters, log, self.journal, self.registry, self.events)
        self.fencing = Fencing(
            memory.fence,
            journal=self.journal,
            poller=poller,
            owner=self,
            on_new=self.observer.owner_changed,
        )
        self.claiming = Claiming(
            memory.claim,
            folder=None if memory.directory is None else memory.directory.path,
            incarnation=incarnation,
            poller=poller,
            owner=self,
            log=log,
        )
        self.spool = Spooler(
            spool_place,
            self.registry.budget,
            poller,
            counters=self.counters,
            log=log,
            on_stray=lambda error: self.stray(error, "spool"),
        )
        self.metrics_port: MetricsPort | None = None
        self.running: dict[str, Running] = {}
        self.connections: set[Connection] = set()
        self.heart = Heart(poller, self)
        log.on_held = self._say_held_later
        self.stdin_totals = StdinTotals(bounds)
        self.big_pipes = BigPipes()
        self.rests = Rests(poller, self)
        self.token = token
        self.audit = None
        if audit_file is not None:
            self.audit = Audit(audit_file, poller=poller, owner=self, log=log)
        self.version = runnerd.__version__
        self.features = sorted(METHODS)
        self.started_s = time.monotonic()
        self.started_at = time.time()
        self.activity = Activity(self.started_s)
        self.limits = limits_of(bounds, has_spool=spool_place.slots is not None)
        self.when_idle = trio.Event()  # replaced by who waits for it
        self._oom_counter = oom_counter
        self._oom_kills_before = oom_counter.read()

    def oom_kills(self) -> int | None:
        """Return the cgroup's OOM kills so far, or None."""
        return self._oom_counter.read()

    def oom_kills_seen(self) -> int:
        """Return the OOM kills since the daemon's start, each counted once.

        The cgroup's counter counts what died in cgroups below it too; execs may have theirs
        elsewhere, or ours may have no counter.
        """
        before, now = self._oom_kills_before, self.oom_kills()
        own = 0 if before is None or now is None else now - before
        return max(own, self.counters.leaf_oom_kills)

    # ------------------------------------------------------------------ execs

    def start(self, params: ExecStart, on_start: OnStart, admit: Callable[[], None]) -> None:
        """Start one exec, or answer its start again; `on_start` is told what became of it.

        Args:
            params: As requested.
            on_start: Called once.
            admit: Called before anything is made for a new exec; may refuse it.

        Raises:
            RequestError: Where it was refused; nothing was changed.
        """
        if self.guard.cause() is not None:
            # The lifeline ends natively, before the loop hears of it: parked shims leave already.
            self.registry.state = "stopping"
        exec_id = params.exec_id or f"x-{secrets.token_hex(8)}"
        content = content_of(params)
        now_s = time.monotonic()
        known = self.registry.recall(exec_id, content, params.horizon, now_s)
        if isinstance(known, Past):
            on_start(known, created=False)
            return
        if known is not None:
            self.running[exec_id].join(on_start)
            return
        admit()
        accepted = self.registry.accept(
            exec_id,
            params,
            content=content,
            cwd=params.cwd or self.launcher.cwd,
            now_s=now_s,
            wall_s=time.time(),
            oom_kills=self.oom_kills(),
            memory=self.memory_gauge.use(now_s),
        )
        self.activity.worked(now_s)
        running = Running(self, accepted, params, on_start)
        self.running[accepted.exec_id] = running
        running.start()

    def _meta(self) -> dict[str, int]:
        fence = self.fencing.fence.highest
        return {"dropped": self.registry.dropped_number} | (
            {} if fence is None else {"fence": fence}
        )

    def start_error(self, its_exec: Exec, error: RequestError) -> RequestError:
        """Return what a failed start is told: the stop, where that has taken its shim away."""
        at_fault = error.kind == "internal" or error.data.stage in ("spawn", "killed")
        if self.guard.cause() is None or not at_fault:
            return error
        return RequestError(
            "stopping", f"the daemon is stopping; '{its_exec.exec_id}' was not started"
        )

    def found(self, exec_id: str) -> Running | Past:
        """Return an exec that is live or kept, or what is known of one that is past.

        Raises:
            RequestError: exec_unknown.
        """
        found = self.running.get(exec_id) or self.registry.past(exec_id)
        if found is None:
            raise RequestError("exec_unknown", f"there is no exec '{exec_id}'")
        return found

    def known(self, exec_id: str, refuse: Callable[[Past], RequestError]) -> Running:
        """Return an exec that is live or kept.

        Raises:
            RequestError: exec_unknown, or what `refuse` makes of one that is past.
        """
        found = self.found(exec_id)
        if isinstance(found, Past):
            raise refuse(found)
        return found

    def undo_start(self, failed: Exec) -> None:
        """A start failed: nothing of it is kept, its id is free."""
        self.registry.failed(failed)
        self.activity.worked(time.monotonic())
        del self.running[failed.exec_id]
        self.journal.failed(failed.number)
        self._note_idle()

    def forget(self, exec_id: str) -> None:
        """Let go of a closed exec's record and output.

        Raises:
            RequestError: exec_live, exec_unknown.
        """
        self.registry.forget(exec_id)
        self._drop_expired()

    def closed(self, running: Running) -> None:
        """Nothing of an exec is left; keep its record while there is room."""
        now_s = time.monotonic()
        self.registry.closed(running.exec, now_s)
        self.activity.leftovers_ended(now_s)
        if len(running.readers):
            self.activity.worked(now_s)
        self.spares.refill()  # a rescue has what it was lent until its end
        self._drop_expired()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.registry.live_count:
            self.when_idle.set()

    def expire(self) -> None:
        """Drop records past their age; arms itself again, whatever becomes of this round."""
        self.poller.call_at(time.monotonic() + _EXPIRE_EVERY_S, self, self.expire)
        self.registry.expire(time.monotonic())
        self._drop_expired()

    def _drop_expired(self) -> None:
        for past in self.registry.take_settled():
            running = self.running.pop(past.exec_id, None)
            if running is not None:
                running.let_go()
            self.journal.note(past)
        dropped = self.registry.take_dropped()
        if dropped:
            self.journal.dropped(dropped, self.registry.dropped_number)

    def warnings_now(self) -> list[str]:
        """Return what an operator should know: what was found at boot, and what is so now."""
        now = []
        if self.journal.exists and not self.journal.is_on:
            now.append(f"the journal has failed: {self.journal.reason}")
        if self.audit is not None and self.audit.failure is not None:
            now.append(f"the audit has failed: {self.audit.failure}")
        if self.claiming.trouble is not None:
            now.append(self.claiming.trouble)
        return [*self.warnings, *now]

    def live(self) -> list[Running]:
        """Return every live exec."""
        return [self.running[each.exec_id] for each in self.registry.live()]

    def met_by_stop(self) -> list[Running]:
        """Return every exec that was live when the stop began.

        The shims hear of it natively and may be faster than the loop: some have closed since.
        """
        return [
            each
            for each in self.running.values()
            if each.exec.is_live or each.exec.ending == "stopped"
        ]

    # ------------------------------------------------------------------ the log

    def _say_held_later(self) -> None:
        self.poller.call_at(time.monotonic() + _SAY_HELD_S, self, self.say_held)

    def say_held(self) -> None:
        """Tell what the log held back and no later line of its kind has told."""
        for event, count in self.log.take_held():
            self.log.warning("held_back", of=event, held_back=count)

    # ------------------------------------------------------------------ failures

    def refused(self, kind: str) -> None:
        """A request was refused."""
        self.counters.refusals[kind] += 1

    def stray(self, error: Exception, task: str = "timer", **fields: object) -> None:
        """A stray failure was survived: logged once with its traceback, and counted."""
        self.counters.stray_failures[task] += 1
        self.log.failure("stray_failure", error, task=task, **fields)

    # ------------------------------------------------------------------ the end

    def uncaught(self, where: str, error: BaseException) -> None:
        """The daemon's own state is unknown: the stop path, with exit code 70."""
        first = self.guard.arm(EXIT_SOFTWARE, CAUSE_ERROR)
        self.log.failure("uncaught_error", error, where=where, first=first)

    def stop_asked(self) -> None:
        """Take daemon.stop."""
        self.guard.arm(0, CAUSE_STOP)
