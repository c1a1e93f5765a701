"""Answers about execs, and the table of all answers. A client ignores fields it does not know.

exits.py has how an exec ends, daemon_answers.py and sandbox_answers.py the other answers, notes.py
the notifications.

What the platform does not report is null, never 0.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .daemon_answers import DaemonInfo, HealthAnswer, HelloAnswer, MetricsAnswer
from .events import EventsAnswer
from .exits import Closed, Exit, Reason, Receipt, State, Survivor
from .sandbox_answers import ActivityAnswer, ClaimAnswer, PinAnswer

TranscriptState = Literal["kept", "partial", "evicted", "forgotten", "lost"]
SpoolState = Literal["off", "on", "degraded"]


class Empty(msgspec.Struct):
    """An answer that carries nothing."""


class StartAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.start.

    Attributes:
        exec_id: The exec.
        pid: The command's own pid, not the shim's.
        created: True for the start that created the exec; false for a recognised retry.
        starts: Starts accepted so far, this one included.
        oom_score_adj: The command's score as the kernel has it.
        journaled: Whether it was in the journal before the command ran.
        subscription: Where attach was given; null for a retry whose transcript has gone,
            or that finds no room for a subscription.
    """

    exec_id: str
    pid: int
    created: bool
    starts: int
    oom_score_adj: int | None
    journaled: bool = False
    subscription: int | None = None


class AttachAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.attach.

    Attributes:
        subscription: An integer unique on the connection.
        state: The exec's state.
        pid: The command's pid while it lives.
        first_seq: The first record kept.
        last_seq: The last record so far.
        after: The sequence after which this subscription begins: as asked for, or what "tail" and
            `tail_bytes` came to.
    """

    subscription: int
    state: State
    pid: int | None
    first_seq: int
    last_seq: int
    after: int


class WriteAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.write.

    Attributes:
        accepted_bytes: Bytes taken over the exec's whole life.
        room_bytes: Bytes that fit right now.
    """

    accepted_bytes: int
    room_bytes: int


class SignalAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.signal.

    Attributes:
        signalled: How many processes were sent the signal.
    """

    signalled: int


class CancelAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.cancel.

    Attributes:
        outcome: ended; already_ended; survivors; tombstoned; ending (with wait: false).
        receipt: See Receipt; null where nothing was signalled.
        exit: The exit, where it is known.
    """

    outcome: Literal["ended", "already_ended", "survivors", "tombstoned", "ending"]
    receipt: Receipt | None = None
    exit: Exit | None = None


class Usage(msgspec.Struct, kw_only=True):
    """What an exec's processes use, as the daemon reads them.

    Attributes:
        processes: How many.
        rss_bytes: Their resident sets added up.
        cpu_s: Their CPU seconds added up, with those of their dead that were waited for.
    """

    processes: int
    rss_bytes: int
    cpu_s: float


class ProcessInfo(msgspec.Struct, kw_only=True):
    """One process of an exec, as psutil reads it; null = not to be seen.

    Attributes:
        pid: Its pid.
        ppid: Its parent's; the shim's for the command and for orphans.
        command: Its name.
        state: running, sleeping, disk-sleep, stopped, tracing-stop, zombie, idle, ...
        uid: Its effective uid.
        threads: How many.
        rss_bytes: Its resident set.
        cpu_s: CPU seconds, its own.
        started_at: Unix seconds, for people.
    """

    pid: int
    ppid: int
    command: str
    state: str
    uid: int | None
    threads: int | None
    rss_bytes: int | None
    cpu_s: float | None
    started_at: float | None


class Holder(msgspec.Struct, kw_only=True):
    """A process that keeps an exec's pipes open after the command's exit.

    Attributes:
        pid: Its pid.
        command: Its name.
        certain: False where only its belonging to the exec is known.
    """

    pid: int
    command: str
    certain: bool


class TerminalSize(msgspec.Struct, kw_only=True, frozen=True):
    """How large an exec's terminal is.

    Attributes:
        rows: 1-65535, 0 where a program has set it so.
        cols: 1-65535, 0 where a program has set it so.
    """

    rows: int
    cols: int


class ExecInfo(msgspec.Struct, kw_only=True):
    """What is known of an exec; everything but its environment.

    Attributes:
        exec_id: The exec.
        state: See design of states in PROTOCOL.md.
        argv: As started; null once only its exit is known.
        cwd: As started; null with argv.
        user: As started.
        labels: As started; empty once argv is null.
        pid: The command's pid while it lives.
        incarnation: The daemon start it belongs to.
        accepted: Its number in order of acceptance, from 1.
        accepted_at: Unix seconds, for people.
        age_s: Seconds since acceptance, monotonic; by the wall clock once its record has gone.
        flow: block or drop, as in force now; null once its record has gone.
        first_seq: The first record kept; null with flow.
        last_seq: The last record so far; null with flow.
        stdin_accepted_bytes: Bytes taken for stdin; null with flow.
        stdin_open: Whether exec.write can still be accepted.
        output_bytes: Bytes read of both streams so far; null where its end is not known.
        pty: The terminal's size, as last known; null where it runs with pipes.
        subscriptions: How many subscribe.
        transcript: kept; partial (something was dropped); evicted (for space or age); forgotten
            (by exec.forget); lost (with an earlier daemon).
        spool: Whether output beyond the memory tail is kept on disk: off; on; degraded (it was,
            until the disk failed, filled up or was too slow); null with flow.
        spool_reason: Why it is degraded.
        ending: Whether it is being ended, and why.
        survivors: Who could not be ended.
        holders: Who keeps its pipes open after the exit.
        exit: Once it has exited; null for a closed one whose daemon ended before it.
        closed: Once nothing is left, where that was seen.
        usage: Where asked for.
        processes: Where asked for (tree): each living process, parents first, at most 200.
    """

    exec_id: str
    state: State
    argv: list[str] | None
    cwd: str | None
    user: str | None
    labels: dict[str, str]
    pid: int | None
    incarnation: str
    accepted: int
    accepted_at: float
    age_s: float
    flow: Literal["block", "drop"] | None
    first_seq: int | None
    last_seq: int | None
    stdin_accepted_bytes: int | None
    stdin_open: bool
    subscriptions: int
    transcript: TranscriptState
    pty: TerminalSize | None = None
    spool: SpoolState | None = None
    spool_reason: str | None = None
    ending: Reason | None = None
    survivors: list[Survivor] = []
    holders: list[Holder] = []
    exit: Exit | None = None
    closed: Closed | None = None
    usage: Usage | None = None
    processes: list[ProcessInfo] = []
    output_bytes: int | None = None


class ListAnswer(msgspec.Struct, kw_only=True):
    """The answer to exec.list.

    Attributes:
        execs: In order of acceptance.
        next_cursor: Pass it to get the next page; null = that was all.
    """

    execs: list[ExecInfo]
    next_cursor: int | None


class EnvAnswer(msgspec.Struct, kw_only=True):
    """The answer to env.set: what lies over the boot environment now.

    Attributes:
        set_total: How many variables are set.
        unset_total: How many of the boot environment are taken away.
        used_bytes: What all that costs, of env_bytes in Limits.
    """

    set_total: int
    unset_total: int
    used_bytes: int


ANSWERS: Final[dict[str, type[msgspec.Struct]]] = {
    "hello": HelloAnswer,
    "ping": Empty,
    "exec.start": StartAnswer,
    "exec.attach": AttachAnswer,
    "exec.detach": Empty,
    "exec.ack": Empty,
    "exec.write": WriteAnswer,
    "exec.signal": SignalAnswer,
    "exec.resize": Empty,
    "exec.cancel": CancelAnswer,
    "exec.wait": Exit,
    "exec.inspect": ExecInfo,
    "exec.list": ListAnswer,
    "exec.forget": Empty,
    "env.set": EnvAnswer,
    "sandbox.claim": ClaimAnswer,
    "sandbox.pin": PinAnswer,
    "sandbox.activity": ActivityAnswer,
    "events.subscribe": EventsAnswer,
    "daemon.info": DaemonInfo,
    "daemon.health": HealthAnswer,
    "daemon.metrics": MetricsAnswer,
    "daemon.drain": Empty,
    "daemon.undrain": Empty,
    "daemon.stop": Empty,
}
