"""The handle of one exec in the blocking client."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from runnerd.protocol.answers import (
    CancelAnswer,
    ClosedNote,
    Exit,
    ExitedNote,
    GapNote,
    OutputNote,
    SignalAnswer,
    WriteAnswer,
)

from .errors import ClientError, ClientTimeout, OutputOverflow
from .feeding import StdinFeeder
from .link import QUEUE_BYTES_MAX, deadline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from runnerd.protocol.answers import Closed, ExecInfo

    from .blocking import Client
    from .link import Link

# An ack for every chunk would cost as much as the chunk.
ACK_BYTES: Final = 128 * 1024

# An empty record costs memory too: each is counted with what its object takes.
_RECORD_BYTES: Final = 256


class Exec:
    """One exec, as one client sees it.

    As a context manager it cancels, at the end of the block, the exec it created, if that has
    not ended by then; one that was attached to is left alone.

    Attributes:
        exec_id: The exec.
        pid: The command's pid, None where it had gone when this handle was made.
        created: Whether this handle's start made the exec.
        exit: How the command ended, once that is known; never made up.
        closed: Once nothing of the exec is left and its subscription told so.
        gap_bytes: Output bytes announced as no longer kept, as far as their number is known.
        last_seq: The last record that output() is done with: another one was asked for.
    """

    def __init__(
        self,
        client: Client,
        link: Link,
        exec_id: str,
        *,
        pid: int | None,
        created: bool,
        subscription: int | None,
        window_bytes: int | None,
    ) -> None:
        self._client = client
        self._link = link
        self.exec_id = exec_id
        self.pid = pid
        self.created = created
        self.exit: Exit | None = None
        self.closed: Closed | None = None
        self.gap_bytes = 0
        self.last_seq = 0
        self._subscription = subscription
        self._window_bytes = window_bytes
        self._unacknowledged_bytes = 0
        self._queue: deque[OutputNote | GapNote] = deque()
        self._queued_bytes = 0
        self._has_overflowed = False
        self._stdin_bytes = 0 if created else None

    def __repr__(self) -> str:
        return f"<Exec {self.exec_id}>"

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
            StreamLost: If the connection ended before the exit.
        """
        while True:
            while self._queue:
                note = self._queue.popleft()
                self._queued_bytes -= _weight_bytes(note)
                yield note
                self._took(note)
            self._check_overflow()
            if self.exit is not None:
                return
            if self._subscription is None:
                raise ClientError(
                    f"'{self.exec_id}' is not attached", hint="use client.attach(exec_id)"
                )
            self._wait_news(deadline(timeout_s))

    def take_output(self, deadline_s: float | None) -> list[OutputNote | GapNote]:
        """Wait for records and take all that are there; none only once the command has exited.

        Args:
            deadline_s: When to give up, on the monotonic clock; None = never.

        Raises:
            ClientTimeout: If no record came by then.
            OutputOverflow: If too much waited here while others were read, with no window.
            StreamLost: If the connection ended before the exit.
        """
        self._check_overflow()
        self._wait_news(deadline_s)
        taken = [*self._queue]
        self._queue.clear()
        self._queued_bytes = 0
        for note in taken:
            self._took(note)
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

        Args:
            data: The bytes.
            eof: Close stdin after them.
            timeout_s: The most to wait for room, in seconds; None = as long as it takes.

        Returns:
            Bytes taken over the exec's whole life.

        Raises:
            RemoteError: stdin_closed if the command no longer reads, exec_ended if it exited.
            ClientTimeout: If there was no room for all of it in time; what was taken, was.
        """
        if self._stdin_bytes is None:
            self._stdin_bytes = self.inspect().stdin_accepted_bytes or 0
        deadline_s = deadline(timeout_s)
        feeder = StdinFeeder(self.exec_id, self._stdin_bytes)
        feeder.offer(data)
        if eof:
            feeder.end()
        while (request := feeder.next_write(_left_s(deadline_s))) is not None:
            answer = self._client.call("exec.write", request)
            assert isinstance(answer, WriteAnswer)
            feeder.answered(answer)
            self._stdin_bytes = feeder.accepted_bytes
            if feeder.waiting_bytes and deadline_s is not None and time.monotonic() >= deadline_s:
                raise ClientTimeout(
                    f"{feeder.waiting_bytes} of {len(data)} bytes found no room in stdin of "
                    f"'{self.exec_id}'",
                    hint="the command does not read its stdin, or nobody reads its output",
                )
        return feeder.accepted_bytes

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
        answer = self._client.cancel(self.exec_id, grace_s=grace_s, wait=wait)
        if answer.exit is not None:
            self.exit = answer.exit
        return answer

    def inspect(self, *, usage: bool = False) -> ExecInfo:
        """Describe the exec; see Client.inspect."""
        return self._client.inspect(self.exec_id, usage=usage)

    def detach(self) -> None:
        """End the subscription; the exec goes on. Output received so far can still be taken."""
        if self._subscription is not None:
            self._link.detach(self._subscription)
            self._subscription = None

    def receive(self, note: OutputNote | GapNote | ExitedNote | ClosedNote) -> None:
        """Take an event of this exec's subscription; called by the client."""
        if isinstance(note, ExitedNote):
            self.exit = note.exit
        elif isinstance(note, ClosedNote):
            self.closed = note.closed
            self._subscription = None
        else:
            self._queue.append(note)
            self._queued_bytes += _weight_bytes(note)
            if self._queued_bytes > QUEUE_BYTES_MAX:
                self._has_overflowed = True
                self.detach()

    def _check_overflow(self) -> None:
        if self._has_overflowed and not self._queue:
            raise OutputOverflow(self.exec_id, self.last_seq, QUEUE_BYTES_MAX)

    def _has_news(self) -> bool:
        return bool(self._queue) or self.exit is not None or self._has_overflowed

    def _took(self, note: OutputNote | GapNote) -> None:
        self.last_seq = note.last_seq if isinstance(note, GapNote) else note.seq
        if isinstance(note, GapNote):
            self.gap_bytes += (note.stdout_bytes or 0) + (note.stderr_bytes or 0)
            return
        if self._window_bytes is None:
            return
        self._unacknowledged_bytes += len(note.data)
        if self._unacknowledged_bytes >= min(self._window_bytes // 2, ACK_BYTES):
            self._acknowledge()

    def _acknowledge(self) -> None:
        if self._unacknowledged_bytes and self._subscription is not None:
            self._unacknowledged_bytes = 0
            self._link.ack(self._subscription, self.last_seq)

    def _wait_news(self, deadline_s: float | None) -> None:
        if not self._queue:
            # Before waiting, whatever the window: the daemon keeps what is not acknowledged, and
            # where its memory for that is less than the window, it waits for this loop.
            self._acknowledge()
        self._link.wait_until(self._has_news, deadline_s, f"output of '{self.exec_id}'")


def _weight_bytes(note: OutputNote | GapNote) -> int:
    return _RECORD_BYTES + (len(note.data) if isinstance(note, OutputNote) else 0)


def _left_s(deadline_s: float | None) -> float | None:
    # A wait of 0 is refused by the daemon, which takes it for a mistake.
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.001)
