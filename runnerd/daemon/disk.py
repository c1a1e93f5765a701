"""A thread that reads and writes a file, so that the loop never waits for a disk.

What it is given is done one after the other, in the order it was given: a block of the spool is
read before its slot is written again, because it was asked for before. The calls themselves run
without the GIL. What came of them goes back to the loop by way of an eventfd.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from runnerd.core.bounds import DISK_HUNG_S

from .poller import EPOLLIN, Owner, Poller, Timer
from .wake import Wake

Result = TypeVar("Result")

_DONE_MAX: Final = 4  # told in a turn: what a read brought is taken before the next drives it out
_CHECK_EVERY_S: Final = 1.0


class Disk:
    """A thread and its queue; all methods are for the loop's own thread.

    Args:
        poller: Watches the eventfd.
        owner: Who is told of a failure.
        on_hung: Called once a second while one piece of work takes longer than DISK_HUNG_S.
        name: The thread's.
    """

    def __init__(
        self, poller: Poller, owner: Owner, on_hung: Callable[[], None], *, name: str
    ) -> None:
        self._poller = poller
        self._owner = owner
        self._on_hung = on_hung
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: deque[Callable[[], None]] = deque()
        self._wake = Wake()
        self._outstanding = 0
        self._check: Timer | None = None
        self._began_s: float | None = None  # of what the thread is at; written by it alone
        poller.watch(self._wake.fd, EPOLLIN, lambda _events: self._tell(), owner)
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(
        self, work: Callable[[], Result], done: Callable[[Result | Exception], None]
    ) -> None:
        """Have work done in the thread, then `done` called in the loop with what came of it."""

        def run() -> None:
            result: Result | Exception
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - whoever asked for it is told
                result = error
            self._done.append(lambda: done(result))

        self._outstanding += 1
        if self._check is None:
            self._check_later()
        self._waiting.put(run)

    def _serve(self) -> None:
        # Signals are for the guard and the loop.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            run = self._waiting.get()
            self._began_s = time.monotonic()
            run()
            del run  # or it would hold its records until the next one comes
            self._began_s = None
            self._wake.tell()

    def _tell(self) -> None:
        self._wake.take()
        for _ in range(_DONE_MAX):
            if not self._done:
                return
            self._outstanding -= 1
            self._done.popleft()()
        if self._done:
            self._wake.tell()

    def _check_later(self) -> None:
        self._check = self._poller.call_at(
            time.monotonic() + _CHECK_EVERY_S, self._owner, self._check_hung
        )

    def _check_hung(self) -> None:
        self._check = None
        if self._outstanding:
            self._check_later()
        if self.is_hung:
            self._on_hung()

    @property
    def is_hung(self) -> bool:
        """Whether one piece of work takes longer than DISK_HUNG_S."""
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > DISK_HUNG_S
