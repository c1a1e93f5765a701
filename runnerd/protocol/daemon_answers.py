"""Answers about the daemon itself: hello, info, health, metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

from .sandbox_answers import Claim

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
