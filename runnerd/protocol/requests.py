"""Every request's parameters. A value that decodes is a value the daemon can act on.

Types and ranges are checked by msgspec while decoding; what a type cannot say (NUL bytes, pairs
of fields that exclude each other) is checked in `__post_init__`, which raises the RequestError
that names the field. Unknown fields are refused: a client that asks for what this daemon does
not know must hear so.

Names carry their unit; an absent duration or limit means none.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from .errors import invalid
from .signals import signal_number

PROTOCOL_VERSIONS: Final = (1,)

SECONDS_MAX: Final = 1e9  # about 31 years: far inside what any kernel timer takes
LABELS_MAX: Final = 32
LABEL_KEY_BYTES_MAX: Final = 63
LABEL_VALUE_BYTES_MAX: Final = 256
TERM_CHARS_MAX: Final = 128
TOKEN_CHARS_MAX: Final = 1024
USER_CHARS_MAX: Final = 520  # two names of LOGIN_NAME_MAX (256, sysconf(3)) and a colon
RLIM_INFINITY: Final = 2**64 - 1
PRIVATE_PREFIX: Final = "RUNNERD_"
OWNER_CHARS_MAX: Final = 256
REASON_CHARS_MAX: Final = 256  # of a pin

RLIMITS: Final[dict[str, int]] = {
    "cpu": 0,
    "fsize": 1,
    "data": 2,
    "stack": 3,
    "core": 4,
    "rss": 5,
    "nproc": 6,
    "nofile": 7,
    "memlock": 8,
    "as": 9,
    "locks": 10,
    "sigpending": 11,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
    "rttime": 15,
}
"""Kernel numbers by name. Source: getrlimit(2); include/uapi/asm-generic/resource.h."""

_EXEC_ID: Final = r"^[A-Za-z0-9_.:-]{1,128}(?![\s\S])"  # \Z would be Python's alone
PATTERNS: Final = {_EXEC_ID: "has 1 to 128 characters, each of A-Z a-z 0-9 _ . : -"}
"""Every pattern a field must match, in words."""

ExecId = Annotated[str, Meta(pattern=_EXEC_ID)]
Nonce = Annotated[str, Meta(pattern=_EXEC_ID)]
SubscriberName = Annotated[str, Meta(pattern=_EXEC_ID)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
GraceSeconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Sequence = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RlimitValue = Annotated[int, Meta(ge=0)] | Literal["unlimited"]
Stream = Literal["stdout", "stderr"]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Fence = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TerminalSide = Annotated[int, Meta(ge=1, le=65535)]
"""Rows or columns. Source: struct winsize, ioctl_tty(2), has 16 bits; 0 would mean unknown."""


def _both_streams() -> list[Stream]:
    return ["stdout", "stderr"]


def _check_seconds(field: str, value: float | None) -> None:
    # A NaN would arm a timer that never fires. Today's msgspec refuses it by its range checks;
    # that it does is documented nowhere.
    if value is not None and math.isnan(value):
        raise invalid(field, "NaN is no duration")


def _check_text(field: str, value: str | None) -> None:
    if value is not None and "\0" in value:
        raise invalid(field, "contains a NUL byte")


def _check_variable(field: str, name: str) -> None:
    if not name or "=" in name or "\0" in name:
        raise invalid(field, "a name is not empty and has no '=' and no NUL")


def _check_subscriber(
    prefix: str, streams: list[Stream], subscriber: str | None, generation: int | None
) -> None:
    if not streams or len(set(streams)) != len(streams):
        raise invalid(f"{prefix}streams", "name each stream once, and at least one")
    if generation is not None and subscriber is None:
        raise invalid(f"{prefix}generation", "needs a subscriber: a generation of nobody")


def _check_condition(if_idle_for_s: float | None, *, leftovers_count: bool) -> None:
    _check_seconds("if_idle_for_s", if_idle_for_s)
    if leftovers_count and if_idle_for_s is None:
        raise invalid("leftovers_count", "goes with if_idle_for_s: without it nothing is counted")


def _check_labels(labels: dict[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise invalid("labels", f"{len(labels)} pairs; the most is {LABELS_MAX}")
    for key, value in labels.items():
        where = f"labels[{key!r}]"
        if not 0 < len(key.encode()) <= LABEL_KEY_BYTES_MAX or "\0" in key:
            raise invalid(where, f"a key has 1 to {LABEL_KEY_BYTES_MAX} bytes and no NUL")
        if len(value.encode()) > LABEL_VALUE_BYTES_MAX or "\0" in value:
            raise invalid(where, f"a value has up to {LABEL_VALUE_BYTES_MAX} bytes and no NUL")


class Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What every request's parameters share: unknown fields are refused."""


class NoParams(Params):
    """Parameters of a request that takes none."""


class Ping(NoParams):
    """Ask whether the daemon is there; answered ahead of everything."""


class EventsSubscribe(NoParams):
    """Be told what happens from now on: execs, OOM kills, memory pressure, drain, stop, owner."""


class DaemonInfoRequest(NoParams):
    """Describe the daemon: what it is, what protects it, what it holds."""


class DaemonDrain(Params):
    """Refuse all new work from now on; what runs is untouched.

    Attributes:
        if_idle_for_s: Only if the sandbox has been idle for so many seconds, as sandbox.activity
            judges: looked at and drained in one step. 0 = idle now, however short. Else `busy`,
            with the reasons. Absent = in any case.
        leftovers_count: With if_idle_for_s: whether what a command left running keeps it from
            being idle.
    """

    if_idle_for_s: GraceSeconds | None = None
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        _check_condition(self.if_idle_for_s, leftovers_count=self.leftovers_count)


class DaemonUndrain(NoParams):
    """Take new work again."""


class DaemonStop(Params):
    """Stop the daemon as SIGTERM does.

    Attributes:
        if_idle_for_s: As in daemon.drain: looked at and stopped in one step.
        leftovers_count: As in daemon.drain.
    """

    if_idle_for_s: GraceSeconds | None = None
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        _check_condition(self.if_idle_for_s, leftovers_count=self.leftovers_count)


class Hello(Params):
    """Open a connection: agree on a version and learn the daemon's limits.

    Attributes:
        protocol: Versions the client speaks, best first.
        client: Who is calling, for the log.
        incarnation: The incarnation expected; another one is refused before any effect.
        fence: A number that grows with each new owner of the sandbox. Once one is set, only a
            connection that carries the highest may change anything; "current" takes whatever
            that is, an operator's override.
        token: The secret this daemon asks for, where it asks for one (--token-file). In no log, no
            error and no representation of this request.
    """

    protocol: Annotated[list[Version], Meta(max_length=64)]
    client: Annotated[str, Meta(max_length=256)] | None = None
    incarnation: Annotated[str, Meta(max_length=64)] | None = None
    fence: Fence | Literal["current"] | None = None
    token: Annotated[str, Meta(max_length=TOKEN_CHARS_MAX)] | None = None

    def __post_init__(self) -> None:
        _check_text("client", self.client)
        _check_text("incarnation", self.incarnation)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "token"}
        words = [*(f"{name}={value!r}" for name, value in shown.items()), "token=..."]
        return f"Hello({', '.join(words)})"


class Attach(Params):
    """The `attach` part of exec.start: subscribe in the same step.

    Attributes:
        streams: Which streams to be sent; both by default.
        subscriber: A name under which this reader comes back: 1-128 of A-Z a-z 0-9 _ . : -.
        generation: Which life of that reader this is; a higher one supersedes a lower.
        window_bytes: The most output sent and not yet acknowledged; None = no window.
    """

    streams: list[Stream] = msgspec.field(default_factory=_both_streams)
    subscriber: SubscriberName | None = None
    generation: Generation | None = None
    window_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None

    def __post_init__(self) -> None:
        _check_subscriber("attach.", self.streams, self.subscriber, self.generation)


class Pty(Params):
    """The `pty` part of exec.start: the command gets a terminal instead of pipes.

    Attributes:
        rows: 1-65535; 24 if absent.
        cols: 1-65535; 80 if absent.
        term: The command's TERM, where `env` does not say otherwise: what kind of terminal shows
            its output.
    """

    rows: TerminalSide = 24
    cols: TerminalSide = 80
    term: Annotated[str, Meta(max_length=TERM_CHARS_MAX)] = "xterm-256color"

    def __post_init__(self) -> None:
        _check_text("pty.term", self.term)
        if not self.term:
            raise invalid("pty.term", "is empty")


class ExecStart(Params):
    """Start one command. Answered only once execve has succeeded, or with the true error.

    Attributes:
        exec_id: 1-128 of A-Z a-z 0-9 _ . : -; minted if absent.
        nonce: Makes the start repeatable: the same id, nonce and content get the first start's
            answer again. 1-128 of the same characters; needs an exec_id.
        horizon: `starts` as its sender knew it before the first send, unchanged in retries; if
            what has been forgotten since may include this start, it is refused.
        argv: The argument vector, as execve(2) takes it; no shell is involved.
        env: Variables to set; null removes one.
        env_mode: extend = over the boot environment and env.set; replace = only these.
        cwd: An absolute directory; the daemon's --cwd if absent.
        user: name, uid, uid:gid or name:group; the daemon's own user if absent.
        umask: 0 to 0o777; 0o022 if absent.
        rlimits: Name to [soft, hard]; a value is a number or "unlimited".
        nice: -20 to 19.
        oom_score_adj: 900-1000; 900 if absent; a higher inherited score is kept.
        no_new_privs: Whether execve may no longer grant privileges, see prctl(2).
        stdin: null = /dev/null; pipe = fed by exec.write. With pty it says nothing: the terminal
            can always be written to.
        stderr: pipe, stdout (merged in the kernel, exact order) or null. To be left out with pty,
            where all output is one stream, told as stdout.
        pty: Run it in a terminal of its own, its controlling terminal from before execve.
        deadline_s: When the command is ended, in seconds from its start; none if absent.
        orphan_ttl_s: End the command once nobody has been attached for so long, from its start or
            since the last reader left; none if absent.
        stall_s: End the command once it has written nothing and its tree has used under 1 % of
            one CPU for so long; none if absent.
        grace_s: Seconds between TERM and KILL wherever this exec is ended; 0 = KILL at once.
        leftovers: What happens to processes alive at the command's exit: keep or kill.
        flow: block = the command waits for its subscriber; drop = it never waits. block where
            attach is given, drop otherwise.
        hold_s: How long a blocked command waits for a lost subscriber to come back.
        sha256: Whether the exit carries a SHA-256 of each stream.
        labels: At most 32 pairs, keys up to 63 and values up to 256 bytes.
        admission: check, or skip: a rescue. It passes memory admission and may use the parked
            shim and the descriptors that are held back for one.
        attach: Subscribe at once.
    """

    argv: list[str]
    exec_id: ExecId | None = None
    nonce: Nonce | None = None
    horizon: Sequence | None = None
    env: dict[str, str | None] = {}
    env_mode: Literal["extend", "replace"] = "extend"
    cwd: str | None = None
    user: Annotated[str, Meta(max_length=USER_CHARS_MAX)] | None = None
    umask: Annotated[int, Meta(ge=0, le=0o777)] = 0o022
    rlimits: dict[str, tuple[RlimitValue, RlimitValue]] = {}
    nice: Annotated[int, Meta(ge=-20, le=19)] | None = None
    oom_score_adj: Annotated[int, Meta(ge=900, le=1000)] = 900
    no_new_privs: bool = False
    stdin: Literal["null", "pipe"] = "null"
    stderr: Literal["pipe", "stdout", "null"] = "pipe"
    pty: Pty | None = None
    deadline_s: Seconds | None = None
    orphan_ttl_s: Seconds | None = None
    stall_s: Seconds | None = None
    grace_s: GraceSeconds = 5.0
    leftovers: Literal["keep", "kill"] = "keep"
    flow: Literal["block", "drop"] | None = None
    hold_s: GraceSeconds = 30.0
    sha256: bool = False
    labels: dict[str, str] = {}
    admission: Literal["check", "skip"] = "check"
    attach: Attach | None = None

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise invalid("argv", "needs a program name first")
        if self.nonce is not None and self.exec_id is None:
            raise invalid("nonce", "needs an exec_id: with a minted one no start can be repeated")
        for at, argument in enumerate(self.argv):
            if "\0" in argument:
                raise invalid(f"argv[{at}]", "contains a NUL byte")
        self._check_env()
        _check_labels(self.labels)
        self._check_rlimits()
        _check_text("cwd", self.cwd)
        if self.cwd is not None and not self.cwd.startswith("/"):
            raise invalid("cwd", f"'{self.cwd}' is not an absolute path")
        _check_text("user", self.user)
        if self.user == "":
            raise invalid("user", "is empty")
        if self.pty is not None and self.stderr != "pipe":
            raise invalid("stderr", "a terminal is one stream: leave stderr out with pty")
        _check_seconds("deadline_s", self.deadline_s)
        _check_seconds("orphan_ttl_s", self.orphan_ttl_s)
        _check_seconds("stall_s", self.stall_s)
        _check_seconds("grace_s", self.grace_s)
        _check_seconds("hold_s", self.hold_s)

    def _check_env(self) -> None:
        for name, value in self.env.items():
            _check_variable(f"env[{name!r}]", name)
            _check_text(f"env[{name!r}]", value)

    def _check_rlimits(self) -> None:
        for name, (soft, hard) in self.rlimits.items():
            if name not in RLIMITS:
                raise invalid(f"rlimits[{name!r}]", f"unknown; known are {', '.join(RLIMITS)}")
            if rlimit_number(hard) > RLIM_INFINITY:
                raise invalid(f"rlimits[{name!r}][1]", "does not fit 64 bits")
            if rlimit_number(soft) > rlimit_number(hard):
                raise invalid(f"rlimits[{name!r}]", "the soft limit is above the hard one")


def rlimit_number(value: int | str) -> int:
    """Return a limit as the kernel takes it: "unlimited" is RLIM_INFINITY."""
    return RLIM_INFINITY if isinstance(value, str) else value


class ExecAttach(Params):
    """Subscribe to an exec that exists; the only adopting path, and never creates.

    Attributes:
        exec_id: The exec.
        after: Replay what comes after this sequence; 0 = from the first kept record; "tail" =
            only what comes from now on, and the exit.
        tail_bytes: With after "tail": begin so far back that at most so many bytes of output are
            replayed, in whole records: a terminal's recent screen.
        streams: Which streams to be sent.
        subscriber: As in exec.start; a blocked command waits for this name to come back.
        generation: As in exec.start.
        window_bytes: The most output sent and not yet acknowledged; None = no window.
    """

    exec_id: ExecId
    after: Sequence | Literal["tail"] = 0
    tail_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    streams: list[Stream] = msgspec.field(default_factory=_both_streams)
    subscriber: SubscriberName | None = None
    generation: Generation | None = None
    window_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None

    def __post_init__(self) -> None:
        _check_subscriber("", self.streams, self.subscriber, self.generation)
        if self.tail_bytes is not None and self.after != "tail":
            raise invalid("tail_bytes", 'goes with after "tail"; a sequence says where to begin')


class ExecDetach(Params):
    """End a subscription. The exec goes on.

    Attributes:
        subscription: A subscription opened on this connection.
    """

    subscription: Sequence


class ExecAck(Params):
    """Acknowledge output up to a sequence, as a request or as the client's only notification.

    Attributes:
        subscription: A subscription opened on this connection.
        seq: The highest sequence taken, cumulative.
    """

    subscription: Sequence
    seq: Sequence


class ExecWrite(Params):
    """Feed the command's stdin.

    Attributes:
        exec_id: The exec.
        offset: Where `data` begins in the whole stream; a repeat of what was taken is taken
            once. Absent = append, which is not repeatable.
        data: The bytes; may be empty.
        eof: Close stdin after everything taken, once all of `data` is taken. A terminal gets its
            own end-of-file character instead, as by Ctrl-D.
        wait_s: How long to wait for room for all of `data`; absent = take what fits now.
    """

    exec_id: ExecId
    data: bytes = b""
    offset: Sequence | None = None
    eof: bool = False
    wait_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_seconds("wait_s", self.wait_s)


class ExecResize(Params):
    """Tell the command's terminal its new size; its foreground group gets SIGWINCH.

    Attributes:
        exec_id: The exec, started with pty.
        rows: 1-65535.
        cols: 1-65535.
    """

    exec_id: ExecId
    rows: TerminalSide
    cols: TerminalSide


class ExecSignal(Params):
    """Send one signal, nothing else (no CONT, no escalation).

    Attributes:
        exec_id: The exec.
        signal: TERM, SIGTERM, RTMIN+1 or a number 1-64.
        to: command = the process itself; group = its process group; tree = every process of it.
    """

    exec_id: ExecId
    signal: str | int
    to: Literal["command", "group", "tree"] = "command"

    def __post_init__(self) -> None:
        if signal_number(self.signal) is None:
            raise invalid("signal", f"{self.signal!r} is no signal")

    @property
    def number(self) -> int:
        """The signal's number, 1-64."""
        number = signal_number(self.signal)
        assert number is not None
        return number


class ExecCancel(Params):
    """End an exec and everything it started: TERM, grace, KILL until nothing is left.

    Attributes:
        exec_id: The exec.
        grace_s: Seconds between TERM and KILL; the exec's own grace_s if absent; 0 = KILL at
            once. A further cancel may shorten it and never lengthens it.
        if_nonce: Act only on the exec started with this nonce; a tombstone left is bound to it.
        wait: Answer once all is gone or the survivors are known; else as soon as ending began.
        tombstone: Of an id never seen, leave a mark so that a start arriving later is refused.
    """

    exec_id: ExecId
    grace_s: GraceSeconds | None = None
    if_nonce: Nonce | None = None
    wait: bool = True
    tombstone: bool = True

    def __post_init__(self) -> None:
        _check_seconds("grace_s", self.grace_s)


class ExecWait(Params):
    """Wait for an exec's end; consumes nothing.

    Attributes:
        exec_id: The exec.
        until: exited = the command's own exit; closed = nothing of it is left.
        timeout_s: How long; absent = for ever. wait_timeout changes nothing.
    """

    exec_id: ExecId
    until: Literal["exited", "closed"] = "exited"
    timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_seconds("timeout_s", self.timeout_s)


class ExecInspect(Params):
    """Describe an exec: everything but its environment.

    Attributes:
        exec_id: The exec.
        usage: Also count its processes, their memory and CPU time, as the daemon reads them.
        tree: Also list its processes.
    """

    exec_id: ExecId
    usage: bool = False
    tree: bool = False


class ExecList(Params):
    """List execs in order of acceptance.

    Attributes:
        state: Only those in one of these states.
        labels: Only those that carry all of these.
        cursor: next_cursor of the page before.
        limit: The most to return, 1-1000.
        usage: As in exec.inspect.
    """

    state: list[Literal["starting", "running", "draining", "lingering", "closed"]] | None = None
    labels: dict[str, str] = {}
    cursor: Sequence | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    usage: bool = False

    def __post_init__(self) -> None:
        _check_labels(self.labels)


class ExecForget(Params):
    """Let go of a finished exec's output and record; its id stays taken and its exit known.

    Attributes:
        exec_id: The exec, closed.
    """

    exec_id: ExecId


class EnvSet(Params):
    """Set and unset variables of every exec started later in this incarnation.

    Attributes:
        set: Name to value. Names of the daemon's own, RUNNERD_*, are refused.
        unset: Names to take away, of the boot environment as well.
    """

    set: dict[str, str] = {}
    unset: list[str] = []

    def __post_init__(self) -> None:
        for name, value in self.set.items():
            self._check_name(f"set[{name!r}]", name)
            _check_text(f"set[{name!r}]", value)
        for at, name in enumerate(self.unset):
            self._check_name(f"unset[{at}]", name)
            if name in self.set:
                raise invalid(f"unset[{at}]", f"'{name}' is set by the same request")

    def _check_name(self, field: str, name: str) -> None:
        _check_variable(field, name)
        if name.startswith(PRIVATE_PREFIX):
            raise invalid(field, f"{PRIVATE_PREFIX}* is the daemon's own and reaches no command")


class SandboxClaim(Params):
    """Become the sandbox's owner, in one step with the look at who is; needs a fence in hello.

    Attributes:
        owner: Who claims it, for people and errors: 1 to 256 characters.
        expect: unclaimed = nobody has claimed it, for whoever creates it; claimed = somebody has,
            for whoever resumes it; any = whichever. Else nothing is changed.
        nonce: Makes the claim repeatable: while it stands, the same owner and nonce are answered
            again. 1-128 of A-Z a-z 0-9 _ . : -.
    """

    owner: Annotated[str, Meta(max_length=OWNER_CHARS_MAX)]
    expect: Literal["unclaimed", "claimed", "any"]
    nonce: Nonce | None = None

    def __post_init__(self) -> None:
        _check_text("owner", self.owner)
        if not self.owner:
            raise invalid("owner", "is empty")


class SandboxPin(Params):
    """Keep the sandbox from counting as idle, or end that.

    Attributes:
        reason: Why, for people: 1 to 256 characters. A pin is known by it: one of the same reason
            takes the place of the one before.
        ttl_s: Seconds until it ends by itself; none if absent.
        unpin: End the pin of this reason instead.
    """

    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
    ttl_s: Seconds | None = None
    unpin: bool = False

    def __post_init__(self) -> None:
        _check_text("reason", self.reason)
        _check_seconds("ttl_s", self.ttl_s)
        if not self.reason:
            raise invalid("reason", "is empty")
        if self.unpin and self.ttl_s is not None:
            raise invalid("ttl_s", "goes with a pin, not with its end")


class SandboxActivity(Params):
    """Say whether the sandbox is idle, since when, and why not. Asking is no activity.

    Attributes:
        if_idle_for_s: How many seconds without work make it idle; with 0, the default, it is once
            nothing runs, nobody is attached and nothing pins it.
        leftovers_count: Whether what a command left running keeps it from being idle.
    """

    if_idle_for_s: GraceSeconds = 0.0
    leftovers_count: bool = False

    def __post_init__(self) -> None:
        _check_seconds("if_idle_for_s", self.if_idle_for_s)


class DaemonHealth(NoParams):
    """Ask whether the daemon is well; nothing that is asked of a disk or a command answers it."""


class DaemonMetrics(Params):
    """Read the daemon's metrics.

    Attributes:
        format: text = Prometheus text format 0.0.4; openmetrics = OpenMetrics 1.0.
    """

    format: Literal["text", "openmetrics"] = "text"


METHODS: Final[dict[str, type[Params]]] = {
    "hello": Hello,
    "ping": Ping,
    "exec.start": ExecStart,
    "exec.attach": ExecAttach,
    "exec.detach": ExecDetach,
    "exec.ack": ExecAck,
    "exec.write": ExecWrite,
    "exec.signal": ExecSignal,
    "exec.resize": ExecResize,
    "exec.cancel": ExecCancel,
    "exec.wait": ExecWait,
    "exec.inspect": ExecInspect,
    "exec.list": ExecList,
    "exec.forget": ExecForget,
    "env.set": EnvSet,
    "sandbox.claim": SandboxClaim,
    "sandbox.pin": SandboxPin,
    "sandbox.activity": SandboxActivity,
    "events.subscribe": EventsSubscribe,
    "daemon.info": DaemonInfoRequest,
    "daemon.health": DaemonHealth,
    "daemon.metrics": DaemonMetrics,
    "daemon.drain": DaemonDrain,
    "daemon.undrain": DaemonUndrain,
    "daemon.stop": DaemonStop,
}
