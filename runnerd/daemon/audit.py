"""The audit: each change that a client asks for, written down by a thread of its own.

The loop hands lines over and never waits: where the disk does not keep up, or fails, lines are
lost, counted, and the file says how many once it works again. It is no condition of serving: a
full disk must not keep anybody from ending a command.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from runnerd.core.audit import Asked, Settled

from .disk import Disk

if TYPE_CHECKING:
    from .audit_file import AuditFile
    from .log import Log
    from .poller import Owner, Poller

WAITING_MAX: Final = 1024
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
_BATCH_MAX: Final = 64


class Audit:
    """What waits to be written. All methods are for the loop's own thread.

    Args:
        file: Opened at boot, from here on the thread's.
        poller: Tells what the thread has done.
        owner: Who is told of a failure that no disk can be blamed for.
        log: For the disk's.

    Attributes:
        written: Lines written.
        lost: Lines that could not be.
        failure: Why the last could not, or None while it works.
    """

    def __init__(self, file: AuditFile, *, poller: Poller, owner: Owner, log: Log) -> None:
        self.written = 0
        self.lost = 0
        self.failure: str | None = None
        self._file = file
        self._owner = owner
        self._log = log
        self._waiting: deque[Settled] = deque()
        self._waiting_bytes = 0
        self._untold = 0  # of `lost`, what the file does not say yet
        self._is_writing = False
        self._disk = Disk(poller, owner, self._hung, name="audit")

    def settled(self, asked: Asked, result: str, exec_id: str | None) -> None:
        """A change was answered, or never will be; see Settled."""
        is_full = len(self._waiting) >= WAITING_MAX
        if is_full or self._waiting_bytes + asked.cost_bytes > WAITING_BYTES_MAX:
            self._lose(1)
            return
        self._waiting.append(Settled(asked, result, exec_id))
        self._waiting_bytes += asked.cost_bytes
        if not self._is_writing:
            self._write()

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count

    def _take(self, count: int) -> list[Settled]:
        batch = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._waiting_bytes -= sum(each.asked.cost_bytes for each in batch)
        return batch

    def _write(self) -> None:
        batch, told = self._take(_BATCH_MAX), self._untold
        self._is_writing = True
        self._disk.submit(
            lambda: self._file.append(batch, told),
            lambda result: self._wrote(len(batch), told, result),
        )

    def _wrote(self, count: int, told: int, result: Exception | None) -> None:
        self._is_writing = False
        if result is None:
            self.written += count
            self._untold -= told
            self._works(told)
        else:
            self._lose(count)
            if not isinstance(result, OSError):
                self._owner.stray(result)
            self._fails(getattr(result, "strerror", None) or repr(result))
        if self._waiting:
            self._write()

    def _works(self, told: int) -> None:
        if self.failure is not None:
            self.failure = None
            self._log.info("audit_works_again", lost=told)

    def _fails(self, reason: str) -> None:
        if self.failure is None:
            self._log.warning("audit_failed", reason=reason)
        self.failure = reason

    def _hung(self) -> None:
        self._fails("the disk does not answer")

    def finish(self, within_s: float) -> None:
        """Write all that waits, at the end of the daemon; waits for it, but no longer than this."""
        rest, told, done = self._take(len(self._waiting)), self._untold, threading.Event()

        def write_last() -> None:
            try:
                if rest or told:
                    self._file.append(rest, told)
            finally:
                done.set()

        self._disk.submit(write_last, lambda _result: None)
        if not done.wait(within_s):
            self._fails("it was not written in time")
