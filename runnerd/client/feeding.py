"""Feeding a command's stdin: which write to send next, without I/O.

One write is under way at a time and names its offset, so that the daemon takes every byte once
and in order whatever happens to an answer. The daemon's queue is the flow control: a write waits
there for room (wait_s), and no more is read from the source until it was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.protocol.requests import ExecWrite

from .errors import RemoteError

if TYPE_CHECKING:
    from runnerd.protocol.answers import WriteAnswer

    from .errors import ClientError

# A quarter of the daemon's queue for one exec: large enough that a round trip is small beside
# it, small enough that a tight queue still takes it in one piece.
WRITE_BYTES_MAX: Final = 256 * 1024

# How long one write may wait for room before the daemon answers with what it took. It only
# bounds how long a request stays open; the next write goes on from there.
ROOM_WAIT_S: Final = 60.0

# Where a `busy` does not say when to repeat it.
_PAUSE_S: Final = 1.0

_READER_GONE: Final = frozenset({"stdin_closed", "exec_ended", "exec_evicted", "exec_settled"})


class StdinFeeder:
    """The source's side of one exec's stdin.

    Args:
        exec_id: The exec.
        offset: Bytes of stdin taken before this feeder began.

    Attributes:
        accepted_bytes: Bytes the daemon has taken over the exec's whole life.
        is_over: Whether nothing more can or need be written.
        pause_s: How long to wait before resume(), in seconds, where the daemon was busy.
        error: Why a write failed, but for a command that no longer reads.
    """

    def __init__(self, exec_id: str, offset: int = 0) -> None:
        self.exec_id = exec_id
        self.accepted_bytes = offset
        self.is_over = False
        self.pause_s: float | None = None
        self.error: ClientError | None = None
        self._waiting = memoryview(b"")
        self._at_eof = False
        self._in_flight = False

    @property
    def wants_data(self) -> bool:
        """Whether offer() may be called: nothing waits, and neither side has ended."""
        return not (self.is_over or self._at_eof or self._waiting)

    def offer(self, data: bytes | memoryview) -> None:
        """Take the source's next bytes."""
        assert self.wants_data
        self._waiting = memoryview(data)

    def end(self) -> None:
        """Take the source's end; stdin is closed after what waits."""
        self._at_eof = True

    @property
    def waiting_bytes(self) -> int:
        """Bytes offered and not yet taken by the daemon."""
        return len(self._waiting)

    def next_write(self, wait_s: float | None = None) -> ExecWrite | None:
        """Return the next request to send, or None while one is under way or nothing waits.

        Args:
            wait_s: How long it may wait for room, in seconds, where less than ROOM_WAIT_S.
        """
        is_held = self.is_over or self._in_flight or self.pause_s is not None
        if is_held or not (self._waiting or self._at_eof):
            return None
        piece = self._waiting[:WRITE_BYTES_MAX]
        self._in_flight = True
        return ExecWrite(
            exec_id=self.exec_id,
            offset=self.accepted_bytes,
            data=bytes(piece),
            eof=self._at_eof and len(piece) == len(self._waiting),
            wait_s=ROOM_WAIT_S if wait_s is None else min(wait_s, ROOM_WAIT_S),
        )

    def answered(self, answer: WriteAnswer) -> None:
        """Take a write's answer; what did not fit is sent again from where it stopped."""
        taken_bytes = answer.accepted_bytes - self.accepted_bytes
        self._waiting = self._waiting[taken_bytes:]
        self.accepted_bytes = answer.accepted_bytes
        self._in_flight = False
        self.is_over = self._at_eof and not self._waiting

    def failed(self, error: ClientError) -> None:
        """Take a write's failure.

        A daemon that is busy is asked again, from the same offset, after a pause. With all else
        feeding is over, as it is for a writer into a broken pipe.
        """
        self._in_flight = False
        if isinstance(error, RemoteError) and error.kind == "busy":
            retry_after_s = error.data.retry_after_s
            self.pause_s = _PAUSE_S if retry_after_s is None else retry_after_s
            return
        self._end(error)

    def resume(self) -> None:
        """Take that the pause has passed."""
        self.pause_s = None

    def _end(self, error: ClientError) -> None:
        self.is_over = True
        if error.kind not in _READER_GONE:
            self.error = error
