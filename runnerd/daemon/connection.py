"""One connection: frames in, requests out to methods.py; answers and output back.

Two tasks. The reader never waits for the writer, so requests and acknowledgements are read
whatever the output does. The writer sends answers first, then output in turns over the
subscriptions; it takes from a transcript only what it writes next, so a connection holds at most
one batch, and a slow one slows nobody else.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from runnerd.core.flow import Gap, Subscription, Terminal
from runnerd.core.transcript import STREAMS, Record
from runnerd.protocol.answers import ClosedNote, ExitedNote, GapNote, OutputNote, StoppingNote
from runnerd.protocol.codec import Codec, RequestId
from runnerd.protocol.errors import RequestError
from runnerd.protocol.framing import Encoding, FrameSplitter, FramingError

from .access import Peer
from .methods import dispatch
from .running import Running

if TYPE_CHECKING:
    from .service import Service

_READ_BYTES: Final = 64 * 1024
_BATCH_BYTES: Final = 256 * 1024
_TURN_RECORDS: Final = 4  # of one subscription before the next has its turn
_IOV_MAX: Final = 256  # well under IOV_MAX, 1024, writev(2)


class Connection:
    """Serve one peer.

    Args:
        service: The daemon's shared parts.
        sock: Connected, not blocking; closed here.
        peer: Who it is.
        refusal: Why it may not go on; told in answer to its first frame.

    Attributes:
        number: For the log.
        is_open: Whether hello was answered.
    """

    def __init__(
        self, service: Service, sock: socket.socket, peer: Peer, refusal: RequestError | None
    ) -> None:
        self.number = service.counters.connections_total
        self.peer = peer
        self.client: str | None = None
        self.is_open = False
        self.subscriptions: dict[int, tuple[Subscription, Running]] = {}
        self._service = service
        self._sock = sock
        self._refusal = refusal
        self._splitter = FrameSplitter(service.bounds.frame_bytes_max)
        self._codec: Codec | None = None
        self._unanswered: set[RequestId] = set()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._ready: dict[Subscription, None] = {}
        self._next_subscription = 1
        self._wake_writer = trio.Event()
        self._progress = trio.Event()
        self._closing = False
        self._is_writing = False
        self._scope = trio.CancelScope()

    # ------------------------------------------------------------------ life

    async def serve(self) -> None:
        """Serve until either side is done; clean up whatever happens."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_loop)
                    await self._read_loop()
                    self._closing = True
                    self._wake_writer.set()
        finally:
            self._release()

    def _release(self) -> None:
        for subscription, running in self.subscriptions.values():
            running.unsubscribe(subscription, lost=True)
            self._service.counters.subscriptions -= 1
        self.subscriptions.clear()
        self._sock.close()
        self._progress.set()

    def close(self) -> None:
        """End it now, without a word."""
        self._scope.cancel()

    async def _read_loop(self) -> None:
        with trio.CancelScope() as hello_scope:
            hello_scope.deadline = trio.current_time() + self._service.bounds.hello_s
            while not self._closing:
                data = await self._receive()
                if not data:
                    return  # a half-close ends the connection; what it asked for goes on
                self._splitter.feed(data)
                self._take_frames()
                if self.is_open:
                    hello_scope.deadline = float("inf")
                await trio.lowlevel.checkpoint()
        if hello_scope.cancelled_caught:
            self._service.refused("hello_required")
            error = RequestError(
                "hello_required", f"no hello within {self._service.bounds.hello_s:g} s"
            )
            self._say_and_close(error)

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
            except OSError:
                return b""

    def _take_frames(self) -> None:
        while not self._closing:
            try:
                payload = self._splitter.next_frame()
            except FramingError as error:
                kind = "frame_too_large" if error.too_large else "invalid_request"
                self._service.refused(kind)
                self._say_and_close(RequestError(kind, str(error)))
                return
            if payload is None:
                return
            if self._codec is None:
                assert self._splitter.encoding is not None
                self._codec = Codec(self._splitter.encoding)
            self._take_payload(self._codec, payload)

    def _take_payload(self, codec: Codec, payload: bytes) -> None:
        if self._refusal is not None:
            self._say_and_close(self._refusal)
            return
        try:
            request = codec.request(payload)
        except RequestError as error:
            self.fail(None, error)
            return
        if request.id is not None and not self._admit(request.id):
            return
        try:
            dispatch(self._service, self, codec, request)
        except RequestError as error:
            if request.id is None and request.method == "exec.ack":
                self._service.refused(error.kind)  # a notification is never answered
            else:
                self.fail(request.id, error)
        except Exception as error:  # noqa: BLE001 - stray: answered, counted, survived
            self._service.stray(error, "request", method=request.method)
            self.fail(request.id, RequestError("internal", "the request failed inside runnerd"))

    def _admit(self, request_id: RequestId) -> bool:
        most = self._service.bounds.pipelined_requests_max
        if request_id in self._unanswered:
            error = RequestError("invalid_request", f"id {request_id!r} is still unanswered")
            self._service.refused("invalid_request")
            self._send(self._codec_or_json().failure(None, error))
            return False
        if len(self._unanswered) >= most:
            self._service.refused("busy")
            self._send(
                self._codec_or_json().failure(
                    request_id,
                    RequestError(
                        "busy",
                        f"{most} requests of this connection are unanswered; that is the most",
                        retry_after_s=0.1,
                    ),
                )
            )
            return False
        self._unanswered.add(request_id)
        return True

    # ------------------------------------------------------------------ answers

    def answer(self, request_id: RequestId | None, result: msgspec.Struct) -> None:
        """Send an answer; a notification gets none."""
        if request_id is not None:
            self._unanswered.discard(request_id)
            self._send(self._codec_or_json().answer(request_id, result))

    def fail(self, request_id: RequestId | None, error: RequestError) -> None:
        """Send an error."""
        self._service.refused(error.kind)
        if request_id is not None:
            self._unanswered.discard(request_id)
        self._send(self._codec_or_json().failure(request_id, error))

    def note_stopping(self, note: StoppingNote) -> None:
        """Tell an open connection that the daemon stops."""
        if self.is_open and self._codec is not None:
            self._send(self._codec.note("daemon.stopping", note))

    def refuse_and_close(self, error: RequestError) -> None:
        """Answer the peer's first frame with an error, then close."""
        self._refusal = error

    def _say_and_close(self, error: RequestError) -> None:
        self._send(self._codec_or_json().failure(None, error))
        self._closing = True
        self._wake_writer.set()

    def _codec_or_json(self) -> Codec:
        # Before a first byte is known to mean anything, an error is one plain JSON line.
        return self._codec or Codec(self._splitter.encoding or Encoding.JSON)

    def _send(self, message: bytes) -> None:
        self._outbox.append(message)
        self._outbox_bytes += len(message)
        if self._outbox_bytes > self._service.bounds.outgoing_bytes_max:
            self._service.counters.connections_stuck += 1
            self.close()  # a peer that asks and does not read
        self._wake_writer.set()

    # ------------------------------------------------------------------ subscriptions

    def subscribe(self, running: Running, make: Callable[[int], Subscription]) -> Subscription:
        """Open a subscription; its answer must be sent before the writer's next turn.

        Raises:
            RequestError: busy at the limit, or what `make` raises.
        """
        counters, most = self._service.counters, self._service.bounds.subscriptions_max
        if counters.subscriptions >= most:
            raise RequestError(
                "busy", f"{most} subscriptions are open; that is the most", retry_after_s=1.0
            )
        subscription = make(self._next_subscription)
        self._next_subscription += 1
        self.subscriptions[subscription.number] = (subscription, running)
        counters.subscriptions += 1
        running.subscribe(subscription, self)
        return subscription

    def subscription(self, number: int) -> tuple[Subscription, Running]:
        """Return a subscription opened here.

        Raises:
            RequestError: subscription_unknown.
        """
        found = self.subscriptions.get(number)
        if found is None:
            raise RequestError(
                "subscription_unknown", f"subscription: {number} is not open on this connection"
            )
        return found

    def was_open(self, number: int) -> bool:
        """Whether a subscription of that number was opened here and is over."""
        return 0 < number < self._next_subscription and number not in self.subscriptions

    def unsubscribe(self, number: int) -> None:
        """Close one, on purpose."""
        subscription, running = self.subscription(number)
        del self.subscriptions[number]
        self._service.counters.subscriptions -= 1
        running.unsubscribe(subscription, lost=False)

    def wake(self, subscription: Subscription) -> None:
        """See Subscriber: something may be there to be sent."""
        self._ready[subscription] = None
        self._wake_writer.set()

    # ------------------------------------------------------------------ writing

    async def _write_loop(self) -> None:
        while True:
            batch = self._next_batch()
            if batch:
                self._is_writing = True
                if not await self._write(batch):
                    self.close()
                    return
                self._is_writing = False
                self._progress.set()
                self._progress = trio.Event()
                continue
            if self._closing:
                self.close()
                return
            self._wake_writer = trio.Event()
            await self._wake_writer.wait()

    def _next_batch(self) -> list[bytes]:
        batch: list[bytes] = []
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

    def _take_turn(self, subscription: Subscription, running: Running, batch: list[bytes]) -> int:
        size, before_seq = 0, subscription.cursor_seq
        for _ in range(_TURN_RECORDS):
            item = subscription.next_item()
            if item is None:
                break
            message = self._encode(subscription, running, item)
            batch.append(message)
            size += len(message)
        else:
            self._ready[subscription] = None  # behind the others
        if subscription.cursor_seq > before_seq:  # what it does not want is passed, not sent
            running.reader_advanced()
        if subscription.over:
            del self.subscriptions[subscription.number]
            self._service.counters.subscriptions -= 1
            running.unsubscribe(subscription, lost=False)
        return size

    def _encode(
        self, subscription: Subscription, running: Running, item: Record | Gap | Terminal
    ) -> bytes:
        codec, its_exec, number = self._codec, running.exec, subscription.number
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

    async def _write(self, batch: list[bytes]) -> bool:
        """Write a batch whole; False where the peer is gone or takes nothing for too long."""
        views: list[bytes | memoryview] = list(batch)
        while views:
            try:
                sent = self._sock.sendmsg(views)
            except BlockingIOError:
                if not await self._wait_writable():
                    return False
                continue
            except OSError:
                return False
            while views and sent >= len(views[0]):
                sent -= len(views[0])
                del views[0]
            if sent:
                views[0] = memoryview(views[0])[sent:]
        return True

    async def _wait_writable(self) -> bool:
        while True:
            waiting = self._untaken_bytes()
            with trio.move_on_after(self._service.bounds.stuck_reader_s) as scope:
                await trio.lowlevel.wait_writable(self._sock)
            if not scope.cancelled_caught:
                return True
            # Writable means that most of the buffer is free again; a slow reader takes long to
            # get there, and is not stuck.
            if self._untaken_bytes() == waiting and not self._blocks_an_exec():
                self._service.counters.connections_stuck += 1
                self._service.log.warning("connection_stuck", connection=self.number)
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
        """Wait until everything for it has been written, or it is gone."""
        while not self.is_gone and (self._outbox or self._ready or self._is_writing):
            await self._progress.wait()

    @property
    def is_leaving(self) -> bool:
        """See Subscriber: the peer closed its end, whether or not the reader has got there."""
        if self._closing or self.is_gone:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def is_gone(self) -> bool:
        """Whether nobody is there any more to be answered."""
        return self._sock.fileno() < 0
