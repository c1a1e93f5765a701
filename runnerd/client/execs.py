"""The handle of one exec in the blocking client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runnerd.protocol.answers import CancelAnswer, SignalAnswer
from runnerd.protocol.exits import Exit
from runnerd.protocol.notes import GapNote, OutputNote

from .asking import write_steps
from .errors import ClientError
from .following import Following
from .link import deadline
from .steps import drive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from runnerd.protocol.answers import ExecInfo

    from .blocking import Client
    from .following import Opened
    from .link import Link


class Exec(Following):
    """One exec, as one client sees it; see Following for what it knows.

    As a context manager it cancels, at the end of the block, the exec it created, if that has
    not ended by then; one that was attached to is left alone.
    """

    def __init__(self, client: Client, link: Link, opened: Opened) -> None:
        super().__init__(link.router, opened)
        self._client = client
        self._link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.created or self.exit is not None or not self._client.is_open:
            return
        try:
            self.cancel()
        except ClientError:
            # The block's own error says more than a failure to clean up after it.
            if error is None:
                raise

    def output(self, timeout_s: float | None = None) -> Iterator[OutputNote | GapNote]:
        """Iterate over the output until the command's exit, which is then in `exit`.

        What was taken is acknowledged when the next record is asked for, so that with a window
        the command waits for this loop and for nothing else.

        Args:
            timeout_s: The most to wait for one record, in seconds; None = as long as it takes.

        Yields:
            Chunks, and in the place of what is no longer kept, gaps.

        Raises:
            ClientTimeout: If no record came in time; iterating may go on with a new output().
            OutputOverflow: If too much waited here while others were read, with no window.
            StreamLost: If the connection was lost before the exit, and none came in its place.
            Interrupted: If an earlier call was interrupted, and may have lost a record by it.
            RemoteError: If the rest of the output is gone, with the exit in its data.
        """
        while True:
            while (note := self._pop()) is not None:
                yield note
                self._took(note)
            self._check()
            if self._is_complete:
                return
            self._wait_news(deadline(timeout_s))

    def take_output(self, deadline_s: float | None) -> list[OutputNote | GapNote]:
        """Wait for records and take all that are there; none only once the command has exited.

        Args:
            deadline_s: When to give up, on the monotonic clock; None = never.

        Raises:
            ClientTimeout: If no record came by then.
            OutputOverflow: If too much waited here while others were read, with no window.
            StreamLost: If the connection was lost before the exit, and none came in its place.
            RemoteError: If the rest of the output is gone, with the exit in its data.
        """
        self._check()
        self._wait_news(deadline_s)
        taken: list[OutputNote | GapNote] = []
        while (note := self._pop()) is not None:
            taken.append(note)
            self._took(note)
        if not taken:
            self._check()
        return taken

    def wait(self, timeout_s: float | None = None) -> Exit:
        """Wait for the command's own exit.

        Output is not read here: a command started with flow "block" that writes more than fits
        waits for output() and does not end before. Use run() to have both.

        Args:
            timeout_s: The most to wait, in seconds; None = as long as it takes.

        Raises:
            ClientTimeout: If it has not exited by then; nothing was changed.
            StreamLost: If the connection ended first.
        """
        if self.exit is None:
            self.exit = self._client.wait(self.exec_id, timeout_s=timeout_s)
        return self.exit

    def wait_closed(self, timeout_s: float | None = None) -> Exit:
        """Wait until nothing of the exec is left, its leftovers included; see wait()."""
        self.exit = self._client.wait(self.exec_id, until="closed", timeout_s=timeout_s)
        return self.exit

    def write(self, data: bytes, *, eof: bool = False, timeout_s: float | None = None) -> int:
        """Feed the command's stdin, waiting for room as a pipe does.

        Interrupted (KeyboardInterrupt, what a signal handler raises), some of it, all or nothing
        was taken, and no further write is made through this handle: its place in the stream is
        not known.

        Args:
            data: The bytes.
            eof: Close stdin after them.
            timeout_s: The most to wait for room, in seconds; None = as long as it takes.

        Returns:
            Bytes taken over the exec's whole life.

        Raises:
            RemoteError: stdin_closed if the command no longer reads, exec_ended if it exited.
            ClientTimeout: If there was no room for all of it in time; what was taken, was.
            ClientError: If an earlier write was interrupted.
        """
        self._check_stdin()
        if self._stdin_bytes is None:
            self._stdin_bytes = self.inspect().stdin_accepted_bytes or 0
        with self._writing(data, eof=eof) as feeder:
            return drive(self._client, write_steps(feeder, timeout_s))

    def close_stdin(self) -> None:
        """Close the command's stdin after what was written."""
        self.write(b"", eof=True)

    def signal(
        self, signal: str | int, to: Literal["command", "group", "tree"] = "command"
    ) -> SignalAnswer:
        """Send one signal; see Client.signal."""
        return self._client.signal(self.exec_id, signal, to=to)

    def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size; see Client.resize."""
        self._client.resize(self.exec_id, rows, cols)

    def cancel(self, grace_s: float | None = None, *, wait: bool = True) -> CancelAnswer:
        """End the exec and everything it started; see Client.cancel."""
        answer = self._client.cancel(self.exec_id, grace_s=grace_s, wait=wait, if_nonce=self.nonce)
        if answer.exit is not None:
            self.exit = answer.exit
        return answer

    def inspect(self, *, usage: bool = False, tree: bool = False) -> ExecInfo:
        """Describe the exec; see Client.inspect."""
        return self._client.inspect(self.exec_id, usage=usage, tree=tree)

    def _wait_news(self, deadline_s: float | None) -> None:
        if not self._queue:
            self._acknowledge()
        self._link.wait_until(lambda: self._has_news, deadline_s, f"output of '{self.exec_id}'")
