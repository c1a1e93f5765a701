"""The blocking client: one Unix socket, the standard library, no threads.

Thread-safety: none. One Client, with its Execs, belongs to one thread; make a Client for each
thread, connections are cheap. A signal handler may not use a Client its thread is in the middle
of using.

A signal handler that raises (Ctrl-C does) leaves a Client usable. Where it came in the middle of
taking in what the daemon sent, whatever was followed ends as Interrupted: a record may be missing,
which nobody could tell otherwise. In the middle of the bytes themselves, the connection is given up
for another one, as if it had been lost. Not seen are: the one record that output() was about to
return, which its successor's offset tells; answers to send() that were being given out; and an
interruption of the very loss of a connection.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from runnerd.protocol.daemon_answers import HelloAnswer
from runnerd.protocol.daemon_requests import EventsSubscribe
from runnerd.protocol.fields import Params
from runnerd.protocol.notes import OutputNote

from .asking import Requests, blocking
from .errors import ClientError, ClientTimeout
from .execs import Exec
from .feeding import StdinFeeder
from .link import Link, deadline
from .locate import SocketWay
from .requesting import (
    BOTH,
    CALL_TIMEOUT_S,
    WINDOW_BYTES,
    Completed,
    attach_request,
    opened_by,
    start_request,
    start_timed_out,
)
from .routing import feed
from .session import Answer, Failure
from .wire import HELLO_S, Options

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self, Unpack

    from runnerd.protocol.requests import ExecStart

    from .conversation import Occurrence
    from .requesting import StartFields, Stream
    from .watches import Watch
    from .wire import OptionFields

__all__ = ["CALL_TIMEOUT_S", "WINDOW_BYTES", "Client", "Completed", "connect", "connect_command"]

H = TypeVar("H")


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = HELLO_S,
    **options: Unpack[OptionFields],
) -> Client:
    """Connect to a daemon and say hello.

    The client outlives its connection: where that is lost it tries for another one to the same
    incarnation, and every call, wait and output() goes on as if nothing had been. What is not
    safe to send twice and may have arrived raises Ambiguous, and only that.

    Args:
        path: The socket; by default $RUNNERD_SOCKET, else /run/runnerd/runnerd.sock if it
            exists, else $XDG_RUNTIME_DIR/runnerd/runnerd.sock.
        timeout_s: The most to wait for the daemon's hello, in seconds; a connection lost before
            it came is tried for again too.
        options:
            client: Who is calling, for the daemon's log; at most 256 characters.
            incarnation: The daemon start expected; another one refuses before any effect.
            fence: The owner's, said in every hello; see Hello.
            token: The secret the daemon asks for, see its --token-file.
            token_file: The file that holds it; with neither, $RUNNERD_TOKEN_FILE names it.
            encoding: MessagePack, or JSON for a look at the wire.
            reconnect_s: How long to try for another connection once one is lost, in seconds,
                before StreamLost is raised, 60 if not given; 0 = not at all. Where nobody
                listens any more, 5 s at most.
            on_lost: Called each time a connection is lost and another is going to be tried for.

    Raises:
        ConnectFailed: If no socket is there, nobody listens, or it may not be opened.
        TokenUnreadable: If the token's file cannot be read.
        RemoteError: If the daemon refused the hello.
        ClientTimeout: If it did not answer in time.
    """
    chosen = Options(**options)
    return _greeted(Link(*SocketWay.open(path, timeout_s), chosen), timeout_s)


def connect_command(
    command: Sequence[str], *, timeout_s: float = HELLO_S, **options: Unpack[OptionFields]
) -> Client:
    """Connect to a daemon through a command, `docker exec -i NAME runnerctl bridge`, say.

    For a daemon whose socket cannot be reached from here. The command's standard input and output
    are the connection. It is started again where the connection is lost, by the same rules as
    with connect(), which has the other arguments; it ends with the client.

    Args:
        command: The program, looked for on PATH, and its arguments; no shell is involved. It is
            in a session of its own: Ctrl-C does not reach it, and it cannot ask on the terminal.
        timeout_s: The most to wait for the daemon's hello, in seconds.
        options: As for connect().

    Raises:
        ConnectFailed: If it cannot be started, or ends without a byte; with what it said on
            standard error.
        TokenUnreadable: If the token's file cannot be read.
        RemoteError: If the daemon refused the hello.
        ClientTimeout: If it did not answer in time.
    """
    from .command import CommandWay  # noqa: PLC0415  # subprocess is a third of an import of us

    chosen = Options(**options)
    return _greeted(Link(*CommandWay.open(command), chosen), timeout_s)


def _greeted(link: Link, timeout_s: float) -> Client:
    connected = Client(link)
    try:
        connected.greet(timeout_s)
    except BaseException:
        connected.close()
        raise
    return connected


class Client:
    """One caller's conversation with a daemon; made by connect().

    A method shown to return `Steps[X]` returns X: what it asks is written once for both clients.

    Args:
        link: How it is carried; the client owns and closes it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._router = link.router
        self._conversation = link.router.conversation

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
    def hello(self) -> HelloAnswer:
        """What the daemon said of itself when the present connection, or the last, was opened."""
        assert self._conversation.hello is not None
        return self._conversation.hello

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made: the connection is there, or being tried for."""
        return self._conversation.end is None

    def close(self) -> None:
        """Close the connection. Everything that runs keeps running."""
        self._link.leave()

    @property
    def unsent_bytes(self) -> int:
        """Bytes the socket has not taken yet; the next receive_events() sends them."""
        return self._link.unsent_bytes

    @property
    def wake_at_s(self) -> float | None:
        """When receive_events() has to be called at the latest, ready or not; None = never.

        On time.monotonic()'s clock: between two connections there is nothing to select on.
        """
        return self._link.wake_at_s

    def fileno(self) -> int:
        """Return the socket's descriptor, for a select of the caller's own.

        It is another one after a reconnect, and -1 between two connections.
        """
        return self._link.fileno()

    # Starting and following execs

    def start(
        self,
        argv: Sequence[str],
        *,
        attach: bool = True,
        streams: Sequence[Stream] = BOTH,
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
        **fields: Unpack[StartFields],
    ) -> Exec:
        """Start one command; returns once it runs.

        Attached, its output is in flow "block": the command waits for output() to be read, as
        in a pipe. The start has an id and a nonce of this client's making where none are given,
        so that a lost connection starts nothing twice. If this call times out the command may
        have been started: the error names the id to ask about.

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
        request = start_request(
            argv, attach=attach, streams=streams, window_bytes=window_bytes, fields=fields
        )
        prepared = self._conversation.prepared(request)
        nonce_is_ours = request.nonce is None

        def opened(answer: msgspec.Struct) -> Exec:
            made = opened_by(prepared, answer, nonce_is_ours=nonce_is_ours)
            return Exec(self, self._link, made)

        try:
            return self._follow("exec.start", prepared, opened, timeout_s)
        except ClientTimeout as error:
            raise start_timed_out(error, prepared) from error

    def attach(
        self,
        exec_id: str,
        *,
        after: int | Literal["tail"] = 0,
        streams: Sequence[Stream] = BOTH,
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Exec:
        """Subscribe to an exec that exists; its output is replayed from `after` on.

        Args:
            exec_id: The exec.
            after: A sequence; 0 = all that is kept; "tail" = only what comes from now on, and
                the exit.
            streams: Which streams to subscribe to.
            window_bytes: As in start().
            timeout_s: The most to wait for the answer, in seconds.

        Raises:
            RemoteError: exec_unknown; exec_evicted, with the exit in its data.
            ClientTimeout: If no answer came in time.
        """
        request = attach_request(exec_id, after=after, streams=streams, window_bytes=window_bytes)

        def opened(answer: msgspec.Struct) -> Exec:
            return Exec(self, self._link, opened_by(request, answer, nonce_is_ours=False))

        return self._follow("exec.attach", request, opened, timeout_s)

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
            RemoteError: As start(). Or its input can no longer be fed, or the rest of its output is
                gone, with the exit in the error's data: the command is then cancelled.
            ClientTimeout: If it has not exited by then. It runs on, detached.
            StreamLost: If the connection ended before the exit.
        """
        deadline_s = deadline(timeout_s)
        assert not isinstance(input, str), "input is bytes; encode the string"
        if input:
            fields = {"stdin": "pipe", **fields}
        handle = self.start(argv, window_bytes=None, timeout_s=timeout_s, **fields)
        chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        try:
            if input:
                self.feed(handle, input)
            while notes := handle.take_output(deadline_s):
                for note in notes:
                    if isinstance(note, OutputNote):
                        chunks[note.stream].append(note.data)
        except BaseException as error:
            handle.detach()
            # Nobody feeds or reads it any more; only what is not its own failure leaves it running.
            has_failed = isinstance(error, ClientError) and not isinstance(error, ClientTimeout)
            if has_failed and handle.created and self.is_open:
                with contextlib.suppress(ClientError):
                    handle.cancel(wait=False)
            raise
        assert handle.exit is not None
        return Completed(
            handle.exit,
            b"".join(chunks["stdout"]),
            b"".join(chunks["stderr"]),
            handle.gap_bytes,
        )

    def feed(self, handle: Exec, data: bytes) -> StdinFeeder:
        """Feed a new exec's stdin to its end while other calls and output() wait; see run().

        Args:
            handle: As start() returned it, with stdin "pipe" and nothing written yet.
            data: All of its input.

        Returns:
            What tells how far it is; `error` is why it stopped, but for a command that no
            longer reads. The handle's output() raises that once.
        """
        feeder = StdinFeeder(handle.exec_id)
        if data:
            feeder.offer(data)
        feeder.end()
        feed(self._router, feeder, self._link.later, handle.unfed)
        return feeder

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
        request_id = self._router.request(method, params, replies.append)
        return self._answer(request_id, method, replies, timeout_s)

    def events(self, *, timeout_s: float | None = CALL_TIMEOUT_S) -> Watch:
        """Watch what happens in the daemon from now on: `for event in client.events()`.

        Args:
            timeout_s: The most to wait for the answer, in seconds.

        Raises:
            RemoteError: busy, where there are too many subscriptions.
            ClientTimeout: If no answer came in time.
        """
        # Not part of what every command line pays for.
        from .watches import Watch  # noqa: PLC0415

        return self._follow(
            "events.subscribe", EventsSubscribe(), lambda made: Watch(self._link, made), timeout_s
        )

    # Requests with one answer: asking.py has what each does

    wait = blocking(Requests.wait)
    signal = blocking(Requests.signal)
    resize = blocking(Requests.resize)
    cancel = blocking(Requests.cancel)
    inspect = blocking(Requests.inspect)
    forget = blocking(Requests.forget)
    list_execs = blocking(Requests.list_execs)
    set_env = blocking(Requests.set_env)
    claim = blocking(Requests.claim)
    pin = blocking(Requests.pin)
    unpin = blocking(Requests.unpin)
    activity = blocking(Requests.activity)
    ping = blocking(Requests.ping)
    info = blocking(Requests.info)
    health = blocking(Requests.health)
    metrics = blocking(Requests.metrics)
    drain = blocking(Requests.drain)
    undrain = blocking(Requests.undrain)
    stop = blocking(Requests.stop)

    # Pipelining, and other selects

    def prepared(self, params: ExecStart) -> ExecStart:
        """Return the start as send() sends it: with the id, nonce and horizon it lacks."""
        return self._conversation.prepared(params)

    def send(self, method: str, params: Params) -> int:
        """Make a request without waiting; its answer comes out of receive_events().

        Returns:
            Its id.
        """
        return self._router.request(method, params)

    def receive_events(self, timeout_s: float | None = None) -> list[Occurrence]:
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
            self._link.wait_until(lambda: self._router.events, deadline(timeout_s), "an event")
        except ClientTimeout:
            if timeout_s != 0:
                raise
        return self._router.take_events()

    # Inner workings

    def greet(self, timeout_s: float) -> None:
        """Wait for the first hello's answer; connect() does."""
        conversation = self._conversation
        self._link.wait_until(
            lambda: conversation.is_greeted, deadline(timeout_s), "the answer to hello"
        )

    def _follow(
        self,
        method: str,
        params: Params,
        opened: Callable[[msgspec.Struct], H],
        timeout_s: float | None,
    ) -> H:
        replies: list[Answer | Failure] = []
        handles: list[H] = []

        def taken(reply: Answer | Failure) -> None:
            # The handle is made while the answer is handed out and not after: its first records
            # may stand in the same bytes.
            replies.append(reply)
            if isinstance(reply, Answer):
                handles.append(opened(reply.result))

        request_id = self._router.request(method, params, taken)
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
            self._router.abandon(request_id)
            raise
        reply = replies[0]
        if isinstance(reply, Failure):
            raise reply.error
        return reply.result
