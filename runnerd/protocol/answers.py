"""Every answer and notification the daemon sends. A client ignores fields it does not know.

What the platform does not report is null, never 0.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .events import EventNote, EventsAnswer

State = Literal["starting", "running", "draining", "lingering", "closed"]
Reason = Literal[
    "exited", "cancelled", "deadline", "orphaned", "stalled", "stopped", "lost", "internal"
]
OomVerdict = Literal["none", "child", "possible", "killed", "unknown"]
TranscriptState = Literal["kept", "partial", "evicted", "forgotten", "lost"]
SpoolState = Literal["off", "on", "degraded"]
IdleReason = Literal["live_execs", "attached_clients", "leftovers", "recent_work", "pin"]
TroubleKind = Literal[
    "state_lost",
    "journal_off",
    "claim_off",
    "spool_off",
    "loop_lag",
    "socket_unreachable",
    "socket_bound_again",
    "metrics_off",
]


class Limits(msgspec.Struct, kw_only=True):
    """The daemon's limits on what comes from outside, as `hello` states them.

    Attributes:
        frame_bytes: The largest frame.
        connections: Connections at once.
        hello_s: Seconds a connection has to say hello.
        stuck_reader_s: Seconds a connection may take no byte while bytes wait.
        pipelined_requests: Requests unanswered on one connection.
        subscriptions: Subscriptions at once, over all connections.
        live_execs: Execs not closed at once.
        stdin_queue_bytes: Bytes queued for one exec's stdin.
        stdin_total_bytes: Bytes queued for stdin over all execs.
        tail_bytes: The in-memory tail of one exec's transcript.
        transcript_total_bytes: All in-memory tails together.
        finished_execs: Finished execs kept.
        finished_s: Seconds a finished exec is kept.
        settled: Execs whose exit stays known after their record has gone.
        spool_bytes: One exec's transcript on disk; 0 = there is no spool.
        spool_total_bytes: All transcripts on disk together.
        labels: Labels of one exec.
        env_bytes: Names and values set by env.set.
        incoming_total_bytes: Unfinished requests, over all connections; 0 = no limit is known.
        pins: Pins at once.
        admit_memory_percent: The share of the memory limit above which starts are refused; 0 =
            none is.
    """

    frame_bytes: int
    connections: int
    hello_s: float
    stuck_reader_s: float
    pipelined_requests: int
    subscriptions: int
    live_execs: int
    stdin_queue_bytes: int
    stdin_total_bytes: int
    tail_bytes: int
    transcript_total_bytes: int
    finished_execs: int
    finished_s: float
    settled: int
    spool_bytes: int
    spool_total_bytes: int
    labels: int
    env_bytes: int
    admit_memory_percent: int = 0
    pins: int = 0
    incoming_total_bytes: int = 0


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """Whose the sandbox is. All null: it is claimed, and what was written of it cannot be read.

    Attributes:
        owner: As claimed.
        claimed_at: Unix seconds, for people.
        incarnation: The daemon start that was asked.
        fence: The fence it was claimed with.
    """

    owner: str | None
    claimed_at: float | None
    incarnation: str | None
    fence: int | None


class HelloAnswer(msgspec.Struct, kw_only=True):
    """The answer to `hello`.

    Attributes:
        protocol: The version both speak.
        incarnation: A random id of this daemon start.
        version: The daemon's version.
        features: The methods and optional fields served.
        limits: See Limits.
        starts: Starts accepted so far, by earlier incarnations of the same state directory too.
        fence: The highest fence seen, or null before the first.
        journal: Whether what is answered outlives this daemon.
        claim: Whose the sandbox is, see Claim; null while nobody has claimed it.
        claim_durable: Whether that outlives this daemon and a loss of power; while there is no
            claim, whether one would.
    """

    protocol: int
    incarnation: str
    version: str
    features: list[str]
    limits: Limits
    starts: int
    fence: int | None = None
    journal: bool = False
    claim: Claim | None = None
    claim_durable: bool = False


class Empty(msgspec.Struct):
    """An answer that carries nothing."""


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


class ClaimAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.claim.

    Attributes:
        claim: The claim in force, see Claim.
        created: False where the same claim had been made before, and was asked for again.
        previous: The claim it took the place of; null where there was none, or for one asked for
            again.
        durable: Whether it outlives this daemon and a loss of power.
    """

    claim: Claim
    created: bool
    previous: Claim | None
    durable: bool


class Pin(msgspec.Struct, kw_only=True):
    """What keeps the sandbox from counting as idle, on purpose.

    Attributes:
        reason: As given.
        age_s: Seconds since it was set, or set again.
        left_s: Seconds until it ends by itself; null = it does not.
    """

    reason: str
    age_s: float
    left_s: float | None


class PinAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.pin.

    Attributes:
        was_pinned: Whether there was a pin of that reason.
        pins: All there are now, oldest first.
    """

    was_pinned: bool
    pins: list[Pin]


class ActivityAnswer(msgspec.Struct, kw_only=True):
    """The answer to sandbox.activity.

    Attributes:
        idle: Whether daemon.drain would take place under the same condition.
        idle_for_s: Seconds since the last work ended; 0 while something counts as activity.
        reasons: Why it is not idle: live_execs, attached_clients, leftovers (where they count),
            recent_work, pin; empty where it is.
        execs: Ids of the execs whose command lives or whose exit is still to come, the first 100.
        execs_total: How many.
        attached_total: Subscriptions to execs that are not closed, leftovers included.
        leftovers: Ids of the execs of which only what the command left running lives, the first
            100.
        leftovers_total: How many.
        pins: Oldest first.
        state: serving, draining or stopping.
    """

    idle: bool
    idle_for_s: float
    reasons: list[IdleReason]
    execs: list[str]
    execs_total: int
    attached_total: int
    leftovers: list[str]
    leftovers_total: int
    pins: list[Pin]
    state: Literal["serving", "draining", "stopping"]


class OomOrder(msgspec.Struct, kw_only=True):
    """Whether the kernel prefers the commands, checked at start.

    Attributes:
        own_score: The daemon's oom_score_adj.
        command_score: The score given to commands.
        room: command_score - own_score.
        lowered: Whether the daemon lowered its own score.
        cap_sys_resource: Whether it may go below its floor, and so may no command.
        cgroup_version: 1, 2 or null.
        limit_bytes: The tightest memory limit of its cgroup and those above, or null for none.
        high_bytes: memory.high, or null.
        group_kill: memory.oom.group of one of them: then the kernel kills all, whatever the scores.
        protects_up_to_bytes: The daemon's size below which the order holds against any command.
        verdict: protected; equal; group_kill; unlimited; unknown.
        warnings: What an operator should know, in sentences.
    """

    own_score: int | None
    command_score: int
    room: int | None
    lowered: bool
    cap_sys_resource: bool
    cgroup_version: int | None
    limit_bytes: int | None
    high_bytes: int | None
    group_kill: bool | None
    protects_up_to_bytes: int | None
    verdict: Literal["protected", "equal", "group_kill", "unlimited", "unknown"]
    warnings: list[str]


class MemoryAdmission(msgspec.Struct, kw_only=True):
    """Whether a start is refused where memory is short, and how short it is now.

    Attributes:
        percent_max: A start is refused while more than this share of the limit is in use; 0 =
            never.
        working_set_bytes: What is in use, without file cache not used lately, of the cgroup
            nearest its limit among ours and those above; null where nothing is checked.
        limit_bytes: That cgroup's limit; null with it.
        reason: Why nothing is checked, or null.
    """

    percent_max: int
    working_set_bytes: int | None
    limit_bytes: int | None
    reason: str | None


class DaemonInfo(msgspec.Struct, kw_only=True):
    """The answer to daemon.info.

    Attributes:
        version: The daemon's version.
        protocol: Versions spoken.
        incarnation: This daemon start.
        pid: Its pid.
        uid: Its effective uid.
        socket: The socket's path.
        state: serving, draining or stopping.
        started_at: Unix seconds, for people.
        uptime_s: Monotonic.
        python: The interpreter's version.
        guard: native, or fallback with the reason.
        subreaper: Whether orphans of a dead shim come to the daemon.
        dumpable: Whether a process of the same user could read the daemon.
        rss_bytes: The daemon's resident set.
        state_directory: Where what outlives the daemon is kept, or null.
        journal: Whether starts and exits are written there now.
        journal_reason: Why not, or null.
        fence: The highest fence seen, or null before the first.
        claim: As in hello.
        claim_durable: As in hello.
        claim_reason: Why not, or null.
        starts: Starts accepted so far, by earlier incarnations of the same state directory too.
        live_execs: Execs not closed.
        connections: Open connections.
        subscriptions: Open subscriptions.
        parked_shims: Shims ready for a start.
        stray_failures: Stray failures survived.
        kill_leaves: Whether an exec has a cgroup v2 of its own, killed as a whole.
        memory_leaves: Whether that counts its own OOM kills, so that their verdict is certain.
        oom_order: See OomOrder.
        memory_admission: See MemoryAdmission.
        spool_directory: Where output beyond the memory tails is kept; null = nowhere.
        spool_reason: Why nowhere.
        limits: See Limits.
        features: As in hello.
        env_set: Names that env.set has set, without values, the first 200.
        env_unset: Names of the boot environment that it has taken away, the first 200.
        warnings: Everything found at boot that an operator should know.
    """

    version: str
    protocol: list[int]
    incarnation: str
    pid: int
    uid: int
    socket: str
    state: Literal["serving", "draining", "stopping"]
    started_at: float
    uptime_s: float
    python: str
    guard: str
    subreaper: bool
    dumpable: bool
    rss_bytes: int | None
    starts: int
    live_execs: int
    connections: int
    subscriptions: int
    parked_shims: int
    stray_failures: int
    kill_leaves: bool
    memory_leaves: bool
    oom_order: OomOrder
    spool_directory: str | None
    spool_reason: str | None
    limits: Limits
    features: list[str]
    env_set: list[str]
    env_unset: list[str]
    warnings: list[str]
    state_directory: str | None = None
    journal: bool = False
    journal_reason: str | None = None
    fence: int | None = None
    claim: Claim | None = None
    claim_durable: bool = False
    claim_reason: str | None = None
    memory_admission: MemoryAdmission | None = None


class Trouble(msgspec.Struct, kw_only=True):
    """Something that works worse than it should; commands run all the same.

    Attributes:
        kind: state_lost (the state directory was asked for and cannot be used, or was taken away);
            journal_off (starts and exits are not written at the moment); claim_off (whose the
            sandbox is has not been written: it ends with this daemon); spool_off (the disk under
            the spool fails or hangs); loop_lag (the loop was late by a second or more in the last
            minute); socket_unreachable (the socket's file is gone, or another's is in its place);
            socket_bound_again (it was gone, in the last minute); metrics_off (--metrics-listen
            was asked for and nothing listens there).
        message: In one sentence.
    """

    kind: TroubleKind
    message: str


class HealthAnswer(msgspec.Struct, kw_only=True):
    """The answer to daemon.health. That there is one says that the daemon lives.

    Attributes:
        live: Always true.
        ready: Whether a start would be taken: neither draining nor stopping.
        state: serving, draining or stopping.
        degraded: What works worse than it should; empty = nothing.
    """

    live: bool
    ready: bool
    state: Literal["serving", "draining", "stopping"]
    degraded: list[Trouble]


class MetricsAnswer(msgspec.Struct, kw_only=True):
    """The answer to daemon.metrics.

    Attributes:
        content_type: As an HTTP endpoint would say.
        text: The exposition.
    """

    content_type: str
    text: str


class OutputNote(msgspec.Struct, kw_only=True):
    """One chunk of output, at most 64 KiB.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        seq: Its number in the exec's one sequence.
        stream: stdout or stderr.
        offset: Where it begins in its stream, in bytes.
        data: The bytes.
    """

    subscription: int
    exec_id: str
    seq: int
    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class GapNote(msgspec.Struct, kw_only=True):
    """Records that are no longer kept, announced in their place.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        first_seq: The first sequence lost.
        last_seq: The last sequence lost.
        stdout_bytes: Bytes of stdout lost; null where an attach began inside what is lost, so
            that only the subscriber knows where it stood.
        stderr_bytes: The same for stderr.
        stdout_offset: Where stdout goes on.
        stderr_offset: Where stderr goes on.
    """

    subscription: int
    exec_id: str
    first_seq: int
    last_seq: int
    stdout_bytes: int | None
    stderr_bytes: int | None
    stdout_offset: int
    stderr_offset: int


class ExitedNote(msgspec.Struct, kw_only=True):
    """The command has exited, exactly once, after all of its output.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        seq: Its number in the exec's one sequence.
        exit: See Exit.
    """

    subscription: int
    exec_id: str
    seq: int
    exit: Exit


class ClosedNote(msgspec.Struct, kw_only=True):
    """Nothing of the exec is left; the subscription is over.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        seq: The highest of the exec.
        closed: See Closed.
    """

    subscription: int
    exec_id: str
    seq: int
    closed: Closed


class HeartbeatNote(msgspec.Struct, kw_only=True):
    """Nothing was sent for a while; the exec and the connection live.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        last_seq: The last record so far.
        state: The exec's state.
    """

    subscription: int
    exec_id: str
    last_seq: int
    state: State


class SupersededNote(msgspec.Struct, kw_only=True):
    """A newer attach of the same subscriber took over; the subscription is over.

    Attributes:
        subscription: Whose.
        exec_id: The exec.
        subscriber: The name.
        generation: The newer attach's; None where that name never carried one.
    """

    subscription: int
    exec_id: str
    subscriber: str
    generation: int | None


class StoppingNote(msgspec.Struct, kw_only=True):
    """The daemon is stopping; sent once to every connection.

    Attributes:
        cause: What began the stop: SIGTERM, daemon.stop, error, ...
        deadline_s: Seconds until the daemon is gone, whatever happens.
    """

    cause: str
    deadline_s: float


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

NOTIFICATIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "exec.output": OutputNote,
    "exec.gap": GapNote,
    "exec.exited": ExitedNote,
    "exec.closed": ClosedNote,
    "exec.heartbeat": HeartbeatNote,
    "exec.superseded": SupersededNote,
    "event": EventNote,
    "daemon.stopping": StoppingNote,
}
