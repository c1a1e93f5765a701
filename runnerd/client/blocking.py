"""The blocking client: one Unix socket, the standard library, no threads.

Thread-safety: none. One Client, with its Execs, belongs to one thread; make a Client for each
thread, connections are cheap. A signal handler may not use a Client its thread is in the middle
of using.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from runnerd import __version__
from runnerd.protocol.answers import (
    AttachAnswer,
    CancelAnswer,
    DaemonInfo,
    EnvAnswer,
    ExecInfo,
    Exit,
    HelloAnswer,
    ListAnswer,
    MetricsAnswer,
    OutputNote,
    SignalAnswer,
    StartAnswer,
    WriteAnswer,
)
from runnerd.protocol.errors import RequestError
from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import (
    PROTOCOL_VERSIONS,
    Attach,
    DaemonDrain,
    DaemonInfoRequest,
    DaemonMetrics,
    DaemonStop,
    DaemonUndrain,
    EnvSet,
    ExecAttach,
    ExecCancel,
    ExecInspect,
    ExecList,
    ExecResize,
    ExecSignal,
    ExecStart,
    ExecWait,
    Hello,
    Params,
    Ping,
)

from .errors import (
    ClientTimeout,
    RemoteError,
)
from .execs import Exec
from .feeding import StdinFeeder
from .link import Link, deadline
from .locate import open_socket
from .session import Answer, Event, Failure

if TYPE_CHECKING:
    import os
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self, TypedDict, Unpack

    from runnerd.protocol.requests import Pty, RlimitValue

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


T = TypeVar("T", bound=msgspec.Struct)

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


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    client: str = f"runnerd.client/{__version__}",
    incarnation: str | None = None,
    fence: int | Literal["current"] | None = None,
    encoding: Encoding = Encoding.MSGPACK,
    timeout_s: float = 10.0,
) -> Client:
    """Connect to a daemon and say hello.

    Args:
        path: The socket; by default $RUNNERD_SOCKET, else /run/runnerd/runnerd.sock if it
            exists, else $XDG_RUNTIME_DIR/runnerd/runnerd.sock.
        client: Who is calling, for the daemon's log; at most 256 characters.
        incarnation: The daemon start expected; another one refuses before any effect.
        fence: The owner's; see Hello.
        encoding: MessagePack, or JSON for a look at the wire.
        timeout_s: The most to wait for the daemon's hello, in seconds.

    Raises:
        ConnectFailed: If no socket is there, nobody listens, or it may not be opened.
        RemoteError: If the daemon refused the hello.
        ClientTimeout: If it did not answer in time.
    """
    connected = Client(open_socket(path, timeout_s), encoding)
    try:
        connected.greet(client, incarnation, timeout_s, fence)
    except BaseException:
        connected.close()
        raise
    return connected


class Client:
    """One connection to a daemon; made by connect().

    Args:
        connection: A connected stream socket; the client owns and closes it.
        encoding: How messages are written.

    Attributes:
        hello: What the daemon said of itself when the connection was opened.
    """

    hello: HelloAnswer

    def __init__(self, connection: socket.socket, encoding: Encoding = Encoding.MSGPACK) -> None:
        self._link = Link(connection, encoding)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether requests can still be sent."""
        return self._link.end is None

    def close(self) -> None:
        """Close the connection. Everything that runs keeps running."""
        self._link.close()

    @property
    def unsent_bytes(self) -> int:
        """Bytes the socket has not taken yet; the next receive_events() sends them."""
        return self._link.unsent_bytes

    def fileno(self) -> int:
        """Return the socket's descriptor, for a select of the caller's own."""
        return self._link.fileno()

    # Starting and following execs

    def start(
        self,
        argv: Sequence[str],
        *,
        attach: bool = True,
        streams: Sequence[Literal["stdout", "stderr"]] = ("stdout", "stderr"),
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
        **fields: Unpack[StartFields],
    ) -> Exec:
        """Start one command; returns once it runs.

        Attached, its output is in flow "block": the command waits for output() to be read, as
        in a pipe. If this call times out the command may have been started: pass an exec_id to
        be able to ask.

        Args:
            argv: The program and its arguments; no shell is involved.
            attach: Whether to subscribe to its output.
            streams: Which streams to subscribe to.
            window_bytes: Output sent and not yet read by output(); None = no such limit, then
                an exec that is not read while others are is detached at QUEUE_BYTES_MAX.
            timeout_s: The most to wait for the answer, in seconds.
            fields: The other fields of ExecStart.

        Raises:
            RemoteError: start_failed with stage and errno; invalid_params; busy; ...
            ClientTimeout: If no answer came in time.
        """
        assert not isinstance(argv, str), "argv is a list; there is no shell to split a string"
        try:
            subscribe = Attach(streams=list(streams), window_bytes=window_bytes) if attach else None
            params = ExecStart(argv=list(argv), attach=subscribe, **fields)
        except RequestError as error:
            raise RemoteError.before_sending(error) from error

        def opened(answer: msgspec.Struct) -> Exec:
            assert isinstance(answer, StartAnswer)
            return Exec(
                self,
                self._link,
                answer.exec_id,
                pid=answer.pid,
                created=answer.created,
                subscription=answer.subscription,
                window_bytes=window_bytes,
            )

        return self._follow("exec.start", params, opened, timeout_s)

    def attach(
        self,
        exec_id: str,
        *,
        after: int | Literal["tail"] = 0,
        streams: Sequence[Literal["stdout", "stderr"]] = ("stdout", "stderr"),
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Exec:
        """Subscribe to an exec that exists; its output is replayed from `after` on.

        Args:
            exec_id: The exec.
            after: A sequence; 0 = all that is kept; "tail" = only what comes from now on.
            streams: Which streams to subscribe to.
            window_bytes: As in start().
            timeout_s: The most to wait for the answer, in seconds.

        Raises:
            RemoteError: exec_unknown; exec_evicted, with the exit in its data.
            ClientTimeout: If no answer came in time.
        """
        try:
            params = ExecAttach(
                exec_id=exec_id, after=after, streams=list(streams), window_bytes=window_bytes
            )
        except RequestError as error:
            raise RemoteError.before_sending(error) from error

        def opened(answer: msgspec.Struct) -> Exec:
            assert isinstance(answer, AttachAnswer)
            return Exec(
                self,
                self._link,
                exec_id,
                pid=answer.pid,
                created=False,
                subscription=answer.subscription,
                window_bytes=window_bytes,
            )

        return self._follow("exec.attach", params, opened, timeout_s)

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002  # the name subprocess.run gave it
        timeout_s: float | None = None,
        **fields: Unpack[StartFields],
    ) -> Completed:
        """Run one command to its exit and return what it printed, all of it in memory.

        Args:
            argv: The program and its arguments.
            input: What to feed its stdin; empty = /dev/null.
            timeout_s: The client's patience, in seconds. It ends nothing: give deadline_s to
                have the command ended.
            fields: The other fields of ExecStart.

        Raises:
            RemoteError: As start().
            ClientTimeout: If it has not exited by then. It runs on, detached.
            StreamLost: If the connection ended before the exit.
        """
        deadline_s = deadline(timeout_s)
        if input:
            fields = {"stdin": "pipe", **fields}
        handle = self.start(argv, window_bytes=None, timeout_s=timeout_s, **fields)
        feeder = StdinFeeder(handle.exec_id)
        if input:
            feeder.offer(input)
            feeder.end()
            self._feed(feeder)
        chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        try:
            while notes := handle.take_output(deadline_s):
                for note in notes:
                    if isinstance(note, OutputNote):
                        chunks[note.stream].append(note.data)
                if feeder.error is not None:
                    raise feeder.error
        except ClientTimeout:
            handle.detach()
            raise
        assert handle.exit is not None
        return Completed(
            handle.exit,
            b"".join(chunks["stdout"]),
            b"".join(chunks["stderr"]),
            handle.gap_bytes,
        )

    # Requests with an answer

    def wait(
        self,
        exec_id: str,
        *,
        until: Literal["exited", "closed"] = "exited",
        timeout_s: float | None = None,
    ) -> Exit:
        """Wait for an exec's end; consumes nothing.

        Args:
            exec_id: The exec.
            until: exited = the command's own exit; closed = nothing of it is left.
            timeout_s: The most to wait, in seconds; None = as long as it takes.

        Raises:
            ClientTimeout: If it has not ended by then; nothing was changed.
            RemoteError: exec_unknown.
        """
        # The daemon keeps the time, so that no wait is left behind there; the client's own is
        # a second later and only for a daemon that does not answer.
        patience_s = None if timeout_s is None else max(timeout_s, 0.001)
        params = ExecWait(exec_id=exec_id, until=until, timeout_s=patience_s)
        try:
            return self._ask(
                "exec.wait", params, Exit, None if patience_s is None else patience_s + 1
            )
        except RemoteError as error:
            if error.kind == "wait_timeout":
                raise ClientTimeout(f"'{exec_id}' has not {until} after {timeout_s} s") from error
            raise

    def signal(
        self,
        exec_id: str,
        signal: str | int,
        *,
        to: Literal["command", "group", "tree"] = "command",
    ) -> SignalAnswer:
        """Send one signal to an exec's command, its process group or its whole tree.

        Raises:
            RemoteError: exec_unknown; exec_ended; not_permitted.
        """
        try:
            params = ExecSignal(exec_id=exec_id, signal=signal, to=to)
        except RequestError as error:
            raise RemoteError.before_sending(error) from error
        return self._ask("exec.signal", params, SignalAnswer)

    def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Tell an exec's terminal its new size, 1 to 65535 each.

        Raises:
            RemoteError: exec_unknown; exec_ended; invalid_params where it has no terminal.
        """
        self.call("exec.resize", ExecResize(exec_id=exec_id, rows=rows, cols=cols))

    def cancel(
        self,
        exec_id: str,
        *,
        grace_s: float | None = None,
        wait: bool = True,
        tombstone: bool = False,
    ) -> CancelAnswer:
        """End an exec and everything it started, and tell what that took.

        Args:
            exec_id: The exec.
            grace_s: Seconds between TERM and KILL; the exec's own if None; 0 = KILL at once.
            wait: Return once all is gone or the survivors are known, not when ending began.
            tombstone: Of an id never seen, leave a mark that refuses a start arriving later.

        Raises:
            RemoteError: exec_unknown, without `tombstone`.
        """
        params = ExecCancel(exec_id=exec_id, grace_s=grace_s, wait=wait, tombstone=tombstone)
        return self._ask("exec.cancel", params, CancelAnswer, None if wait else CALL_TIMEOUT_S)

    def inspect(self, exec_id: str, *, usage: bool = False, tree: bool = False) -> ExecInfo:
        """Describe an exec: everything but its environment.

        Raises:
            RemoteError: exec_unknown.
        """
        return self._ask(
            "exec.inspect", ExecInspect(exec_id=exec_id, usage=usage, tree=tree), ExecInfo
        )

    def list_execs(
        self,
        *,
        labels: dict[str, str] | None = None,
        usage: bool = False,
        live_only: bool = False,
    ) -> list[ExecInfo]:
        """List execs, in order of acceptance, over as many pages as it takes.

        Args:
            labels: Only those that carry all of these.
            usage: Whether to have each one's processes counted.
            live_only: Leave out those that are closed.
        """
        states: list[Literal["starting", "running", "draining", "lingering", "closed"]] | None
        states = ["starting", "running", "draining", "lingering"] if live_only else None
        found: list[ExecInfo] = []
        cursor: int | None = None
        while True:
            params = ExecList(
                state=states, labels=labels or {}, cursor=cursor, limit=1000, usage=usage
            )
            page = self._ask("exec.list", params, ListAnswer)
            found += page.execs
            cursor = page.next_cursor
            if cursor is None:
                return found

    def set_env(
        self, variables: Mapping[str, str] | None = None, *, unset: Sequence[str] = ()
    ) -> EnvAnswer:
        """Set and unset variables of every exec started later in this incarnation.

        Args:
            variables: Name to value.
            unset: Names to take away.

        Raises:
            RemoteError: invalid_params, with nothing changed.
        """
        return self._ask("env.set", EnvSet(set=dict(variables or {}), unset=list(unset)), EnvAnswer)

    def ping(self) -> None:
        """Return once the daemon has answered."""
        self.call("ping", Ping())

    def info(self) -> DaemonInfo:
        """Describe the daemon."""
        return self._ask("daemon.info", DaemonInfoRequest(), DaemonInfo)

    def metrics(self, format: Literal["text", "openmetrics"] = "text") -> MetricsAnswer:  # noqa: A002
        """Read the daemon's metrics."""
        return self._ask("daemon.metrics", DaemonMetrics(format=format), MetricsAnswer)

    def drain(self) -> None:
        """Let the daemon take no new work, until undrain()."""
        self.call("daemon.drain", DaemonDrain())

    def undrain(self) -> None:
        """Let the daemon take new work again."""
        self.call("daemon.undrain", DaemonUndrain())

    def stop(self) -> None:
        """Stop the daemon; returns when it has begun to, every exec is then being ended."""
        self.call("daemon.stop", DaemonStop())

    def call(
        self, method: str, params: Params, *, timeout_s: float | None = None
    ) -> msgspec.Struct:
        """Make one request and wait for its answer, a struct of the type ANSWERS has for it.

        Raises:
            RemoteError: If it was refused or failed.
            ClientTimeout: If no answer came within timeout_s; the request may take effect yet.
            StreamLost: If the connection ended first; likewise.
        """
        replies: list[Answer | Failure] = []
        request_id = self._link.request(method, params, replies.append)
        return self._answer(request_id, method, replies, timeout_s)

    # Pipelining, and other selects

    def send(self, method: str, params: Params) -> int:
        """Make a request without waiting; its answer comes out of receive_events().

        Returns:
            Its id.
        """
        return self._link.request(method, params)

    def receive_events(self, timeout_s: float | None = None) -> list[Event]:
        """Return the events that belong to no call() and no Exec: what send() asked for.

        Args:
            timeout_s: The most to wait for one, in seconds; 0 = take what is there; None = as
                long as it takes.

        Returns:
            At least one event; none only if timeout_s was 0.

        Raises:
            ClientTimeout: If none came in time.
            StreamLost: If the connection ended; what came before was returned first.
        """
        try:
            self._link.wait_until(lambda: self._link.events, deadline(timeout_s), "an event")
        except ClientTimeout:
            if timeout_s != 0:
                raise
        return self._link.take_events()

    # Inner workings

    def greet(
        self,
        client: str,
        incarnation: str | None,
        timeout_s: float,
        fence: int | Literal["current"] | None = None,
    ) -> None:
        """Say hello; connect() does."""
        params = Hello(
            protocol=[*PROTOCOL_VERSIONS], client=client, incarnation=incarnation, fence=fence
        )
        self.hello = self._ask("hello", params, HelloAnswer, timeout_s)

    def _ask(
        self,
        method: str,
        params: Params,
        kind: type[T],
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> T:
        answer = self.call(method, params, timeout_s=timeout_s)
        assert isinstance(answer, kind)
        return answer

    def _feed(self, feeder: StdinFeeder) -> None:
        def taken(reply: Answer | Failure) -> None:
            if isinstance(reply, Failure):
                feeder.failed(reply.error)
            elif isinstance(reply.result, WriteAnswer):
                feeder.answered(reply.result)
            self._feed(feeder)

        write = feeder.next_write()
        if write is not None and self.is_open:
            self._link.request("exec.write", write, taken)

    def _follow(
        self,
        method: str,
        params: Params,
        opened: Callable[[msgspec.Struct], Exec],
        timeout_s: float | None,
    ) -> Exec:
        replies: list[Answer | Failure] = []
        handles: list[Exec] = []

        def taken(reply: Answer | Failure) -> None:
            # The handle is made while the answer is handed out and not after: its first records
            # may stand in the same bytes.
            replies.append(reply)
            if isinstance(reply, Answer):
                handle = opened(reply.result)
                handles.append(handle)
                number = getattr(reply.result, "subscription", None)
                if isinstance(number, int):
                    self._link.follow(number, handle.receive)

        request_id = self._link.request(method, params, taken)
        self._answer(request_id, method, replies, timeout_s)
        return handles[0]

    def _answer(
        self,
        request_id: int,
        method: str,
        replies: list[Answer | Failure],
        timeout_s: float | None,
    ) -> msgspec.Struct:
        try:
            self._link.wait_until(lambda: replies, deadline(timeout_s), f"the answer to {method}")
        except BaseException:
            self._link.abandon(request_id)
            raise
        reply = replies[0]
        if isinstance(reply, Failure):
            raise reply.error
        return reply.result
