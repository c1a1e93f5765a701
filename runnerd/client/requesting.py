"""What both clients ask for, before it is sent: fields into requests, answers into handles.

A request whose fields cannot be right is refused here, by the daemon's own rules and with its own
error, before a byte is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from runnerd.protocol.answers import AttachAnswer, StartAnswer
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Exit
from runnerd.protocol.requests import Attach, ExecAttach, ExecStart

from .errors import ClientTimeout, RemoteError
from .following import Opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    from runnerd.protocol.fields import RlimitValue
    from runnerd.protocol.requests import Pty

    class StartFields(TypedDict, total=False):
        """The fields of exec.start but argv and attach; see ExecStart."""

        exec_id: str | None
        env: dict[str, str | None]
        env_mode: Literal["extend", "replace"]
        cwd: str | None
        user: str | None
        umask: int
        rlimits: dict[str, tuple[RlimitValue, RlimitValue]]
        nice: int | None
        oom_score_adj: int
        no_new_privs: bool
        stdin: Literal["null", "pipe"]
        stderr: Literal["pipe", "stdout", "null"]
        pty: Pty | None
        deadline_s: float | None
        orphan_ttl_s: float | None
        stall_s: float | None
        grace_s: float
        leftovers: Literal["keep", "kill"]
        flow: Literal["block", "drop"] | None
        hold_s: float
        sha256: bool
        labels: dict[str, str]
        admission: Literal["check", "skip"]


Stream = Literal["stdout", "stderr"]
BOTH: Final[tuple[Stream, ...]] = ("stdout", "stderr")

# What one exec may have sent and not yet read by its output() loop. Enough that the daemon
# never waits for an ack on a local socket; small beside the queue an exec may fill here.
WINDOW_BYTES: Final = 1024 * 1024

# An answer that needs no waiting in the daemon comes in milliseconds. After this long
# something is wrong that the caller should hear of.
CALL_TIMEOUT_S: Final = 30.0


class Completed(msgspec.Struct, frozen=True):
    """A command run to its exit, with what it printed.

    Attributes:
        exit: How it ended.
        stdout: Its whole standard output.
        stderr: Its whole standard error.
        gap_bytes: Output bytes that were no longer kept; 0 with flow "block".
    """

    exit: Exit
    stdout: bytes
    stderr: bytes
    gap_bytes: int


def start_request(
    argv: Sequence[str],
    *,
    attach: bool,
    streams: Sequence[Stream],
    window_bytes: int | None,
    fields: StartFields,
) -> ExecStart:
    """Make a start.

    Raises:
        RemoteError: invalid_params, naming the field.
    """
    assert not isinstance(argv, str), "argv is a list; there is no shell to split a string"
    try:
        subscribe = Attach(streams=list(streams), window_bytes=window_bytes) if attach else None
        return ExecStart(argv=list(argv), attach=subscribe, **fields)
    except RequestError as error:
        raise RemoteError.before_sending(error) from error


def attach_request(
    exec_id: str,
    *,
    after: int | Literal["tail"],
    streams: Sequence[Stream],
    window_bytes: int | None,
) -> ExecAttach:
    """Make an attach.

    Raises:
        RemoteError: invalid_params, naming the field.
    """
    try:
        return ExecAttach(
            exec_id=exec_id, after=after, streams=list(streams), window_bytes=window_bytes
        )
    except RequestError as error:
        raise RemoteError.before_sending(error) from error


def opened_by(
    request: ExecStart | ExecAttach, answer: msgspec.Struct, *, nonce_is_ours: bool
) -> Opened:
    """Return what a handle is made from.

    Args:
        request: The start, as it was sent, or the attach.
        answer: Its answer.
        nonce_is_ours: Whether this client minted the start's nonce: then whatever was created
            under it was created by this request, also where a repeat of it is answered.
    """
    if isinstance(request, ExecAttach):
        assert isinstance(answer, AttachAnswer)
        return Opened(request.exec_id, answer, None, False, request.window_bytes)
    assert isinstance(answer, StartAnswer)
    window_bytes = None if request.attach is None else request.attach.window_bytes
    is_ours = answer.created or nonce_is_ours
    return Opened(answer.exec_id, answer, request.nonce if is_ours else None, is_ours, window_bytes)


def start_timed_out(error: ClientTimeout, request: ExecStart) -> ClientTimeout:
    """Return the error of a start that was not answered in time, with the id to ask about."""
    hint = f"it may yet take effect: inspect or cancel '{request.exec_id}'"
    return ClientTimeout(error.message, hint=hint)
