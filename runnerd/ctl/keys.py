"""Which of the keys typed into a command's terminal to send next, without I/O.

Keys are appended, without an offset: two people may type into one terminal, and a program that
does not read must not keep the detach keys from being seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.errors import Ambiguous, ClientError, RemoteError
from runnerd.client.feeding import ROOM_WAIT_S, WRITE_BYTES_MAX, StdinFeeder
from runnerd.protocol.requests import ExecWrite

if TYPE_CHECKING:
    from runnerd.protocol.answers import WriteAnswer

_WAITING_MAX: Final = 1024 * 1024


class KeyFeeder(StdinFeeder):
    """Feeds what is typed, in the order typed.

    Attributes:
        doubtful_bytes: Keys of which nobody knows whether they arrived.
    """

    doubtful_bytes = 0
    _in_flight_bytes = 0

    @property
    def wants_data(self) -> bool:
        """Whether offer() may be called: always, unless somebody pastes more than can wait."""
        return self.is_over or len(self._waiting) < _WAITING_MAX

    def offer(self, data: bytes | memoryview) -> None:
        """Take the keys pressed next; where none is taken any more, those that detach still are."""
        if not self.is_over:
            self._waiting = memoryview(bytes(self._waiting) + bytes(data))

    def next_write(self, wait_s: float | None = None) -> ExecWrite | None:
        """Return the next request to send, or None while one is under way or nothing waits."""
        if self.is_over or self._in_flight or self.pause_s is not None or not self._waiting:
            return None
        piece = bytes(self._waiting[:WRITE_BYTES_MAX])
        self._in_flight, self._in_flight_bytes = True, len(piece)
        return ExecWrite(exec_id=self.exec_id, data=piece, wait_s=wait_s or ROOM_WAIT_S)

    def answered(self, answer: WriteAnswer) -> None:
        """Take a write's answer; what found no room is sent again, until the command reads."""
        self._took(answer.accepted_bytes)
        self._in_flight = False

    def _took(self, accepted_bytes: int) -> None:
        # What others typed meanwhile counts as ours: a key may be missing then, none is doubled.
        taken_bytes = min(accepted_bytes - self.accepted_bytes, self._in_flight_bytes)
        self.accepted_bytes = accepted_bytes
        self._waiting = self._waiting[taken_bytes:]

    def failed(self, error: ClientError) -> None:
        """Take a write's failure: feeding is over, but for one that only may have failed.

        What a busy daemon did not take is sent again after a pause.
        """
        if not isinstance(error, Ambiguous):
            if isinstance(error, RemoteError) and error.data.accepted_bytes is not None:
                self._took(error.data.accepted_bytes)
            super().failed(error)
            return
        self.doubtful_bytes += self._in_flight_bytes
        self._waiting = self._waiting[self._in_flight_bytes :]
        self._in_flight = False

    def rest(self) -> ExecWrite | None:
        """Return what has not been sent yet, to be sent before leaving."""
        piece = bytes(self._waiting[self._in_flight_bytes if self._in_flight else 0 :])
        return ExecWrite(exec_id=self.exec_id, data=piece) if piece and not self.is_over else None
