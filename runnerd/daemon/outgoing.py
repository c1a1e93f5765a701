"""What goes to one peer: answers first, then output in turns over the subscriptions.

It takes from a transcript only what it writes next, so it holds at most one batch, and a slow
peer slows nobody else. Most writes go out at the end of the batch of events that caused them,
without a task switch; only where the socket is full a task takes over until it is not.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from runnerd.core.flow import Gap, Subscription, Terminal
from runnerd.core.spool import Block, Record
from runnerd.core.transcript import STREAMS
from runnerd.protocol.answers import ClosedNote, ExitedNote, GapNote, OutputNote
from runnerd.protocol.codec import Codec

from .running import Running

if TYPE_CHECKING:
    from .service import Service

_BATCH_BYTES: Final = 256 * 1024
_TURN_RECORDS: Final = 4  # of one subscription before the next has its turn
_IOV_MAX: Final = 256  # well under IOV_MAX, 1024, writev(2)
_FLUSH_BATCHES: Final = 4  # before other connections have their turn


class Outgoing:
    """The writing side of a connection.

    Args:
        service: The daemon's shared parts.
        sock: Connected, not blocking; closed by its connection.
        number: The connection's, for the log.
        on_gone: Called when the peer is gone, or takes nothing for too long.

    Attributes:
        codec: Once the peer's encoding is known.
        subscriptions: The open ones, by number; one that is over is taken out here.
    """

    def __init__(
        self,
        service: Service,
        sock: socket.socket,
        number: int,
        on_gone: Callable[[], None],
    ) -> None:
        self.codec: Codec | None = None
        self.subscriptions: dict[int, tuple[Subscription, Running]] = {}
        self._service = service
        self._sock = sock
        self._number = number
        self._on_gone = on_gone
        self._outbox: deque[bytearray] = deque()
        self._outbox_bytes = 0
        self._ready: dict[Subscription, None] = {}
        self._rest: list[bytearray | memoryview] = []  # of a batch that did not fit the socket
        self._is_slow = False
        self._is_last = False
        self._is_refused = False
        self._wake_slow = trio.Event()
        self._progress = trio.Event()

    def stray(self, error: Exception) -> None:
        """Take the failure of a flush: this connection's own."""
        self._service.stray(error, "connection", connection=self._number)
        self._on_gone()

    def send(self, message: bytearray) -> None:
        """Queue a message, before all output."""
        if self._is_refused or self._sock.fileno() < 0:
            return
        self._outbox.append(message)
        self._outbox_bytes += len(message)
        if self._outbox_bytes > self._service.bounds.outgoing_bytes_max:
            self._is_refused = True  # a peer that asks and does not read
            self._outbox.clear()
            self._service.counters.connections_stuck += 1
            self._on_gone()
            return
        self._service.poller.defer(self, self.flush)

    def wake(self, subscription: Subscription) -> None:
        """Queue what a subscription has."""
        self._ready[subscription] = None
        self._service.poller.defer(self, self.flush)

    def finish(self) -> None:
        """Write what is queued, then be gone."""
        self._is_last = True
        self._service.poller.defer(self, self.flush)

    def flush(self) -> None:
        """Write as much as the socket takes now."""
        if self._is_slow or self._sock.fileno() < 0:
            return
        for _ in range(_FLUSH_BATCHES):
            batch = self._next_batch()
            if not batch:
                if self._is_last:
                    self._on_gone()
                self._progress.set()
                return
            self._rest = list(batch)
            if not self._write_some():
                return
        self._service.poller.call_soon(self, self.flush)

    def _write_some(self) -> bool:
        """Write of the rest; False where some of it stays, for the slow path or for good."""
        while self._rest:
            try:
                sent = self._sock.sendmsg(self._rest)
            except BlockingIOError:
                self._is_slow = True
                self._wake_slow.set()
                return False
            except OSError:
                self._on_gone()
                return False
            while self._rest and sent >= len(self._rest[0]):
                sent -= len(self._rest[0])
                del self._rest[0]
            if sent:
                self._rest[0] = memoryview(self._rest[0])[sent:]
        return True

    async def serve_slow(self) -> None:
        """Take over whenever the socket is full. A task of the connection."""
        while True:
            await self._wake_slow.wait()
            self._wake_slow = trio.Event()
            while not self._write_some():
                if not await self._wait_writable():
                    self._on_gone()
                    return
            self._is_slow = False
            self.flush()
            await trio.lowlevel.checkpoint()

    async def _wait_writable(self) -> bool:
        while True:
            untaken = self._untaken_bytes()
            with trio.move_on_after(self._service.bounds.stuck_reader_s) as scope:
                await trio.lowlevel.wait_writable(self._sock)
            if not scope.cancelled_caught:
                return True
            # Writable means that most of the buffer is free again; a slow reader takes long to
            # get there, and is not stuck.
            if self._untaken_bytes() < untaken:
                continue
            if self._is_last or not self._blocks_an_exec():
                self._service.counters.connections_stuck += 1
                self._service.log.warning("connection_stuck", connection=self._number)
                return False

    def _untaken_bytes(self) -> int:
        """Return what the peer has yet to take of what was sent. Source: SIOCOUTQ, unix(7)."""
        return int(struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0\0\0\0"))[0])

    def _blocks_an_exec(self) -> bool:
        return any(
            running.exec.gate.holder is subscription
            for subscription, running in self.subscriptions.values()
        )

    async def flushed(self) -> None:
        """Wait until everything queued has been written, or nobody is there any more."""
        while self._sock.fileno() >= 0 and (self._outbox or self._ready or self._rest):
            self._progress = trio.Event()
            self._service.poller.defer(self, self.flush)
            await self._progress.wait()

    def closed(self) -> list[tuple[Subscription, Running]]:
        """The socket is closed: let go of everything; returns the subscriptions still open."""
        self._progress.set()
        self._outbox.clear()
        self._rest.clear()
        held = list(self.subscriptions.values())
        self.subscriptions.clear()
        return held

    def _next_batch(self) -> list[bytearray]:
        batch: list[bytearray] = []
        size = 0
        while self._outbox and size < _BATCH_BYTES and len(batch) < _IOV_MAX:
            message = self._outbox.popleft()
            self._outbox_bytes -= len(message)
            batch.append(message)
            size += len(message)
        while self._ready and size < _BATCH_BYTES and len(batch) < _IOV_MAX:
            subscription = next(iter(self._ready))
            del self._ready[subscription]
            found = self.subscriptions.get(subscription.number)
            if found is None or found[0] is not subscription:
                continue
            size += self._take_turn(subscription, found[1], batch)
        return batch

    def _take_turn(
        self, subscription: Subscription, running: Running, batch: list[bytearray]
    ) -> int:
        size = 0
        for _ in range(_TURN_RECORDS):
            item = subscription.next_item()
            if item is None:
                break
            if isinstance(item, Block):
                spool = self._service.spool
                spool.read(subscription.transcript, item, subscription, self.wake)
                break
            message = self._encode(subscription, running, item)
            batch.append(message)
            size += len(message)
        else:
            self._ready[subscription] = None  # behind the others
        running.readers.advanced()  # also where it only passed over what it is not sent
        if subscription.over:
            del self.subscriptions[subscription.number]
            self._service.counters.subscriptions -= 1
            running.readers.remove(subscription, lost=False)
        return size

    def _encode(
        self, subscription: Subscription, running: Running, item: Record | Gap | Terminal
    ) -> bytearray:
        codec, its_exec, number = self.codec, running.exec, subscription.number
        assert codec is not None
        match item:
            case Record():
                return codec.note(
                    "exec.output",
                    OutputNote(
                        subscription=number,
                        exec_id=its_exec.exec_id,
                        seq=item.seq,
                        stream=STREAMS[item.stream],
                        offset=item.offset,
                        data=item.data,
                    ),
                )
            case Gap():
                return codec.note(
                    "exec.gap",
                    GapNote(
                        subscription=number,
                        exec_id=its_exec.exec_id,
                        first_seq=item.first_seq,
                        last_seq=item.last_seq,
                        stdout_bytes=item.lost_bytes[0],
                        stderr_bytes=item.lost_bytes[1],
                        stdout_offset=item.next_offsets[0],
                        stderr_offset=item.next_offsets[1],
                    ),
                )
            case Terminal(what="exited"):
                assert its_exec.exit is not None
                return codec.note(
                    "exec.exited",
                    ExitedNote(
                        subscription=number,
                        exec_id=its_exec.exec_id,
                        seq=item.seq,
                        exit=its_exec.exit,
                    ),
                )
            case _:
                assert its_exec.closed is not None
                return codec.note(
                    "exec.closed",
                    ClosedNote(
                        subscription=number,
                        exec_id=its_exec.exec_id,
                        seq=item.seq,
                        closed=its_exec.closed,
                    ),
                )
