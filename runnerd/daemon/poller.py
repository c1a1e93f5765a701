"""One epoll for every descriptor of every exec, and one heap for every timer.

Why not a trio task for each descriptor: an exec has four descriptors and lives for milliseconds.
A task and a wait for each of them cost more than the command itself (DECISIONS.md has the
figures), and order between an exec's events would depend on the scheduler. Here one core task
waits for the epoll, and calls the handlers one after the other; each does a bounded piece of
work and never waits.

A handler that raises is a stray failure of its owner: the owner is told, nobody else notices.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
import time
from collections.abc import Callable
from typing import Final, Protocol

import trio

EPOLLIN: Final = select.EPOLLIN
EPOLLOUT: Final = select.EPOLLOUT
EPOLLET: Final = select.EPOLLET
_BATCH: Final = 64
_ROUNDS_MAX: Final = 8  # of descriptors that are ready again at once, before others have a turn
_TURN_S: Final = 0.0003  # for them, and again for bulk work; what others wait for at most, nearly
_SWEEP_MIN: Final = 64  # cancelled timers that are not worth a sweep


class Owner(Protocol):
    """Whoever a handler or timer works for."""

    def stray(self, error: Exception) -> None:
        """Take the failure of one of its handlers."""


class Timer:
    """A call to come; cancel it at any time, also after it was made."""

    __slots__ = ("_poller", "call", "is_queued", "owner")

    def __init__(self, poller: Poller, owner: Owner, call: Callable[[], None]) -> None:
        self._poller = poller
        self.owner: Owner | None = owner
        self.call: Callable[[], None] | None = call
        self.is_queued = True

    def cancel(self) -> None:
        """Do not call; and let go of the owner, who may be gone long before the time comes."""
        if self.call is not None:
            self.call = self.owner = None
            if self.is_queued:
                self._poller.timer_cancelled()


class Poller:
    """Watch descriptors and timers; all methods are for the loop's own thread.

    Attributes:
        before_timers: Called with the time before what is due by it is called, so that timers can
            still be put off.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callable[[int], None], Owner]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled = 0
        self._counter = itertools.count()
        self._scope: trio.CancelScope | None = None
        self._deferred: dict[Callable[[], None], Owner] = {}
        self._bulk: dict[Callable[[], None], Owner] = {}  # in turns
        self._in_batch = False
        self._went_alone = False
        self.before_timers: Callable[[float], None] = lambda _now_s: None

    def watch(self, fd: int, events: int, handler: Callable[[int], None], owner: Owner) -> None:
        """Call handler(events) whenever `fd` is ready, until unwatch.

        Level-triggered: a handler that leaves something is called again. EPOLLHUP and EPOLLERR
        are always reported, so a descriptor that must rest is unwatched, not watched for nothing;
        or watched with EPOLLET too, where its next change is what is waited for.
        """
        self._epoll.register(fd, events)
        self._watched[fd] = (handler, owner)

    def unwatch(self, fd: int) -> None:
        """Stop watching; to be called before the descriptor is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, at_s: float, owner: Owner, call: Callable[[], None]) -> Timer:
        """Call once at a monotonic time, or soon where that has passed."""
        timer = Timer(self, owner, call)
        heapq.heappush(self._timers, (at_s, next(self._counter), timer))
        if self._scope is not None and not self._bulk and self._timers[0][2] is timer:
            self._scope.deadline = trio.current_time() + at_s - time.monotonic()
        return timer

    def call_soon(self, owner: Owner, call: Callable[[], None]) -> Timer:
        """Call once, after what is ready now."""
        return self.call_at(0.0, owner, call)

    def defer(self, owner: Owner, call: Callable[[], None]) -> None:
        """Call once at the end of what is being handled now; deferred twice, called once.

        What several handlers have for one connection is so written in one go.
        """
        self._deferred[call] = owner
        if not self._in_batch and len(self._deferred) == 1:
            self.call_soon(owner, self._run_deferred)

    def defer_bulk(self, owner: Owner, call: Callable[[], None]) -> None:
        """Call once, in turn with other bulk work, after what is ready has been handled.

        A call does one bounded piece and comes back for the next. So a flood of output to fifty
        readers is a queue beside everything else, and not a wall before it.
        """
        self._bulk[call] = owner
        if self._scope is not None:
            self._scope.deadline = -math.inf

    @property
    def has_bulk(self) -> bool:
        """Whether bulk work waits for its turn."""
        return bool(self._bulk)

    def may_go_alone(self) -> bool:
        """Say whether bulk work may be done at once, by one for each turn of this loop.

        So that one flood need not wait for its turn, and many that have room at once do.
        """
        may = not self._bulk and not self._went_alone
        self._went_alone = True
        return may

    def batch(self, handle: Callable[[], object]) -> None:
        """Handle something, then make the calls it deferred."""
        self._in_batch = True
        try:
            handle()
        finally:
            self._in_batch = False
            self._run_deferred()

    def _run_deferred(self) -> None:
        while self._deferred:
            deferred, self._deferred = self._deferred, {}
            for call, owner in deferred.items():
                self._call(owner, lambda _events, call=call: call(), 0)  # type: ignore[misc]

    def timer_cancelled(self) -> None:
        """Sweep the heap once most of it is cancelled: deadlines of hours outlive their execs."""
        self._cancelled += 1
        if self._cancelled > _SWEEP_MIN and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    async def run(self) -> None:
        """Serve for ever. A core task: what escapes it is an uncaught error of the daemon."""
        while True:
            self._went_alone = False
            if self._bulk:
                await trio.lowlevel.checkpoint()
            else:
                with trio.CancelScope(deadline=self._next_deadline()) as self._scope:
                    await trio.lowlevel.wait_readable(self._epoll)
                self._scope = None
            until_s = time.monotonic() + _TURN_S
            for _ in range(_ROUNDS_MAX):
                if not self._handle_ready() or time.monotonic() >= until_s:
                    break
            if self._bulk:
                self.batch(self._work)

    def _work(self) -> None:
        until_s = time.monotonic() + _TURN_S
        while self._bulk and time.monotonic() < until_s:
            call = next(iter(self._bulk))
            owner = self._bulk.pop(call)
            self._call(owner, lambda _events, call=call: call(), 0)  # type: ignore[misc]

    def _handle_ready(self) -> bool:
        """Handle what is ready now; returns whether there was anything."""
        ready = self._epoll.poll(0, _BATCH)

        def handle() -> None:
            for fd, events in ready:
                watched = self._watched.get(fd)
                if watched is not None:  # else a handler before it in this batch closed it
                    self._call(watched[1], watched[0], events)
            # What that has for others goes out first: a timer may start a shim for the next exec.
            self._run_deferred()
            self._run_timers()

        self.batch(handle)
        return bool(ready)

    def _call(self, owner: Owner, handler: Callable[[int], None], events: int) -> None:
        try:
            handler(events)
        except Exception as error:  # noqa: BLE001 - the owner's failure, survived here
            owner.stray(error)

    def _next_deadline(self) -> float:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if not self._timers:
            return math.inf
        return trio.current_time() + self._timers[0][0] - time.monotonic()

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        self.before_timers(now_s)
        # Only what is due now: a timer armed by a timer gets its turn after the descriptors.
        due: list[Timer] = []
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is None:
                self._cancelled -= 1
            else:
                timer.is_queued = False
                due.append(timer)
        for timer in due:
            call, owner = timer.call, timer.owner
            timer.call = timer.owner = None
            if call is None or owner is None:
                continue  # cancelled by one before it
            self._call(owner, lambda _events, call=call: call(), 0)  # type: ignore[misc]
