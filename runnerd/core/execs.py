"""One exec: what is known of it, and what each event makes of it. No I/O, no clock.

Rule 1: every change goes through a method named after a fact, which moves the state by the table
in core/life.py and returns the actions the edge has to carry out, in order.
Rule 2: the reason is fixed by whoever acted first, and never guessed from a number.
Rule 3: `exited` and `closed` are published once each, here and nowhere else.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from runnerd.protocol.answers import TerminalSize
from runnerd.protocol.exits import Closed, Exit, Phases, Reason, Receipt, StreamCount, Survivor
from runnerd.protocol.requests import ExecStart

from .bounds import DRAIN_S
from .budget import TailBudget
from .clocks import Clocks
from .digest import Content
from .flow import Gate
from .life import LIVE, Event, State, after
from .names import Names
from .oom import SIGKILL, oom_verdict
from .stdin import StdinQueue
from .transcript import Transcript


class ExitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the command ended, as the kernel reported it; both null = the status was lost.

    Attributes:
        code: 0-255, or None.
        signal: 1-64, or None.
        core_dumped: Whether a core file was written.
        at_s: When, on the monotonic clock.
        cpu_user_s, cpu_system_s: CPU seconds of it and the children it waited for.
        peak_rss_bytes, minor_faults, major_faults, block_reads, block_writes: See getrusage(2).
    """

    code: int | None
    signal: int | None
    core_dumped: bool = False
    at_s: float
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    peak_rss_bytes: int | None = None
    minor_faults: int | None = None
    major_faults: int | None = None
    block_reads: int | None = None
    block_writes: int | None = None


class SendEnd(NamedTuple):
    """Tell the shim to end the tree."""

    grace_s: float


class RunClocks(NamedTuple):
    """Its clocks run from now on, until the command's exit."""


class Drain(NamedTuple):
    """Read what is in the pipes, then on until EOF or that time; then call drained."""

    until_s: float


class Publish(NamedTuple):
    """`exited` has its number: tell subscribers and waiters."""

    exit: Exit


class Close(NamedTuple):
    """`closed` has its number: release everything but the record."""

    closed: Closed


Action = SendEnd | RunClocks | Drain | Publish | Close

ARGV_CHARS_SHOWN: Final = 4096
_BY_US: Final = frozenset({"cancelled", "deadline", "orphaned", "stalled", "stopped", "internal"})


class Exec:
    """One exec, from acceptance to the end of its record.

    Args:
        exec_id: Its id.
        number: Its number in order of acceptance, from 1.
        params: As requested.
        cwd: Where it runs.
        now_s: Monotonic.
        wall_s: Unix seconds, for people.
        budget: The transcripts' budget.
        oom_kills: The cgroup's counter now, or None.
        alone: Whether no other exec is live.

    Attributes:
        content: What makes its start repeatable; None without a nonce.
        journaled: Whether the journal had it before the command ran.
    """

    def __init__(
        self,
        exec_id: str,
        number: int,
        params: ExecStart,
        *,
        cwd: str,
        now_s: float,
        wall_s: float,
        budget: TailBudget,
        oom_kills: int | None,
        alone: bool,
    ) -> None:
        self.exec_id = exec_id
        self.number = number
        self.content: Content | None = None
        self.journaled = False
        self._argv = "\0".join(shown_argv(params.argv)).encode()
        self.cwd = cwd
        self.user = params.user
        self.labels = params.labels
        self.accepted_s = now_s
        self.accepted_at = wall_s
        self.state = State.STARTING
        self.pid: int | None = None
        self.oom_score_adj: int | None = None
        self.grace_s = params.grace_s
        self.ending: Reason | None = None
        self.end_by_s: float | None = None
        self._receipt: Receipt | bytes | None = None
        self.survivors: list[Survivor] = []
        self.forced = False
        self.is_empty = False
        self.status: ExitStatus | None = None
        self.exit: Exit | None = None
        self.closed: Closed | None = None
        self.discarded_bytes = 0
        self.peak_processes: int | None = None
        self._peak_tasks: int | None = None
        self.closed_s: float | None = None
        self.phases = Phases()
        self.transcript = Transcript(budget, sha256=params.sha256, exec_id=exec_id)
        pty = params.pty
        self.terminal_size = None if pty is None else TerminalSize(rows=pty.rows, cols=pty.cols)
        has_stdin = params.stdin == "pipe" or pty is not None
        self.stdin = StdinQueue() if has_stdin else None
        flow = params.flow or ("drop" if params.attach is None else "block")
        # Of the start that attaches itself: it may be lost before its answer, and come back.
        subscriber = None if params.attach is None else params.attach.subscriber
        self.gate = Gate(flow, params.hold_s, now_s, subscriber)
        self.names = Names(self.gate)
        self._budget = budget
        self._leftovers = params.leftovers
        clocks = Clocks(params.deadline_s, params.orphan_ttl_s, params.stall_s)
        self.clocks = clocks if clocks.is_any else None
        self._started_s: float | None = None
        self._started_at: float | None = None
        self._reason: Reason | None = None
        self._oom_kills = oom_kills
        self._alone = alone
        self._own_oom_kills: int | None = None
        budget.add(self.transcript)

    @property
    def nonce(self) -> str | None:
        """The nonce of its start."""
        return None if self.content is None else self.content.nonce

    @property
    def digest(self) -> bytes | None:
        """The digest of its start's content; None without a nonce."""
        return None if self.content is None else self.content.digest

    @property
    def argv(self) -> list[str]:
        """What is shown of its argv."""
        # Kept as bytes: as a list of many short texts it would cost tens of times as much.
        return self._argv.decode().split("\0")

    @property
    def receipt(self) -> Receipt | None:
        """What ending it has done so far; final, a copy, once it is closed."""
        kept = self._receipt
        return msgspec.msgpack.decode(kept, type=Receipt) if isinstance(kept, bytes) else kept

    @receipt.setter
    def receipt(self, receipt: Receipt) -> None:
        self._receipt = receipt

    @property
    def is_live(self) -> bool:
        """Whether anything of it may still live."""
        return self.state in LIVE

    @property
    def is_evicted(self) -> bool:
        """Whether there is nothing to be read of it: of a live one more may come at any time."""
        return not self.is_live and self.transcript.state == "evicted"

    @property
    def has_exited(self) -> bool:
        """Whether its exit has been published."""
        return self.exit is not None

    def dequeued(self, now_s: float) -> None:
        """Its turn has come: the hand-over to a shim begins."""
        self.phases.queued_ms = self._ms(now_s)

    def spawned(self, now_s: float) -> None:
        """Its job was handed to a shim."""
        self.phases.spawned_ms = self._ms(now_s)

    def started(
        self, pid: int, oom_score_adj: int | None, at_s: float, wall_s: float
    ) -> list[Action]:
        """Execve succeeded."""
        self.state = after(self.state, Event.STARTED)
        self.pid = pid
        self.oom_score_adj = oom_score_adj
        self._started_s, self._started_at = at_s, wall_s
        self.phases.started_ms = self._ms(at_s)
        if self.phases.spawned_ms is not None:
            # A shim can be quicker than the daemon is back from handing it the job.
            self.phases.spawned_ms = min(self.phases.spawned_ms, self.phases.started_ms)
        if self.clocks is None:
            return []
        self.clocks.started(at_s)
        return [RunClocks()]

    def start_failed(self) -> None:
        """The command could not be started; nothing of it is left to be told."""
        self.state = after(self.state, Event.START_FAILED)
        self._budget.remove(self.transcript)

    def output(self, stream: Literal[0, 1], data: bytes, now_s: float) -> None:
        """Bytes were read from one of its pipes; after `exited` they are counted and dropped."""
        if self.exit is not None:
            self.discarded_bytes += len(data)
            return
        if self.phases.first_byte_ms is None:
            self.phases.first_byte_ms = self._ms(now_s)
        self.transcript.append(stream, data)

    def saw_processes(self, count: int) -> None:
        """So many processes of it live at once, as somebody who looked has seen."""
        if count:
            self.peak_processes = max(count, self.peak_processes or 0)

    def discarded(self, size: int) -> None:
        """Bytes in its pipes that nobody will read any more."""
        self.discarded_bytes += size

    def end(self, reason: Reason, grace_s: float | None, now_s: float) -> list[Action]:
        """Somebody wants it ended, with everything it started.

        A further call repeats nothing; it may bring the KILL nearer, and never puts it off.

        Args:
            reason: Who wants it.
            grace_s: Seconds between TERM and KILL; the exec's own if None.
            now_s: Monotonic.
        """
        self.state = after(self.state, Event.END)
        if not self.is_live:
            return []
        grace_s = self.grace_s if grace_s is None else grace_s
        if self.ending is None:
            self.ending = reason
        if self.status is None and self._reason is None:
            self._reason = reason
        if self.end_by_s is not None and now_s + grace_s >= self.end_by_s:
            return []
        self.end_by_s = now_s + grace_s
        return [SendEnd(grace_s)]

    def exited(self, status: ExitStatus, *, by_itself: bool) -> list[Action]:
        """The kernel reported the command's end.

        Args:
            status: How it ended.
            by_itself: Whether it is certain that no signal of ours can have caused it.
        """
        self.state = after(self.state, Event.EXITED)
        self.status = status
        self.clocks = None  # all of them end with the command
        if by_itself and self._reason != "internal":
            self._reason = None
        if self._reason is None:
            self._reason = "exited"
        if status.code is None and status.signal is None:
            self._reason = "internal" if self._reason == "internal" else "lost"
        self.phases.exited_ms = self._ms(status.at_s)
        actions: list[Action] = [Drain(status.at_s + DRAIN_S)]
        if self._leftovers == "kill" and self.ending is None:
            self.end_by_s = status.at_s + self.grace_s
            actions.append(SendEnd(self.grace_s))
        return actions

    def drained(
        self, now_s: float, wall_s: float, *, oom_kills: int | None, starts: int
    ) -> list[Action]:
        """Its pipes are at EOF or the drain is over: publish the exit.

        Args:
            now_s: Monotonic.
            wall_s: Unix seconds, for people.
            oom_kills: The cgroup's counter now, or None.
            starts: Starts accepted so far: any after this one may be whom a kill was meant for.
        """
        self._alone = self._alone and starts == self.number
        self.state = after(self.state, Event.DRAINED)
        self.phases.drained_ms = self._ms(now_s)
        self.exit = self._make_exit(wall_s - max(0.0, now_s - self._status().at_s), oom_kills)
        self.transcript.mark_exited()
        actions: list[Action] = [Publish(self.exit)]
        if self.state is State.CLOSED:
            actions += self._close(now_s, wall_s)
        return actions

    def emptied(self, now_s: float, wall_s: float) -> list[Action]:
        """No process of it is left."""
        self.is_empty = True
        self.survivors = []
        self.state = after(self.state, Event.EMPTY)
        return self._close(now_s, wall_s) if self.state is State.CLOSED else []

    def own_oom_kills(self, kills: int | None) -> None:
        """Take the count of a cgroup that is this exec's alone; None where that has none."""
        if kills is not None:
            self._own_oom_kills = max(kills, self._own_oom_kills or 0)

    @property
    def has_own_oom_kills(self) -> bool:
        """Whether a cgroup of its own has counted, so that no other exec's kill is among them."""
        return self._own_oom_kills is not None

    def counted_tasks(self, peak: int | None) -> None:
        """Take the most tasks that a cgroup of its own has counted; None where that counts none."""
        if peak is not None:
            self._peak_tasks = peak

    def shim_lost(self) -> None:
        """Its shim is gone without having said `empty`; the daemon adopts what it left."""
        self.state = after(self.state, Event.SHIM_LOST)
        if self.status is None and self._reason is None:
            self._reason = "internal"

    def failed_inside(self) -> None:
        """A failure of the daemon's own met it, so its exit says `internal`, whoever acted first.

        What is told of it (its output above all) may not be whole any more.
        """
        if self.exit is None:
            self._reason = "internal"

    def _status(self) -> ExitStatus:
        assert self.status is not None
        return self.status

    def _close(self, now_s: float, wall_s: float) -> list[Action]:
        self.closed = Closed(discarded_bytes=self.discarded_bytes, closed_at=wall_s)
        self.closed_s = now_s
        if self._receipt is not None:
            # 400 processes as objects are ten times the rest of a record, which stays for an hour.
            self._receipt = msgspec.msgpack.encode(self.receipt)
        self.transcript.mark_closed()
        self._budget.finish(self.transcript)
        return [Close(self.closed)]

    def _ms(self, now_s: float) -> float:
        return round((now_s - self.accepted_s) * 1000, 3)

    def _make_exit(self, ended_at: float, oom_kills: int | None) -> Exit:
        status, started_s = self._status(), self._started_s
        assert self._reason is not None
        # `ours`: a KILL is ours only where we sent one; the reason alone does not say so.
        own = self._own_oom_kills
        oom = oom_verdict(
            self._oom_kills if own is None else 0,
            oom_kills if own is None else own,
            signal=status.signal,
            ours=self.forced and self._reason in _BY_US,
            alone=self._alone or own is not None,
        )
        return Exit(
            exec_id=self.exec_id,
            code=status.code,
            signal=status.signal,
            core_dumped=status.core_dumped,
            reason=self._reason,
            forced=self.forced and status.signal == SIGKILL and self._reason in _BY_US,
            started_at=self._started_at,
            ended_at=ended_at,
            wall_s=None if started_s is None else max(0.0, status.at_s - started_s),
            cpu_user_s=status.cpu_user_s,
            cpu_system_s=status.cpu_system_s,
            peak_rss_bytes=status.peak_rss_bytes,
            minor_faults=status.minor_faults,
            major_faults=status.major_faults,
            block_reads=status.block_reads,
            block_writes=status.block_writes,
            oom=oom,
            phases=self.phases,
            stdout=self.stream_count(0),
            stderr=self.stream_count(1),
            peak_processes=self.peak_processes,
            peak_tasks=self._peak_tasks,
        )

    def stream_count(self, stream: Literal[0, 1]) -> StreamCount:
        """Return one stream's bytes, so that total = kept + dropped."""
        total = self.transcript.total_bytes[stream]
        dropped = self.transcript.dropped_bytes[stream]
        return StreamCount(
            total_bytes=total,
            kept_bytes=total - dropped,
            dropped_bytes=dropped,
            sha256=self.transcript.sha256(stream),
        )


def shown_argv(argv: list[str]) -> list[str]:
    """Return argv, cut where a listing of it would not fit a frame.

    The rest is not kept: a record lives for an hour, and argv may have megabytes.
    """
    shown: list[str] = []
    size = 0
    for argument in argv:
        size += len(argument) + 1
        if size > ARGV_CHARS_SHOWN:
            return [*shown, argument[:64] + "…", f"… {len(argv)} arguments in all"]
        shown.append(argument)
    return shown
