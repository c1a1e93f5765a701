"""What can go wrong for a client, by what its caller can do about it.

Every error says what happened, what is still true (`preserved`) and what to do (`hint`), so that
a caller who only prints it still tells the whole story. None of them ever ends an exec.
"""

# ruff: noqa: N818  # a name says the fact, "stream lost"; the base class says that it is an error

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.protocol.errors import ErrorData, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runnerd.protocol.errors import ErrorBody

    from .session import Event

UNTOUCHED: Final = "what was started keeps running"


class ClientError(Exception):
    """The base of every error this package raises.

    Args:
        message: What happened, in one sentence without capital or full stop.
        preserved: What is still true.
        hint: What to do about it.

    Attributes:
        kind: The daemon's word for it, a key of runnerd.protocol.errors.KINDS; empty where the
            error is the client's own.
    """

    kind: str = ""

    def __init__(self, message: str, *, preserved: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.preserved = preserved
        self.hint = hint


class RemoteError(ClientError):
    """The daemon refused a request, or failed at it.

    A request whose fields cannot be right is refused in the client by the same rules and with
    the same error, before a byte is sent.

    Attributes:
        code: JSON-RPC's code; for -32000 `kind` decides.
        kind: What happened, a key of runnerd.protocol.errors.KINDS; empty where an answer came
            without data.
        data: All the facts; see runnerd.protocol.errors.ErrorData.
    """

    def __init__(self, body: ErrorBody) -> None:
        data = body.data or ErrorData(kind="", layer="", preserved="", hint="", retryable=False)
        super().__init__(body.message, preserved=data.preserved, hint=data.hint)
        self.code = body.code
        self.kind = data.kind
        self.data = data

    @classmethod
    def before_sending(cls, error: RequestError) -> RemoteError:
        """Return the error the daemon would have answered."""
        return cls(error.body())


class ConnectFailed(ClientError):
    """No daemon could be reached.

    Attributes:
        paths: The socket paths that were tried.
    """

    def __init__(self, message: str, *, paths: Sequence[str], hint: str) -> None:
        super().__init__(message, preserved="nothing was sent", hint=hint)
        self.paths = tuple(paths)


class TokenUnreadable(ClientError):
    """The token for the daemon could not be read from its file."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            preserved="nothing was sent",
            hint="name a file you can read by token_file, --token-file or RUNNERD_TOKEN_FILE",
        )


class StreamLost(ClientError):
    """The connection ended while something was still expected from it. No exit is made up.

    Attributes:
        exec_ids: Execs subscribed to, whose exit had not come.
        methods: The methods of requests that had no answer; each may or may not have taken
            effect.
    """

    def __init__(
        self, message: str, *, exec_ids: Sequence[str] = (), methods: Sequence[str] = ()
    ) -> None:
        super().__init__(
            message,
            preserved="what runs does not depend on this connection",
            hint="connect again, then inspect or attach",
        )
        self.exec_ids = tuple(exec_ids)
        self.methods = tuple(methods)


class DaemonRestarted(StreamLost):
    """Behind the socket is another incarnation now: what the one before ran has ended with it.

    Nothing was asked of the new one. A fresh connection can look at what it knows of the execs:
    exec.inspect and exec.wait answer `exec_lost`, or the exit, where there is a journal.

    Attributes:
        incarnation: The incarnation that was expected.
    """

    def __init__(
        self, incarnation: str, *, exec_ids: Sequence[str], methods: Sequence[str]
    ) -> None:
        open_ends = [f"the exit of {', '.join(exec_ids)}"] if exec_ids else []
        open_ends += [f"the answer to {', '.join(methods)}"] if methods else []
        lost = f" without {' and '.join(open_ends)}" if open_ends else ""
        super().__init__(
            f"the daemon was restarted{lost}",
            exec_ids=exec_ids,
            methods=methods,
        )
        self.preserved = "nothing was asked of the new daemon"
        self.hint = "connect afresh and inspect the execs; start again only what may run twice"
        self.incarnation = incarnation


class Ambiguous(ClientError):
    """A request was handed over, its connection lost before the answer, and it is not repeatable.

    It may have taken effect or not; the daemon can be asked, the client cannot know.

    Attributes:
        method: The request's method.
        exec_id: The exec it named, where it named one.
    """

    def __init__(self, method: str, exec_id: str | None) -> None:
        of = f" of '{exec_id}'" if exec_id else ""
        super().__init__(
            f"the connection was lost before the answer to {method}{of}",
            preserved="it took effect once, or not at all; it was not repeated",
            hint="look at what it should have done before you repeat it",
        )
        self.method = method
        self.exec_id = exec_id


class Interrupted(ClientError):
    """An exception came in from outside (Ctrl-C) while what the daemon sent was taken in.

    What was followed then ends: a record of it may be missing, and nobody could tell which.
    """

    def __init__(self) -> None:
        super().__init__(
            "the client was interrupted while it took in what the daemon sent",
            preserved=UNTOUCHED,
            hint="attach again, after the handle's last_seq; watch anew",
        )


class ExitPassed(ClientError):
    """What was attached to had exited before the sequence it was attached after."""

    def __init__(self, exec_id: str) -> None:
        super().__init__(
            f"'{exec_id}' had exited before the sequence asked for",
            preserved="its exit is known",
            hint="wait for it, which answers at once, or attach after an earlier sequence",
        )


class Superseded(ClientError):
    """A newer reader of the same subscriber name took an exec's output over.

    Attributes:
        exec_id: The exec.
        generation: The newer reader's, None where it named none.
    """

    def __init__(self, exec_id: str, subscriber: str, generation: int | None) -> None:
        newer = "another" if generation is None else f"generation {generation}"
        super().__init__(
            f"{newer} of subscriber '{subscriber}' follows '{exec_id}' now",
            preserved="the newer reader gets the output",
            hint="attach under another subscriber name, or with a higher generation",
        )
        self.exec_id = exec_id
        self.generation = generation


class ProtocolViolation(ClientError):
    """The daemon sent what the protocol does not allow; the connection cannot be trusted on.

    Attributes:
        events: What the same bytes carried before the violation.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            preserved=UNTOUCHED,
            hint="a defect in runnerd, or another program at the other end",
        )
        self.events: list[Event] = []


class DigestMismatch(ProtocolViolation):
    """A stream's bytes, all of them delivered, are not those whose SHA-256 the exit states.

    Attributes:
        exec_id: The exec.
        stream: stdout or stderr.
    """

    def __init__(self, exec_id: str, stream: str, stated: str, seen: str) -> None:
        super().__init__(
            f"{stream} of '{exec_id}' has SHA-256 {seen} here and {stated} in its exit"
        )
        self.hint = "throw the output away: bytes were changed on their way"
        self.exec_id = exec_id
        self.stream = stream


class ClientTimeout(ClientError, TimeoutError):
    """The client's own patience ended. The exec and the request are untouched by it."""

    def __init__(self, message: str, *, hint: str = "wait again, or cancel") -> None:
        super().__init__(message, preserved=UNTOUCHED, hint=hint)


class OutputOverflow(ClientError):
    """Output nobody took filled the client's queue, and the exec was detached.

    Attributes:
        exec_id: The exec.
        last_seq: The last record delivered; attach after it to go on.
    """

    def __init__(self, exec_id: str, last_seq: int, queue_bytes_max: int) -> None:
        super().__init__(
            f"more than {queue_bytes_max} bytes of {exec_id}'s output waited for their reader",
            preserved="the command keeps running, detached",
            hint=f"attach after sequence {last_seq}, with window_bytes",
        )
        self.exec_id = exec_id
        self.last_seq = last_seq
