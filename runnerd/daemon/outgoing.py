"""What goes to one peer: answers first, then output in turns over the subscriptions.

It takes from a transcript only what it writes next, so it holds at most one batch, and a slow
peer slows nobody else. Most writes go out at the end of the batch of events that caused them,
without a task switch; only where the socket is full a task takes over until it is not.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from runnerd.core.blocks import Block, Record
from runnerd.core.events import EventReader
from runnerd.core.flow import Subscription
from runnerd.protocol.codec import Codec
from runnerd.protocol.events import EventNote
from runnerd.protocol.notes import SupersededNote

from .arrivals import Arrivals, unread_bytes
from .notes import heartbeat_note, item_note
from .running import Running

if TYPE_CHECKING:
    from .service import Service

_BATCH_BYTES: Final = 256 * 1024
_TURN_RECORDS: Final = 4  # of one subscription before the next has its turn
_TURN_EVENTS: Final = 64  # in one batch
_IOV_MAX: Final = 256  # well under IOV_MAX, 1024, writev(2)
_FLUSH_BATCHES: Final = 4  # in a row while no other bulk waits for its turn
_BULK_BYTES: Final = 64 * 1024  # a batch of this or more: what follows waits for its turn
_UNREAD_BYTES: Final = 64 * 1024  # what a client that reads has waiting at most, about


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
        event_readers: Its subscriptions to events, by number.
        arrivals: What the peer has read of what was written.
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
        self.event_readers: dict[int, EventReader] = {}
        self._service = service
        self._sock = sock
        self._number = number
        self._on_gone = on_gone
        self.arrivals = Arrivals(sock, service.poller, self)
        self._batched_bytes = 0  # all that went into batches so far
        self._outbox: deque[bytearray] = deque()
        self._outbox_bytes = 0
        self._ready: dict[Subscription, None] = {}
        self._waiting: set[Subscription] = set()  # for a block from the disk
        self._rest: list[bytearray | memoryview] = []  # of a batch that did not fit the socket
        self._is_slow = False
        self._is_bulk = False
        self._is_last = False
        self._is_given_up = False  # its connection is about to be closed
        self._wake_slow = trio.Event()
        self._progress = trio.Event()

    def stray(self, error: Exception) -> None:
        """Take the failure of a flush: this connection's own, and its last."""
        self._is_given_up = True
        self._service.stray(error, "connection", connection=self._number)
        self._on_gone()

    def send(self, message: bytearray) -> None:
        """Queue a message, before all output."""
        if self._is_given_up or self._sock.fileno() < 0:
            return
        self._outbox.append(message)
        self._count_outbox(len(message))
        if self._has_too_much():
            self._is_given_up = True  # a peer that asks and does not read
            self._clear_outbox()
            self._service.counters.connections_stuck += 1
            self._on_gone()
            return
        self._service.poller.defer(self, self.flush)

    def _count_outbox(self, more_bytes: int) -> None:
        self._outbox_bytes += more_bytes
        self._service.counters.outgoing_bytes += more_bytes

    def _clear_outbox(self) -> None:
        self._outbox.clear()
        self._count_outbox(-self._outbox_bytes)

    def _has_too_much(self) -> bool:
        bounds, has_bytes = self._service.bounds, self._outbox_bytes
        all_have_too_much = self._service.counters.outgoing_bytes > bounds.outgoing_total_bytes_max
        return has_bytes > bounds.outgoing_bytes_max or (
            all_have_too_much and has_bytes > _UNREAD_BYTES
        )

    def open(self, subscription: Subscription, running: Running) -> None:
        """Take a subscription; `wake` says when it has something."""
        self.subscriptions[subscription.number] = (subscription, running)
        self._service.counters.subscriptions += 1
        self._service.heart.add(subscription, self)

    def end(self, subscription: Subscription) -> None:
        """Take it out: nothing of it is sent any more."""
        del self.subscriptions[subscription.number]
        self._waiting.discard(subscription)
        self._service.counters.subscriptions -= 1
        self._service.heart.remove(subscription)
        self.arrivals.forget(subscription)

    def open_events(self, number: int) -> EventReader:
        """Subscribe to events; the answer is to be sent before anything else is done."""
        reader = self._service.events.add(number, self)
        self.event_readers[number] = reader
        self._service.counters.subscriptions += 1
        return reader

    def end_events(self, number: int) -> bool:
        """End a subscription to events; returns whether there was one of that number."""
        reader = self.event_readers.pop(number, None)
        if reader is None:
            return False
        self._service.events.remove(reader)
        self._service.counters.subscriptions -= 1
        return True

    def wake_events(self) -> None:
        """Tell of an event, in turn with others' output: a thousand readers are no wall."""
        self._service.poller.defer_bulk(self, self.flush)

    def beat_events(self, reader: EventReader) -> None:
        """Say that nothing has happened, unless bytes wait already."""
        if self.codec is not None and not self._is_slow:
            note = EventNote(
                subscription=reader.number, number=reader.after, at=time.time(), kind="heartbeat"
            )
            self.send(self.codec.note("event", note))

    @property
    def _has_events(self) -> bool:
        log = self._service.events.log
        return any(log.has_more(reader) for reader in self.event_readers.values())

    def superseded(self, subscription: Subscription, generation: int | None) -> None:
        """A newer attach of the same name took its place: tell the peer, and nothing more."""
        found = self.subscriptions.get(subscription.number)
        if found is None or self.codec is None:
            return
        self.end(subscription)
        self._service.counters.superseded += 1
        assert subscription.subscriber is not None
        note = SupersededNote(
            subscription=subscription.number,
            exec_id=found[1].exec.exec_id,
            subscriber=subscription.subscriber,
            generation=generation,
        )
        self.send(self.codec.note("exec.superseded", note))

    def beat(self, subscription: Subscription) -> None:
        """Send a heartbeat, unless bytes wait already: then it would say nothing new."""
        found = self.subscriptions.get(subscription.number)
        if found is not None and self.codec is not None and not self._is_slow:
            self.send(heartbeat_note(self.codec, subscription, found[1].exec))

    def wake(self, subscription: Subscription) -> None:
        """Queue what a subscription has."""
        self._ready[subscription] = None
        if self._is_bulk:
            self._service.poller.defer_bulk(self, self.flush)
        else:
            self._service.poller.defer(self, self.flush)

    def _block_came(self, subscription: Subscription) -> None:
        self._waiting.discard(subscription)
        self.wake(subscription)

    def _read_out(self) -> None:
        """Have the reader take what came before the peer closed, and end it then.

        What was asked for goes on, and the last that a client asks for is a cancel, most often.
        """
        if self._is_last:
            self._on_gone()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)  # nothing new gets in: finish() comes soon

    def finish(self) -> None:
        """Write what is queued, then be gone."""
        if self._is_given_up:
            self._on_gone()
            return
        self._is_last = True
        self._service.poller.defer(self, self.flush)

    def flush(self) -> None:
        """Write one batch, or as much of it as the socket takes now; the next in its turn."""
        if self._is_slow or self._is_given_up or self._sock.fileno() < 0:
            return
        poller = self._service.poller
        for _ in range(_FLUSH_BATCHES):
            self._rest = list(self._next_batch())
            if not self._write_some():
                return
            if poller.has_bulk or not (self._outbox or self._ready or self._has_events):
                break
        if self._outbox or self._ready or self._has_events:
            poller.defer_bulk(self, self.flush)
            return
        if self._is_last:
            self._on_gone()
        if not self._is_behind:
            self._progress.set()
        self.arrivals.settle()

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
                # For want of memory too, which passes: what would be written after what was lost
                # here would be told as if it followed.
                self._is_given_up = True
                self._clear_outbox()
                self._read_out()
                return False
            self.arrivals.written_bytes += sent
            while self._rest and sent >= len(self._rest[0]):
                sent -= len(self._rest[0])
                del self._rest[0]
            if sent:
                self._rest[0] = memoryview(self._rest[0])[sent:]
        return True

    async def serve_slow(self) -> None:
        """Wait in its place whenever the socket is full. A task of the connection."""
        while True:
            await self._wake_slow.wait()
            self._wake_slow = trio.Event()
            if not await self._wait_writable():
                self._on_gone()
                return
            poller = self._service.poller
            if poller.may_go_alone():
                poller.batch(self._go_on_alone)
            else:
                poller.defer_bulk(self, self._go_on)

    def _go_on_alone(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # noqa: BLE001 - the connection's own, survived here
            self.stray(error)

    def _go_on(self) -> None:
        if self._sock.fileno() < 0:
            return
        # It has room, so the peer has read. Beside a flood there is no other time to see that: what
        # is written ends with a full socket, again and again.
        self.arrivals.settle()
        if self._write_some():
            self._is_slow = False
            self.flush()

    async def _wait_writable(self) -> bool:
        while True:
            untaken = unread_bytes(self._sock)
            with trio.move_on_after(self._service.bounds.stuck_reader_s) as scope:
                await trio.lowlevel.wait_writable(self._sock)
            if not scope.cancelled_caught:
                return True
            # Writable means that most of the buffer is free again; a slow reader takes long to
            # get there, and is not stuck.
            if unread_bytes(self._sock) < untaken:
                continue
            if self._is_last or not self._blocks_an_exec():
                self._service.counters.connections_stuck += 1
                self._service.log.warning("connection_stuck", connection=self._number)
                return False

    def _blocks_an_exec(self) -> bool:
        return any(
            running.exec.gate.holder is subscription
            for subscription, running in self.subscriptions.values()
        )

    async def flushed(self) -> None:
        """Wait until everything queued has been written, or nobody is there any more."""
        while self._sock.fileno() >= 0 and self._is_behind:
            self._progress = trio.Event()
            self._service.poller.defer(self, self.flush)
            await self._progress.wait()

    @property
    def _is_behind(self) -> bool:
        return bool(self._outbox or self._ready or self._rest or self._waiting or self._has_events)

    def closed(self) -> list[tuple[Subscription, Running]]:
        """The socket is about to be: let go of everything; returns the subscriptions still open."""
        self.arrivals.close()
        self._progress.set()
        self._clear_outbox()
        self._rest.clear()
        held = list(self.subscriptions.values())
        for subscription, _ in held:
            self.end(subscription)
        for number in list(self.event_readers):
            self.end_events(number)
        return held

    def _next_batch(self) -> list[bytearray]:
        batch: list[bytearray] = []
        size = 0
        while self._outbox and size < _BATCH_BYTES and len(batch) < _IOV_MAX:
            message = self._outbox.popleft()
            self._count_outbox(-len(message))
            batch.append(message)
            size += len(message)
            self._batched_bytes += len(message)
        if batch and self._is_bulk:
            return batch  # an answer does not wait for output, nor others for that
        if not self._outbox:  # what is left there may be the answer that gives the subscription
            size += self._take_events(batch)
        while self._ready and size < _BATCH_BYTES and len(batch) < _IOV_MAX:
            subscription = next(iter(self._ready))
            del self._ready[subscription]
            found = self.subscriptions.get(subscription.number)
            if found is None or found[0] is not subscription:
                continue
            size += self._take_turn(subscription, found[1], batch)
        self._is_bulk = size >= _BULK_BYTES
        return batch

    def _take_events(self, batch: list[bytearray]) -> int:
        log, size = self._service.events.log, 0
        for reader in self.event_readers.values():
            for _ in range(_TURN_EVENTS):
                note = log.next_note(reader) if len(batch) < _IOV_MAX else None
                if note is None:
                    break
                assert self.codec is not None
                message = self.codec.note("event", note)
                batch.append(message)
                size += len(message)
                self._batched_bytes += len(message)
                reader.quiet_since_s = time.monotonic()
        return size

    def _take_turn(
        self, subscription: Subscription, running: Running, batch: list[bytearray]
    ) -> int:
        size = 0
        assert self.codec is not None
        for _ in range(_TURN_RECORDS):
            item = subscription.next_item()
            if item is None:
                break
            if isinstance(item, Block):
                self._waiting.add(subscription)
                spool = self._service.spool
                spool.read(subscription.transcript, item, subscription, self._block_came)
                break
            message = item_note(self.codec, subscription, running.exec, item)
            batch.append(message)
            size += len(message)
            self._batched_bytes += len(message)
            if subscription.counts_arrivals and isinstance(item, Record):
                self.arrivals.sent(subscription, running, item.seq, self._batched_bytes)
        else:
            self._ready[subscription] = None  # behind the others
        if size:
            subscription.quiet_since_s = time.monotonic()
        running.readers.advanced()  # also where it only passed over what it is not sent
        if subscription.over:
            self.end(subscription)
            running.readers.remove(subscription, lost=False)
        return size
