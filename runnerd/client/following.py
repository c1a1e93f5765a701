"""One exec as one client sees it: what was received, what was taken, what is to be acknowledged.

No I/O: both clients' Exec handles are this with a way to wait.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from runnerd.protocol.answers import StartAnswer
from runnerd.protocol.exits import Exit
from runnerd.protocol.notes import ClosedNote, ExitedNote, GapNote, OutputNote, SupersededNote

from .errors import ClientError, ExitPassed, OutputOverflow, Superseded
from .feeding import StdinFeeder
from .pending import QUEUE_BYTES_MAX, Unfollowed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runnerd.protocol.answers import AttachAnswer
    from runnerd.protocol.exits import Closed

    from .routing import Record, Router

# An ack for every chunk would cost as much as the chunk.
ACK_BYTES: Final = 128 * 1024

# An empty record costs memory too: each is counted with what its object takes.
_RECORD_BYTES: Final = 256


class Opened(msgspec.Struct, frozen=True):
    """What a handle is made from.

    Attributes:
        exec_id: The exec.
        answer: Of the start or attach.
        nonce: The start's, None for an attach.
        is_ours: Whether the exec was created by the request, or by an earlier sending of it.
        window_bytes: As asked for.
    """

    exec_id: str
    answer: StartAnswer | AttachAnswer
    nonce: str | None
    is_ours: bool
    window_bytes: int | None


class Following:
    """The state of a handle.

    Attributes:
        exec_id: The exec.
        nonce: Of its start, where this client made it: cancel acts on nothing else.
        pid: The command's pid, None where it had gone when this handle was made.
        created: Whether this handle's start made the exec.
        exit: How the command ended, once that is known, be it by an answer that came before the
            rest of the output; never made up.
        closed: Once nothing of the exec is left and its subscription told so.
        gap_bytes: Output bytes announced as no longer kept, as far as their number is known.
        last_seq: The last record that output() is done with: another one was asked for.
        known_seq: The exec's last record when this handle attached; 0 for a start.
    """

    def __init__(self, router: Router, opened: Opened) -> None:
        self._router = router
        self.exec_id = opened.exec_id
        self.nonce = opened.nonce
        self.pid = opened.answer.pid
        self.created = opened.is_ours
        self.exit: Exit | None = None
        self.closed: Closed | None = None
        self.gap_bytes = 0
        self.last_seq = 0
        self.known_seq = 0 if isinstance(opened.answer, StartAnswer) else opened.answer.last_seq
        self._subscription = opened.answer.subscription
        self._window_bytes = opened.window_bytes
        self._unacknowledged_bytes = 0
        self._queue: deque[OutputNote | GapNote] = deque()
        self._queued_bytes = 0
        self._broken: ClientError | None = None
        self._unfed: ClientError | None = None
        self._has_exited = False
        self._stdin_bytes = 0 if self.created else None
        self._is_stdin_torn = False
        if self._subscription is not None:
            router.follow(self._subscription, self.receive)

    def __repr__(self) -> str:
        return f"<Exec {self.exec_id}>"

    def detach(self) -> None:
        """End the subscription; the exec goes on. Output received so far can still be taken."""
        if self._subscription is not None:
            self._router.detach(self._subscription)
            self._subscription = None

    def receive(self, record: Record) -> None:
        """Take an event of this exec's subscription; called by the client."""
        if isinstance(record, ExitedNote):
            self.exit = record.exit
            self._has_exited = True
        elif isinstance(record, ClosedNote):
            self.closed = record.closed
            self._break(ExitPassed(record.exec_id))
        elif isinstance(record, SupersededNote):
            self._break(Superseded(record.exec_id, record.subscriber, record.generation))
        elif isinstance(record, Unfollowed):
            self._break(record.error)
        elif isinstance(record, (OutputNote, GapNote)):
            self._queue.append(record)
            self._queued_bytes += _weight_bytes(record)
            if self._queued_bytes > QUEUE_BYTES_MAX:
                self.detach()
                self._break(OutputOverflow(self.exec_id, record_seq(record), QUEUE_BYTES_MAX))

    def unfed(self, error: ClientError) -> None:
        """Take why feed() ended early; called by the client. The next output() raises it, once."""
        self._unfed = error

    def _break(self, error: ClientError) -> None:
        self._subscription = None
        if not self._has_exited:
            self._broken = error

    @property
    def _is_complete(self) -> bool:
        """Whether no output comes after what is queued, and none is missing that was asked for.

        Not by `exit` alone: the answer to a wait or cancel overtakes the output, which waits for
        the window.
        """
        if self._has_exited:
            return True
        is_followed = self._subscription is not None
        is_whole = self._broken is None or isinstance(self._broken, ExitPassed)
        return self.exit is not None and not is_followed and is_whole

    @property
    def _has_news(self) -> bool:
        has_failed = self._broken is not None or self._unfed is not None
        return bool(self._queue) or self._is_complete or has_failed

    def _check(self) -> None:
        """Raise why no more output comes, once all that came was taken.

        Raises:
            OutputOverflow: If too much waited here while others were read, with no window.
            Superseded: If a newer reader of the same name took over.
            RemoteError: If the subscription could not be resumed; with the exit in its data,
                where it is known.
            ClientError: If there is no subscription; once, why feed() ended early.
        """
        if self._queue or self._is_complete:
            return
        if self._unfed is not None:
            error, self._unfed = self._unfed, None
            raise error
        if self._broken is not None:
            raise self._broken
        if self._subscription is None:
            raise ClientError(
                f"'{self.exec_id}' is not attached", hint="use client.attach(exec_id)"
            )

    def _check_stdin(self) -> None:
        """Refuse to write behind a write of which nobody knows how far it got.

        Raises:
            ClientError: If an earlier one was broken off by what is no answer to it.
        """
        if self._is_stdin_torn:
            raise ClientError(
                f"an earlier write to '{self.exec_id}' was broken off half-way",
                hint="inspect() has stdin_accepted_bytes; a new attach() can go on",
            )

    @contextmanager
    def _writing(self, data: bytes, *, eof: bool) -> Iterator[StdinFeeder]:
        """Give what feeds the next bytes of stdin, and keep how far it came."""
        assert self._stdin_bytes is not None
        feeder = StdinFeeder(self.exec_id, self._stdin_bytes)
        feeder.offer(data)
        if eof:
            feeder.end()
        self._is_stdin_torn = True
        try:
            yield feeder
        except ClientError:
            self._is_stdin_torn = False
            raise
        finally:
            self._stdin_bytes = feeder.accepted_bytes
        self._is_stdin_torn = False

    def _pop(self) -> OutputNote | GapNote | None:
        if not self._queue:
            return None
        note = self._queue.popleft()
        self._queued_bytes -= _weight_bytes(note)
        return note

    def _took(self, note: OutputNote | GapNote) -> None:
        self.last_seq = record_seq(note)
        if isinstance(note, GapNote):
            self.gap_bytes += (note.stdout_bytes or 0) + (note.stderr_bytes or 0)
            return
        if self._window_bytes is None:
            return
        self._unacknowledged_bytes += len(note.data)
        if self._unacknowledged_bytes >= min(self._window_bytes // 2, ACK_BYTES):
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge what was taken.

        Also before every wait, whatever the window: the daemon keeps what is not acknowledged,
        and where its memory for that is less than the window, it waits for this reader.
        """
        if self._unacknowledged_bytes and self._subscription is not None:
            self._unacknowledged_bytes = 0
            self._router.ack(self._subscription, self.last_seq)


def record_seq(note: OutputNote | GapNote) -> int:
    """Return the last sequence a record stands for."""
    return note.last_seq if isinstance(note, GapNote) else note.seq


def _weight_bytes(note: OutputNote | GapNote) -> int:
    return _RECORD_BYTES + (len(note.data) if isinstance(note, OutputNote) else 0)
