"""The handle of one exec in the async client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import anyio

from runnerd.protocol.answers import CancelAnswer
from runnerd.protocol.exits import Exit
from runnerd.protocol.notes import GapNote, OutputNote

from .asking import write_steps
from .async_link import Bells
from .errors import ClientError
from .following import Following
from .steps import drive_async

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from runnerd.protocol.answers import ExecInfo, SignalAnswer

    from .async_link import AsyncLink
    from .asynchronous import AsyncClient
    from .following import Opened
    from .routing import Record

# What the end of a block may take although its task is cancelled: TERM, the grace of 5 s, KILL.
CANCEL_S: Final = 30.0


class AsyncExec(Following):
    """One exec, as one client sees it; see Following for what it knows.

    As a context manager it cancels, at the end of the block, the exec it created, if that has
    not ended by then, also where the block's task is cancelled; one that was attached to is left
    alone. Any number of tasks may use it; output is for one of them, each record comes once.
    """

    def __init__(self, client: AsyncClient, link: AsyncLink, opened: Opened) -> None:
        self._client = client
        self._link = link
        self._bells = Bells()
        self._stdin_lock = anyio.Lock()
        super().__init__(link.router, opened)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.created or self.exit is not None or not self._client.is_open:
            return
        try:
            with anyio.move_on_after(CANCEL_S, shield=True):
                await self.cancel()
        except ClientError:
            # The block's own error says more than a failure to clean up after it.
            if error is None:
                raise

    def receive(self, record: Record) -> None:
        """Take an event of this exec's subscription; called by the client."""
        super().receive(record)
        self._bells.ring()

    def unfed(self, error: ClientError) -> None:
        """Take why feed() ended early; called by the client. The next output() raises it, once."""
        super().unfed(error)
        self._bells.ring()

    def output(self, timeout_s: float | None = None) -> Output:
        """Iterate over the output until the command's exit, which is then in `exit`.

        What was taken is acknowledged when the next record is asked for, so that with a window
        the command waits for this loop and for nothing else.

        Args:
            timeout_s: The most to wait for one record, in seconds; None = as long as it takes.

        Returns:
            For `async for`: chunks, and in the place of what is no longer kept, gaps. It raises
            ClientTimeout if no record came in time (iterating may go on), OutputOverflow if too
            much waited here with no window, StreamLost if the connection was lost for good
            before the exit, RemoteError if the rest of the output is gone.
        """
        return Output(self, timeout_s)

    async def next_record(self, timeout_s: float | None) -> OutputNote | GapNote | None:
        """Return the next record, None once the command has exited; see output()."""
        self._check()
        if not self._queue:
            self._acknowledge()
            await self._link.wait(
                self._bells, lambda: self._has_news, timeout_s, f"output of '{self.exec_id}'"
            )
            self._check()
        return self._pop()

    def took(self, note: OutputNote | GapNote) -> None:
        """Take that a record is done with; output() says so itself."""
        self._took(note)

    async def wait(self, timeout_s: float | None = None) -> Exit:
        """Wait for the command's own exit.

        Output is not read here: a command started with flow "block" that writes more than fits
        waits for output() and does not end before. Use run() to have both.

        Raises:
            ClientTimeout: If it has not exited by then; nothing was changed.
            StreamLost: If the connection was lost for good first.
        """
        if self.exit is None:
            self.exit = await self._client.wait(self.exec_id, timeout_s=timeout_s)
        return self.exit

    async def wait_closed(self, timeout_s: float | None = None) -> Exit:
        """Wait until nothing of the exec is left, its leftovers included; see wait()."""
        self.exit = await self._client.wait(self.exec_id, until="closed", timeout_s=timeout_s)
        return self.exit

    async def write(self, data: bytes, *, eof: bool = False, timeout_s: float | None = None) -> int:
        """Feed the command's stdin, waiting for room as a pipe does; one task at a time.

        Cancelled, some of it, all or nothing was taken, and no further write is made through
        this handle: its place in the stream is not known.

        Args:
            data: The bytes.
            eof: Close stdin after them.
            timeout_s: The most to wait for room, in seconds; None = as long as it takes.

        Returns:
            Bytes taken over the exec's whole life.

        Raises:
            RemoteError: stdin_closed if the command no longer reads, exec_ended if it exited.
            ClientTimeout: If there was no room for all of it in time; what was taken, was.
            ClientError: If an earlier write was cancelled.
        """
        async with self._stdin_lock:
            self._check_stdin()
            if self._stdin_bytes is None:
                self._stdin_bytes = (await self.inspect()).stdin_accepted_bytes or 0
            with self._writing(data, eof=eof) as feeder:
                return await drive_async(self._client, write_steps(feeder, timeout_s))

    async def close_stdin(self) -> None:
        """Close the command's stdin after what was written."""
        await self.write(b"", eof=True)

    async def signal(
        self, signal: str | int, to: Literal["command", "group", "tree"] = "command"
    ) -> SignalAnswer:
        """Send one signal; see AsyncClient.signal."""
        return await self._client.signal(self.exec_id, signal, to=to)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size; see AsyncClient.resize."""
        await self._client.resize(self.exec_id, rows, cols)

    async def cancel(self, grace_s: float | None = None, *, wait: bool = True) -> CancelAnswer:
        """End the exec and everything it started; see AsyncClient.cancel."""
        answer = await self._client.cancel(
            self.exec_id, grace_s=grace_s, wait=wait, if_nonce=self.nonce
        )
        if answer.exit is not None:
            self.exit = answer.exit
        return answer

    async def inspect(self, *, usage: bool = False, tree: bool = False) -> ExecInfo:
        """Describe the exec; see AsyncClient.inspect."""
        return await self._client.inspect(self.exec_id, usage=usage, tree=tree)


class Output:
    """An exec's output, for `async for`; made by AsyncExec.output()."""

    def __init__(self, handle: AsyncExec, timeout_s: float | None) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._given: OutputNote | GapNote | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputNote | GapNote:
        if self._given is not None:
            self._handle.took(self._given)
            self._given = None
        self._given = await self._handle.next_record(self._timeout_s)
        if self._given is None:
            raise StopAsyncIteration
        return self._given
