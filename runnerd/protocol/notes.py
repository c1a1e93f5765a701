"""Every notification the daemon sends. A client ignores fields it does not know."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .events import EventNote
from .exits import Closed, Exit, State


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
