"""The journal: what the next incarnation is to know. The loop hands rows over, a thread writes.

The loop never touches the disk. A start is handed over before its command runs and waited for, at
most JOURNAL_WAIT_S (core/bounds.py); an exit is handed over at once and not waited for; all else
goes along with the next of these, or after LAZY_S. Whatever has come by the time the thread looks
is one transaction.

A journal that fails is left alone: starts go on with `journaled: false`, and after RETRY_S
everything that is known is written anew in one transaction, so no gap is ever left in the middle.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from runnerd.core.past import Past

from .poller import EPOLLIN, Owner, Poller
from .wake import Wake

if TYPE_CHECKING:
    from .journal_file import JournalFile
    from .log import Log

LAZY_S: Final = 0.02
RETRY_S: Final = 30.0
HUNG_S: Final = 2.0  # who waits for longer, or a write that takes it: the disk hangs
BEHIND_MAX: Final = 4096  # handed over and not written: nor may that fill the memory
_BATCH_MAX: Final = 512
_LAZY_MAX: Final = 256
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})

Rows = dict[int, Past | bytes | None]
Done = Callable[[bool], None]


class _Writing(NamedTuple):
    """What is handed to the thread in one piece.

    Attributes:
        rows: By number; None takes a row away.
        meta: Numbers by name, see JournalFile.write.
        anew: Whether this is everything there is.
        ticket: Whom to tell, or None.
        look: Whether to see that the file is still there, where nothing is to be written.
        last: Whether the file is to be closed after it.
    """

    rows: Rows
    meta: dict[str, int]
    anew: bool = False
    ticket: int | None = None
    look: bool = False
    last: bool = False


class _Written(NamedTuple):
    """What the thread did with some of it.

    Attributes:
        tickets: Whose.
        failure: Why it is not written, or None.
        anew: Whether everything there was is written.
        is_gone: Whether it failed because somebody has taken the file away.
        defect: What no disk can be blamed for.
    """

    tickets: list[int]
    failure: str | None
    anew: bool
    is_gone: bool = False
    defect: Exception | None = None


class Journal:
    """The journal as the loop sees it. All methods are for the loop's own thread.

    Args:
        file: Opened at boot, from here on the thread's; None where there is no journal.
        reason: Why there is none.
        poller: Tells what the thread has done.
        log: For its failures.
        everything: Returns all there is to know, for a journal that is written anew.
        meta: Returns the numbers that are to be known with it.
        on_defect: Told of a failure of the thread that no disk can be blamed for: uncaught.

    Attributes:
        exists: Whether there is one, failed at the moment or not.
        is_on: Whether a row handed over now will be written.
        reason: Why not, in words, or None.
        is_gone: Whether that is because somebody has taken the file away.
        failures: How often it has failed.
    """

    def __init__(
        self,
        file: JournalFile | None,
        reason: str | None,
        *,
        poller: Poller,
        log: Log,
        everything: Callable[[], Mapping[int, Past | bytes]],
        meta: Callable[[], dict[str, int]],
        on_defect: Callable[[Exception], None],
    ) -> None:
        self.is_on = file is not None
        self.reason = reason
        self.failures = 0
        self.is_gone = False
        self._poller = poller
        self._log = log
        self._everything = everything
        self._meta = meta
        self._on_defect = on_defect
        self._lazy: Rows = {}
        self._lazy_meta: dict[str, int] = {}
        self._lazy_armed = False
        self._waiting: dict[int, tuple[float, Owner, Done]] = {}
        self._tickets = 0
        self._retrying = False
        self._retry_armed = False
        self._finishing = False
        self._began_s: float | None = None  # of what the thread is writing; set by it alone
        self._queue: queue.SimpleQueue[_Writing] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Written] = queue.SimpleQueue()
        self._finished = threading.Event()
        self.exists = file is not None
        if file is None:
            return
        self._wake = Wake()
        poller.watch(self._wake.fd, EPOLLIN, self._take_done, self)
        threading.Thread(target=self._write_all, args=(file,), name="journal", daemon=True).start()

    def stray(self, error: Exception) -> None:
        """See Owner: what is known of the journal's own state is not known any more."""
        self._on_defect(error)

    # ------------------------------------------------------------------ handing over

    def begin(self, past: Past, owner: Owner, on_done: Done) -> None:
        """Write a start before its command runs.

        Args:
            past: As far as it is known.
            owner: Whose failure it is if `on_done` fails.
            on_done: Told once, later, whether it is written.
        """
        self._put_and_wait({past.number: past}, {}, owner, on_done, takes=self.is_on)

    def raise_fence(self, fence: int, owner: Owner, on_done: Done) -> None:
        """Write the highest fence, also behind all that is being written anew; see begin."""
        self._put_and_wait({}, {"fence": fence}, owner, on_done, takes=self._takes)

    def note(self, past: Past) -> None:
        """Write what is known of an exec by now, within LAZY_S."""
        self._keep({past.number: past})

    def exited(self, past: Past) -> None:
        """Write an exit, at once."""
        self._keep({past.number: past})
        self._flush()

    def failed(self, number: int) -> None:
        """Take a start back that has failed, at once: its id is free again."""
        self._keep({number: None})
        self._flush()

    def dropped(self, numbers: Iterable[int], highest: int) -> None:
        """Take rows away: nothing is to be known of these execs any more.

        Args:
            numbers: Theirs.
            highest: The highest ever dropped.
        """
        if self._takes:
            self._lazy_meta["dropped"] = highest
        self._keep(dict.fromkeys(numbers))

    def notice_hang(self) -> None:
        """Fail it where the thread does not come back from the disk, though nobody waits for it."""
        if self.is_on and not self._finishing:
            self._gives_up()

    def look(self) -> None:
        """Have the thread see that the file is there, though nothing may be written for long."""
        if self.is_on and not self._finishing and self._queue.empty():
            self._queue.put(_Writing({}, {}, look=True))

    @property
    def _takes(self) -> bool:
        return self.is_on or self._retrying

    def _keep(self, rows: Rows) -> None:
        if not self._takes:
            return
        self._lazy |= rows
        if len(self._lazy) > _LAZY_MAX:
            self._flush()
        elif not self._lazy_armed:
            self._lazy_armed = True
            self._poller.call_at(time.monotonic() + LAZY_S, self, self._lazy_due)

    def _lazy_due(self) -> None:
        self._lazy_armed = False
        self._flush()

    def _flush(self) -> None:
        if not self._lazy or self._gives_up():
            return
        self._queue.put(_Writing(self._lazy, self._lazy_meta))
        self._lazy, self._lazy_meta = {}, {}

    def _put_and_wait(
        self, rows: Rows, meta: dict[str, int], owner: Owner, on_done: Done, *, takes: bool
    ) -> None:
        if not takes or self._gives_up():
            self._poller.call_soon(owner, lambda: on_done(False))
            return
        self._tickets += 1
        self._waiting[self._tickets] = time.monotonic(), owner, on_done
        # With what was put off before it: once a row is written, so is all that came before.
        self._queue.put(_Writing(self._lazy | rows, self._lazy_meta | meta, ticket=self._tickets))
        self._lazy, self._lazy_meta = {}, {}

    def _gives_up(self) -> bool:
        """Fail it where the thread does not come back from the disk; returns whether it did."""
        oldest_s = next((since_s for since_s, _, _ in self._waiting.values()), None)
        hangs = self._is_hung or (oldest_s is not None and time.monotonic() - oldest_s > HUNG_S)
        # While everything is written anew nobody waits, and that may take its time.
        if (hangs and self.is_on) or self._queue.qsize() >= BEHIND_MAX:
            self._failed("the disk hangs")
            return True
        return False

    @property
    def _is_hung(self) -> bool:
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > HUNG_S

    # ------------------------------------------------------------------ what became of it

    def _take_done(self, _events: int) -> None:
        self._wake.take()
        while not self._done.empty():
            written = self._done.get_nowait()
            if written.defect is not None:
                self._on_defect(written.defect)
            if written.failure is not None:
                self.is_gone = written.is_gone or (self.is_gone and not self.is_on)
                self._failed(written.failure)
            elif written.anew and self._retrying:  # else it was given up meanwhile, with what came
                self._works_again()
            for ticket in written.tickets:
                self._tell(ticket, is_written=written.failure is None)

    def _tell(self, ticket: int, *, is_written: bool) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return  # told before that it is not
        _, owner, on_done = waiting
        try:
            on_done(is_written)
        except Exception as error:  # noqa: BLE001 - the owner's failure, survived here
            owner.stray(error)

    def _failed(self, reason: str) -> None:
        if self.is_on:
            self.failures += 1
            self._log.warning("journal_failed", reason=reason)
        if self.is_on or self._retrying:
            self.reason = reason
            self._arm_retry()
        self.is_on = self._retrying = False
        self._lazy, self._lazy_meta = {}, {}
        for ticket in list(self._waiting):
            self._tell(ticket, is_written=False)

    def _arm_retry(self) -> None:
        if not self._retry_armed:
            self._retry_armed = True
            self._poller.call_at(time.monotonic() + RETRY_S, self, self._retry)

    def _retry(self) -> None:
        self._retry_armed = False
        if self.is_on:
            return
        if self._queue.empty() and not self._is_hung:
            self._write_anew()
        else:
            self._arm_retry()

    def _write_anew(self) -> None:
        # What happens until it is written is handed over behind it.
        self._retrying = True
        self._queue.put(_Writing({**self._everything()}, self._meta(), anew=True))

    def _works_again(self) -> None:
        self._retrying = False
        self.is_on = True
        self.is_gone = False
        self.reason = None
        self._log.info("journal_works_again")

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Hand over what is left and have the file closed; nothing can be handed over after it."""
        if not self.exists or self._finishing:
            return
        self._finishing = True
        self._flush()
        if not self.is_on and self._queue.empty():
            self._write_anew()
        self.is_on = self._retrying = False
        self._queue.put(_Writing({}, {}, last=True))

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until the file is closed; returns whether it is. For when nothing else is to do."""
        return not self.exists or self._finished.wait(max(0.0, timeout_s))

    # ------------------------------------------------------------------ the thread

    def _write_all(self, file: JournalFile) -> None:
        # Signals are for the main thread and the guard's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._write_batches(file)
            with contextlib.suppress(*file.errors):  # what was committed stays in the file's log
                file.close()
        except Exception as error:  # noqa: BLE001 - handed to the loop, which ends the daemon
            self._say(_Written([], repr(error), anew=False, defect=error))
        self._finished.set()

    def _write_batches(self, file: JournalFile) -> None:
        works, last = True, False
        while not last:
            batch = [self._queue.get()]
            while len(batch) < _BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            last = any(each.last for each in batch)
            self._began_s = time.monotonic()
            written = self._write_batch(file, batch, works=works)
            self._began_s = None
            works = written.failure is None
            self._say(written)

    def _say(self, written: _Written) -> None:
        self._done.put(written)
        self._wake.tell()

    def _write_batch(self, file: JournalFile, batch: list[_Writing], *, works: bool) -> _Written:
        rows: Rows = {}
        meta: dict[str, int] = {}
        anew = False
        for each in batch:
            if each.anew:
                rows, anew = {}, True
            rows |= each.rows
            meta |= each.meta
        tickets = [each.ticket for each in batch if each.ticket is not None]
        if not works and not anew:
            # There is a gap behind it; only everything at once can follow.
            return _Written(tickets, "an earlier write failed", anew=False)
        try:
            if rows or meta or anew:
                file.write(rows, meta, anew=anew)
            elif any(each.look for each in batch):
                file.check()
        except file.errors as error:
            is_gone = isinstance(error, OSError) and error.errno in _GONE
            failure = f"{type(error).__name__}: {error}"
            return _Written(tickets, failure, anew=False, is_gone=is_gone)
        return _Written(tickets, None, anew)
