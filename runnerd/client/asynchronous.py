"""The async client: the same conversation as the blocking one, on anyio, so on asyncio and trio.

    async with connect() as runner:
        async with await runner.start(["make"]) as proc:
            async for record in proc.output():
                ...

Any number of tasks share one client. A call that is cancelled leaves it usable: its answer is
thrown away, and a start that is cancelled is undone, whether or not it had arrived. Install
`runnerd[async]` for anyio; nothing else of this package needs it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal, TypeVar

try:
    import anyio
except ModuleNotFoundError as error:
    missing = f"{error}; the async client is in runnerd[async]: pip install 'runnerd[async]'"
    raise ModuleNotFoundError(missing, name=error.name) from error
import msgspec

from runnerd.protocol.daemon_answers import HelloAnswer
from runnerd.protocol.daemon_requests import EventsSubscribe
from runnerd.protocol.fields import Params
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import ExecAttach, ExecCancel, ExecStart

from .asking import Requests, asynchronous
from .async_execs import AsyncExec
from .async_link import AsyncLink, Bells
from .async_watches import AsyncWatch
from .command import CommandWay
from .errors import ClientError, ClientTimeout
from .feeding import StdinFeeder
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
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Unpack

    from .requesting import StartFields, Stream
    from .routing import Reply
    from .wire import OptionFields

T = TypeVar("T", bound=msgspec.Struct)


@contextlib.asynccontextmanager
async def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = HELLO_S,
    **options: Unpack[OptionFields],
) -> AsyncIterator[AsyncClient]:
    """Connect to a daemon for the length of a block; see blocking.connect for all of it.

    At the block's end the connection is closed and everything that runs keeps running, but for
    what a handle's own block cancels. What the block raises comes out as it is.

    Raises:
        ConnectFailed: If no socket is there, nobody listens, or it may not be opened.
        TokenUnreadable: If the token's file cannot be read.
        RemoteError: If the daemon refused the hello.
        ClientTimeout: If it did not answer in time.
    """
    # Connecting to a Unix socket waits only for a full backlog, and then is a typed error soon.
    chosen = Options(**options)
    link = AsyncLink(*SocketWay.open(path, timeout_s), chosen)
    async with _greeted(link, timeout_s) as client:
        yield client


@contextlib.asynccontextmanager
async def connect_command(
    command: Sequence[str], *, timeout_s: float = HELLO_S, **options: Unpack[OptionFields]
) -> AsyncIterator[AsyncClient]:
    """Connect through a command for the length of a block; see blocking.connect_command.

    Raises:
        ConnectFailed: If it cannot be started, or ends without a byte.
        TokenUnreadable: If the token's file cannot be read.
        RemoteError: If the daemon refused the hello.
        ClientTimeout: If it did not answer in time.
    """
    chosen = Options(**options)
    link = AsyncLink(*CommandWay.open(command), chosen)
    async with _greeted(link, timeout_s) as client:
        yield client


@contextlib.asynccontextmanager
async def _greeted(link: AsyncLink, timeout_s: float) -> AsyncIterator[AsyncClient]:
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.serve)
            try:
                await link.wait_greeted(timeout_s)
                yield AsyncClient(link)
            finally:
                await link.settle()
                link.end()
    except BaseExceptionGroup as group:
        # Only the block itself raises into the group: nobody should have to write except*.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        await link.leave()


class AsyncClient:
    """One caller's conversation with a daemon; made by connect().

    A method shown to return `Steps[X]` is awaited and returns X, as in blocking.Client.
    """

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._router = link.router
        self._conversation = link.router.conversation

    @property
    def hello(self) -> HelloAnswer:
        """What the daemon said of itself when the present connection, or the last, was opened."""
        assert self._conversation.hello is not None
        return self._conversation.hello

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made: the connection is there, or being tried for."""
        return self._conversation.end is None

    # Starting and following execs

    async def start(
        self,
        argv: Sequence[str],
        *,
        attach: bool = True,
        streams: Sequence[Stream] = BOTH,
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
        **fields: Unpack[StartFields],
    ) -> AsyncExec:
        """Start one command; returns once it runs. See blocking.Client.start.

        Cancelled before its answer, the start is undone: an exec.cancel follows it, which ends
        what it made, or leaves a tombstone that refuses it when it arrives.

        Raises:
            RemoteError: start_failed with stage and errno; invalid_params; busy; ...
            ClientTimeout: If no answer came in time.
        """
        request = start_request(
            argv, attach=attach, streams=streams, window_bytes=window_bytes, fields=fields
        )
        prepared = self._conversation.prepared(request)
        nonce_is_ours = request.nonce is None
        try:
            return await self._follow(
                "exec.start", prepared, nonce_is_ours=nonce_is_ours, timeout_s=timeout_s
            )
        except ClientTimeout as error:
            raise start_timed_out(error, prepared) from error
        except ClientError:
            raise
        except BaseException:
            if nonce_is_ours and self.is_open:
                self._undo(prepared)
            raise

    async def attach(
        self,
        exec_id: str,
        *,
        after: int | Literal["tail"] = 0,
        streams: Sequence[Stream] = BOTH,
        window_bytes: int | None = WINDOW_BYTES,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> AsyncExec:
        """Subscribe to an exec that exists; its output is replayed from `after` on.

        Raises:
            RemoteError: exec_unknown; exec_evicted, with the exit in its data.
            ClientTimeout: If no answer came in time.
        """
        request = attach_request(exec_id, after=after, streams=streams, window_bytes=window_bytes)
        return await self._follow("exec.attach", request, nonce_is_ours=False, timeout_s=timeout_s)

    async def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002  # the name subprocess.run gave it
        **fields: Unpack[StartFields],
    ) -> Completed:
        """Run one command to its exit and return what it printed, all of it in memory.

        Cancelled, it cancels the command.

        Args:
            argv: The program and its arguments.
            input: What to feed its stdin; empty = /dev/null.
            fields: The other fields of ExecStart.

        Raises:
            RemoteError: As start(). Or its input can no longer be fed, or the rest of its output is
                gone, with the exit in the error's data: the command is then cancelled.
            StreamLost: If the connection was lost for good before the exit.
        """
        assert not isinstance(input, str), "input is bytes; encode the string"
        if input:
            fields = {"stdin": "pipe", **fields}
        chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async with await self.start(argv, **fields) as handle:
            if input:
                self.feed(handle, input)
            try:
                async for record in handle.output():
                    if isinstance(record, OutputNote):
                        chunks[record.stream].append(record.data)
            except BaseException:
                handle.detach()  # where the cancel at the block's end is refused too
                raise
            assert handle.exit is not None
            return Completed(
                handle.exit,
                b"".join(chunks["stdout"]),
                b"".join(chunks["stderr"]),
                handle.gap_bytes,
            )

    def feed(self, handle: AsyncExec, data: bytes) -> StdinFeeder:
        """Feed a new exec's stdin to its end in the background; see blocking.Client.feed."""
        feeder = StdinFeeder(handle.exec_id)
        if data:
            feeder.offer(data)
        feeder.end()
        feed(self._router, feeder, self._link.later, handle.unfed)
        return feeder

    async def call(
        self, method: str, params: Params, *, timeout_s: float | None = None
    ) -> msgspec.Struct:
        """Make one request and wait for its answer, a struct of the type ANSWERS has for it.

        Raises:
            RemoteError: If it was refused or failed.
            Ambiguous: If its connection was lost, and it must not be made again.
            ClientTimeout: If no answer came within timeout_s; the request may take effect yet.
            StreamLost: If the connection was lost for good first; likewise.
        """
        return await self._call(method, params, lambda _answer: None, timeout_s)

    async def events(self, *, timeout_s: float | None = CALL_TIMEOUT_S) -> AsyncWatch:
        """Watch what happens in the daemon from now on: `async for event in await x.events()`.

        Raises:
            RemoteError: busy, where there are too many subscriptions.
            ClientTimeout: If no answer came in time.
        """
        watches: list[AsyncWatch] = []

        def opened(answer: msgspec.Struct) -> None:
            watches.append(AsyncWatch(self._link, answer))

        try:
            await self._call("events.subscribe", EventsSubscribe(), opened, timeout_s)
        except BaseException:
            for watch in watches:
                watch.close()
            raise
        return watches[0]

    # Requests with one answer: asking.py has what each does

    wait = asynchronous(Requests.wait)
    signal = asynchronous(Requests.signal)
    resize = asynchronous(Requests.resize)
    cancel = asynchronous(Requests.cancel)
    inspect = asynchronous(Requests.inspect)
    forget = asynchronous(Requests.forget)
    list_execs = asynchronous(Requests.list_execs)
    set_env = asynchronous(Requests.set_env)
    claim = asynchronous(Requests.claim)
    pin = asynchronous(Requests.pin)
    unpin = asynchronous(Requests.unpin)
    activity = asynchronous(Requests.activity)
    ping = asynchronous(Requests.ping)
    info = asynchronous(Requests.info)
    health = asynchronous(Requests.health)
    metrics = asynchronous(Requests.metrics)
    drain = asynchronous(Requests.drain)
    undrain = asynchronous(Requests.undrain)
    stop = asynchronous(Requests.stop)

    # Inner workings

    async def _follow(
        self,
        method: str,
        request: ExecStart | ExecAttach,
        *,
        nonce_is_ours: bool,
        timeout_s: float | None,
    ) -> AsyncExec:
        handles: list[AsyncExec] = []

        def opened(answer: msgspec.Struct) -> None:
            # While the answer is handed out and not after: its first records may stand in the
            # same bytes.
            made = opened_by(request, answer, nonce_is_ours=nonce_is_ours)
            handles.append(AsyncExec(self, self._link, made))

        try:
            await self._call(method, request, opened, timeout_s)
        except BaseException:
            for handle in handles:
                handle.detach()
            raise
        return handles[0]

    async def _call(
        self,
        method: str,
        params: Params,
        opened: Callable[[msgspec.Struct], None],
        timeout_s: float | None,
    ) -> msgspec.Struct:
        replies: list[Reply] = []
        bells = Bells()

        def taken(reply: Reply) -> None:
            replies.append(reply)
            if isinstance(reply, Answer):
                opened(reply.result)
            bells.ring()

        request_id = self._router.request(method, params, taken)
        try:
            await self._link.wait(bells, lambda: replies, timeout_s, f"the answer to {method}")
        except BaseException:
            self._router.abandon(request_id)
            raise
        reply = replies[0]
        if isinstance(reply, Failure):
            raise reply.error
        return reply.result

    def _undo(self, started: ExecStart) -> None:
        assert started.exec_id is not None
        params = ExecCancel(
            exec_id=started.exec_id, if_nonce=started.nonce, wait=False, tombstone=True
        )
        self._link.ask_on_the_way_out("exec.cancel", params)
