"""Errors as they cross the socket: what happened, and the four facts a caller acts on.

Every refusal is a kind from KINDS. The table gives each kind its layer (whose doing it is), what
was preserved, a hint and whether a retry can help, so that the same kind always tells the same
story; a raise site adds only what is particular. JSON-RPC's five standard codes are kept for
parse, request, method, params and internal; all else is -32000 and `data.kind` decides.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from .exits import Exit  # msgspec resolves the annotation when it decodes
from .sandbox_answers import IdleReason  # msgspec resolves the annotation when it decodes

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
SERVER_ERROR: Final = -32000


class Kind(NamedTuple):
    """What every error of one kind has in common."""

    layer: str  # request, access, sandbox, daemon, shim, kernel
    preserved: str
    hint: str
    retryable: bool = False
    code: int = SERVER_ERROR


MESSAGE_CHARS_MAX: Final = 1000
FIELD_CHARS_MAX: Final = 200

NOTHING: Final = "nothing ran, nothing changed"
RUNS_ON: Final = "the command keeps running"

KINDS: Final[dict[str, Kind]] = {
    "parse_error": Kind("request", NOTHING, "send one valid message a frame", code=PARSE_ERROR),
    "invalid_request": Kind(
        "request",
        NOTHING,
        "a request is an object with jsonrpc, id, method and params",
        code=INVALID_REQUEST,
    ),
    "method_unknown": Kind(
        "request", NOTHING, "hello lists the methods served as features", code=METHOD_NOT_FOUND
    ),
    "invalid_params": Kind(
        "request", NOTHING, "correct the field that is named", code=INVALID_PARAMS
    ),
    "hello_required": Kind("request", NOTHING, "send hello first"),
    "protocol_unsupported": Kind("request", NOTHING, "offer one of the versions in data.supported"),
    "frame_too_large": Kind(
        "request", NOTHING, "split the request, or raise the daemon's --frame-bytes-max"
    ),
    "unauthorized": Kind("access", NOTHING, "connect as an allowed user, see --allow-uid"),
    "peer_refused": Kind("access", NOTHING, "connect from outside the commands runnerd runs"),
    "peer_gone": Kind("access", NOTHING, "keep the connecting process alive until hello"),
    "incarnation_changed": Kind(
        "daemon",
        "nothing ran in this incarnation",
        "the daemon was restarted: look before you retry",
    ),
    "fenced": Kind(
        "access",
        NOTHING,
        "say hello with a fence not below data.fence (runnerctl --fence), or only look",
    ),
    "already_claimed": Kind(
        "sandbox",
        NOTHING,
        "it is data.owner's; who takes it over expects `claimed` (--expect claimed)",
    ),
    "not_claimed": Kind(
        "sandbox",
        NOTHING,
        "no earlier owner is known here; who makes it new expects `unclaimed` (--expect unclaimed)",
    ),
    "not_owner": Kind(
        "daemon", "the exec of that id is untouched", "it was started with another nonce"
    ),
    "nonce_reused": Kind(
        "daemon",
        "the exec of that id is untouched",
        "a new command needs a new exec_id and nonce",
    ),
    "history_lost": Kind(
        "daemon",
        NOTHING,
        "it may have run before: what was known of starts since its horizon has been dropped",
    ),
    "exec_exists": Kind(
        "daemon", "the exec of that id is untouched", "attach to it, or choose another id"
    ),
    "cancelled": Kind("daemon", NOTHING, "the id was cancelled before its start arrived"),
    "exec_unknown": Kind(
        "daemon", NOTHING, "exec.list, or runnerctl ps --all, shows the execs that are known"
    ),
    "exec_evicted": Kind(
        "daemon",
        "the exit is in data.exit",
        "its output was dropped; exec.wait, or runnerctl wait, still tells its exit",
    ),
    "exec_settled": Kind(
        "daemon",
        "the exit is in data.exit",
        "its output was let go of on request; exec.wait, or runnerctl wait, still tells its exit",
    ),
    "exec_lost": Kind(
        "daemon",
        "nothing is run again",
        "an earlier daemon had it: data, or runnerctl inspect, has what is known; look, then retry",
    ),
    "exec_live": Kind("daemon", "the exec is untouched", "cancel it or wait for its end first"),
    "superseded": Kind(
        "daemon", "the newer subscription is untouched", "attach with a higher generation"
    ),
    "exec_ended": Kind(
        "daemon",
        "the exit is kept",
        "the command has exited; what it left running is reached as its tree",
    ),
    "cursor_invalid": Kind(
        "request", "the exec is untouched", "use 0, 'tail', or a sequence up to last_seq"
    ),
    "stdin_closed": Kind(
        "daemon", "the exec is untouched", "the command no longer reads its stdin"
    ),
    "stdin_offset": Kind(
        "request", "nothing of this write was taken", "go on from data.accepted_bytes"
    ),
    "subscription_unknown": Kind(
        "request", "the execs are untouched", "use a subscription opened on this connection"
    ),
    "not_permitted": Kind("kernel", RUNS_ON, "the daemon's user may not signal that process"),
    "start_failed": Kind(
        "kernel", NOTHING, "the program, directory and user must exist where runnerd runs"
    ),
    "start_timeout": Kind(
        "shim", "the half-made process was killed", "look at the machine's load", retryable=True
    ),
    "wait_timeout": Kind("daemon", RUNS_ON, "wait again: nothing was consumed", retryable=True),
    "busy": Kind("daemon", NOTHING, "wait for data.retry_after_s", retryable=True),
    "draining": Kind(
        "daemon", NOTHING, "daemon.undrain, or runnerctl undrain, lets it take new work again"
    ),
    "stopping": Kind("daemon", NOTHING, "the daemon is about to end"),
    "internal": Kind(
        "daemon",
        "unknown: inspect the exec before a retry",
        "a defect in runnerd: its log has the traceback",
        code=INTERNAL_ERROR,
    ),
}


class ErrorData(msgspec.Struct, omit_defaults=True):
    """The `data` of an error.

    Attributes:
        kind: A key of KINDS.
        layer: Whose doing it is: request, access, sandbox, daemon, shim or kernel.
        preserved: What is still true after the failure.
        hint: What to do about it.
        retryable: Whether the same request may succeed later.
        retry_after_s: When to retry, in seconds.
        field: The request field at fault, as a path.
        stage: For start_failed: user, groups, rlimit, umask, nice, cwd, pty, exec, ...
        errno: The kernel's errno.
        errno_name: Its name, as errno(3) lists it.
        state: For exec_exists: live, finished or settled.
        fence: For fenced: the highest fence seen; for already_claimed: the claim's.
        owner: For already_claimed: who; absent where that cannot be read any more.
        claimed_at: For already_claimed: since when, in Unix seconds.
        incarnation: For exec_lost and exec_settled: the daemon start it belonged to; for
            already_claimed: the one that was asked then; for not_claimed: this one.
        pid: For exec_lost: the command's pid, where it was known to have started.
        generation: For superseded: the one in force.
        accepted_bytes: For stdin_offset: bytes taken so far.
        supported: For protocol_unsupported: the versions spoken.
        reasons: For busy, where only an idle sandbox was to be drained or stopped: why it is not,
            as in sandbox.activity.
        exit: For exec_evicted, exec_settled and exec_lost: the exit, where it is known.
    """

    kind: str
    layer: str
    preserved: str
    hint: str
    retryable: bool  # one of the four facts: no default, so never left out
    retry_after_s: float | None = None
    field: str | None = None
    stage: str | None = None
    errno: int | None = None
    errno_name: str | None = None
    state: str | None = None
    fence: int | None = None
    owner: str | None = None
    claimed_at: float | None = None
    incarnation: str | None = None
    pid: int | None = None
    generation: int | None = None
    accepted_bytes: int | None = None
    supported: list[int] | None = None
    reasons: list[IdleReason] | None = None
    exit: Exit | None = None


class ErrorBody(msgspec.Struct):
    """The `error` of an answer: JSON-RPC code, message and data."""

    code: int
    message: str
    data: ErrorData | None = None


class RequestError(Exception):
    """A request was refused or failed; carries everything its answer needs.

    Args:
        kind: A key of KINDS.
        message: What happened, in one sentence without capital or full stop.
        preserved: Where it differs from the kind's own.
        hint: Where it differs from the kind's own.
        layer: Where it differs from the kind's own.
        retryable: Where it differs from the kind's own.
        details: Fields of ErrorData particular to this error.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        preserved: str | None = None,
        hint: str | None = None,
        layer: str | None = None,
        retryable: bool | None = None,
        **details: object,
    ) -> None:
        message = _shown(message, MESSAGE_CHARS_MAX)
        super().__init__(message)
        table = KINDS[kind]
        self.kind = kind
        self.message = message
        self.code = table.code
        self.data = ErrorData(
            kind=kind,
            layer=layer or table.layer,
            preserved=preserved or table.preserved,
            hint=hint or table.hint,
            retryable=table.retryable if retryable is None else retryable,
        )
        for name, value in details.items():
            setattr(self.data, name, value)

    def body(self) -> ErrorBody:
        """Return the error as it is put on the wire."""
        return ErrorBody(code=self.code, message=self.message, data=self.data)


def invalid(field: str, message: str) -> RequestError:
    """Make the error for a field that is wrong; the message leads with the field's name."""
    field = _shown(field, FIELD_CHARS_MAX)
    return RequestError("invalid_params", f"{field}: {message}", field=field)


def _shown(text: str, chars_max: int) -> str:
    """Make text fit to be shown: bounded, nothing unprintable, no surrogate that cannot be sent.

    Messages quote what the peer sent: up to a whole frame, escape sequences for a terminal, or a
    path that is not UTF-8.
    """
    kept = text if len(text) <= chars_max else text[: chars_max - 3] + "..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in kept)
