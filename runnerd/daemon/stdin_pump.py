"""Write what was taken for one command's stdin into its pipe or terminal; answer the writers."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from runnerd.core.bounds import Bounds
from runnerd.core.stdin import StdinQueue
from runnerd.protocol.answers import WriteAnswer
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecWrite

from .pipes import Streams
from .poller import EPOLLET, EPOLLOUT, Owner, Poller, Timer

_WRITE_COST_BYTES: Final = 1024  # what a write that waits costs beside its bytes, also without any

Reply = Callable[[WriteAnswer | RequestError], None]


class StdinTotals:
    """Bytes queued for stdin over all execs, and what the writes cost that wait for room.

    Both are bounded by stdin_total_bytes_max, each for itself.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.queued_bytes = 0
        self.waiting_bytes = 0
        self._starved: dict[StdinPump, None] = {}

    def starves(self, pump: StdinPump) -> None:
        """A pump's own queue has room, all together have none: wake it once that changes."""
        self._starved[pump] = None

    def release(self, size: int) -> None:
        """Bytes are queued no longer: whoever starved has another try."""
        self.queued_bytes -= size
        if size and self._starved:
            starved, self._starved = self._starved, {}
            for pump in starved:
                pump.wake()


class _Write:
    """One write on its way in."""

    __slots__ = ("offset", "reply", "request", "until_s", "writer")

    def __init__(self, request: ExecWrite, reply: Reply, writer: object, now_s: float) -> None:
        self.request = request
        self.reply = reply
        self.writer = writer
        self.offset = request.offset
        self.until_s = now_s + (request.wait_s or 0.0)

    @property
    def cost_bytes(self) -> int:
        """What it costs while it waits; its writer may be gone, and its effect is still owed."""
        return len(self.request.data) + _WRITE_COST_BYTES


class StdinPump:
    """The feeding side of one exec.

    A write that waits for room holds up those behind it that may wait too, and those of its own
    writer, whose order counts; another writer's that will not wait is answered at once.

    Args:
        queue: What was taken.
        pipes: Whose stdin; closed here.
        totals: Shared by all execs.
        owner: Who is told of a failure.
    """

    def __init__(
        self, queue: StdinQueue, pipes: Streams, totals: StdinTotals, poller: Poller, owner: Owner
    ) -> None:
        self._queue = queue
        self._pipes = pipes
        self._totals = totals
        self._poller = poller
        self._owner = owner
        self._waiting: deque[_Write] = deque()
        self._timer: Timer | None = None
        self._watching = False
        self._end_mark: bytes | None = None

    @property
    def room_bytes(self) -> int:
        """How much fits now, for this exec and within the total."""
        totals = self._totals
        in_total = totals.bounds.stdin_total_bytes_max - totals.queued_bytes
        return max(0, min(self._own_room_bytes, in_total))

    @property
    def _own_room_bytes(self) -> int:
        return self._totals.bounds.stdin_queue_bytes_max - self._queue.queued_bytes

    def write(self, request: ExecWrite, reply: Reply, writer: object) -> None:
        """Take a write; reply at once, or once it fits or its wait_s is over.

        Args:
            request: The write.
            reply: Called once.
            writer: Whose writes take effect in the order they came.
        """
        write = _Write(request, reply, writer, time.monotonic())
        # Past those who wait, nothing is taken: it would stand in the middle of theirs.
        room_bytes = 0 if self._waiting else self.room_bytes
        if not self._is_held_up(write) and self._take(write, room_bytes):
            return
        totals = self._totals
        if totals.waiting_bytes + write.cost_bytes > totals.bounds.stdin_total_bytes_max:
            reply(self._too_much_waits())
            return
        self._waiting.append(write)
        totals.waiting_bytes += write.cost_bytes
        self._wake_at_first()

    def _is_held_up(self, write: _Write) -> bool:
        if write.request.wait_s is not None or write.request.eof:
            return bool(self._waiting)
        return any(each.writer is write.writer for each in self._waiting)

    def _too_much_waits(self) -> RequestError:
        return RequestError(
            "busy",
            f"{self._totals.waiting_bytes} bytes of writes wait for room in commands' stdin",
            preserved="what was taken before is kept; repeat the write with its offset",
            retry_after_s=1.0,
            accepted_bytes=self._queue.accepted_bytes,
        )

    def _wake_at_first(self) -> None:
        # One timer, for the one at the head: those behind it have no turn before it.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = self._poller.call_at(
                self._waiting[0].until_s, self._owner, self._serve_waiting
            )
            if self._own_room_bytes > 0:
                self._totals.starves(self)

    def _next_waiting(self) -> _Write:
        write = self._waiting.popleft()
        self._totals.waiting_bytes -= write.cost_bytes
        return write

    def _take(self, write: _Write, room_bytes: int) -> bool:
        """Try one write; False where the rest of it may still wait for room."""
        queue, request = self._queue, write.request
        if write.offset is None:  # an append begins where its turn finds the stream
            write.offset = queue.accepted_bytes
        before = queue.queued_bytes
        try:
            rest = queue.offer(
                request.data, offset=write.offset, eof=request.eof, room_bytes=room_bytes
            )
        except RequestError as error:
            write.reply(error)
            return True
        self._totals.queued_bytes += queue.queued_bytes - before
        self._pump()
        if not queue.is_open and request.data:
            write.reply(self._closed_error())
            return True
        if rest and queue.is_open and write.until_s > time.monotonic():
            return False
        write.reply(WriteAnswer(accepted_bytes=queue.accepted_bytes, room_bytes=self.room_bytes))
        return True

    def _closed_error(self) -> RequestError:
        return RequestError(
            "stdin_closed",
            "the command no longer reads its stdin",
            accepted_bytes=self._queue.accepted_bytes,
        )

    def _pump(self) -> None:
        queue = self._queue
        while self._pipes.stdin is not None and (chunk := queue.head() or self._rest_of_mark()):
            try:
                size = self._pipes.write(self._pipes.stdin, chunk)
            except BlockingIOError:
                self._watch()
                return
            except OSError:  # EPIPE: the command closed its end, which is its right
                self.close()
                return
            if self._end_mark is not None:
                self._end_mark = self._end_mark[size:]
                continue
            queue.wrote(size)
            self._totals.release(size)
        self._unwatch()
        if queue.eof and not self._pipes.is_terminal:
            self._close_pipe()

    def _rest_of_mark(self) -> bytes | None:
        # Asked for once everything before it is written: it depends on the terminal's mode then.
        if self._queue.eof and self._end_mark is None:
            self._end_mark = self._pipes.end_mark()
        return self._end_mark

    def _watch(self) -> None:
        if not self._watching and self._pipes.stdin is not None:
            self._watching = True
            # A terminal that nobody has open reports its hang-up all the time: only changes count.
            events = EPOLLOUT | EPOLLET if self._pipes.is_terminal else EPOLLOUT
            self._poller.watch(self._pipes.stdin, events, self._writable, self._owner)

    def _unwatch(self) -> None:
        if self._watching and self._pipes.stdin is not None:
            self._watching = False
            self._poller.unwatch(self._pipes.stdin)

    def wake(self) -> None:
        """There may be room in the total."""
        self._poller.call_soon(self._owner, self._serve_waiting)

    def _writable(self, events: int) -> None:
        if not events & EPOLLOUT and self._pipes.is_terminal:
            return  # hung up, for now; a write that finds no room would be reported as a change
        self._pump()
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            write = self._next_waiting()  # first: taking it may find the pipe closed, and close all
            if not self._take(write, self.room_bytes):
                self._waiting.appendleft(write)
                self._totals.waiting_bytes += write.cost_bytes
                break
        self._wake_at_first()

    def _close_pipe(self) -> None:
        self._unwatch()
        if self._pipes.stdin is not None:
            os.close(self._pipes.stdin)
            self._pipes.stdin = None

    def close(self) -> None:
        """Nobody reads any more: drop what is queued, answer those who wait."""
        self._close_pipe()
        self._totals.release(self._queue.close())
        while self._waiting:
            self._next_waiting().reply(self._closed_error())
        self._wake_at_first()
