"""Parameters of the requests about execs, and the table of all methods.

A value that decodes is a value the daemon can act on; fields.py has what fields have in common.
Unknown fields are refused: a client that asks for what this daemon does not know must hear so.
daemon_requests.py has the other requests.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from .daemon_requests import (
    DaemonDrain,
    DaemonHealth,
    DaemonInfoRequest,
    DaemonMetrics,
    DaemonStop,
    DaemonUndrain,
    EnvSet,
    EventsSubscribe,
    Hello,
    Ping,
    SandboxActivity,
    SandboxClaim,
    SandboxPin,
)
from .errors import invalid
from .fields import (
    RLIM_INFINITY,
    RLIMITS,
    TERM_CHARS_MAX,
    USER_CHARS_MAX,
    ExecId,
    Generation,
    GraceSeconds,
    Nonce,
    Params,
    RlimitValue,
    Seconds,
    Sequence,
    Stream,
    SubscriberName,
    TerminalSide,
    both_streams,
    check_labels,
    check_seconds,
    check_subscriber,
    check_text,
    check_variable,
    rlimit_number,
)
from .signals import signal_number

PROTOCOL_VERSIONS: Final = (1,)


class Attach(Params):
    """The `attach` part of exec.start: subscribe in the same step.

    Attributes:
        streams: Which streams to be sent; both by default.
        subscriber: A name under which this reader comes back: 1-128 of A-Z a-z 0-9 _ . : -.
        generation: Which life of that reader this is; a higher one supersedes a lower.
        window_bytes: The most output sent and not yet acknowledged; None = no window.
    """

    streams: list[Stream] = msgspec.field(default_factory=both_streams)
    subscriber: SubscriberName | None = None
    generation: Generation | None = None
    window_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None

    def __post_init__(self) -> None:
        check_subscriber("attach.", self.streams, self.subscriber, self.generation)


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
        check_text("pty.term", self.term)
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
        check_labels(self.labels)
        self._check_rlimits()
        check_text("cwd", self.cwd)
        if self.cwd is not None and not self.cwd.startswith("/"):
            raise invalid("cwd", f"'{self.cwd}' is not an absolute path")
        check_text("user", self.user)
        if self.user == "":
            raise invalid("user", "is empty")
        if self.pty is not None and self.stderr != "pipe":
            raise invalid("stderr", "a terminal is one stream: leave stderr out with pty")
        check_seconds("deadline_s", self.deadline_s)
        check_seconds("orphan_ttl_s", self.orphan_ttl_s)
        check_seconds("stall_s", self.stall_s)
        check_seconds("grace_s", self.grace_s)
        check_seconds("hold_s", self.hold_s)

    def _check_env(self) -> None:
        for name, value in self.env.items():
            check_variable(f"env[{name!r}]", name)
            check_text(f"env[{name!r}]", value)

    def _check_rlimits(self) -> None:
        for name, (soft, hard) in self.rlimits.items():
            if name not in RLIMITS:
                raise invalid(f"rlimits[{name!r}]", f"unknown; known are {', '.join(RLIMITS)}")
            if rlimit_number(hard) > RLIM_INFINITY:
                raise invalid(f"rlimits[{name!r}][1]", "does not fit 64 bits")
            if rlimit_number(soft) > rlimit_number(hard):
                raise invalid(f"rlimits[{name!r}]", "the soft limit is above the hard one")


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
    streams: list[Stream] = msgspec.field(default_factory=both_streams)
    subscriber: SubscriberName | None = None
    generation: Generation | None = None
    window_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None

    def __post_init__(self) -> None:
        check_subscriber("", self.streams, self.subscriber, self.generation)
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
        check_seconds("wait_s", self.wait_s)


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
        check_seconds("grace_s", self.grace_s)


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
        check_seconds("timeout_s", self.timeout_s)


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
        check_labels(self.labels)


class ExecForget(Params):
    """Let go of a finished exec's output and record; its id stays taken and its exit known.

    Attributes:
        exec_id: The exec, closed.
    """

    exec_id: ExecId


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
