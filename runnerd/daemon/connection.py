"""One connection: frames in, requests out to methods.py; outgoing.py has the other direction.

The reader never waits for the writer, so requests and acknowledgements are read whatever the
output does.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from runnerd.core.audit import AUDIT_ENTRY_BYTES, UNANSWERED, Asked
from runnerd.core.bounds import HELLO_BYTES_MAX
from runnerd.core.events import EventReader
from runnerd.core.flow import Subscription
from runnerd.protocol.codec import Codec, Request, RequestId
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import Params
from runnerd.protocol.framing import Encoding, FrameSplitter, FramingError
from runnerd.protocol.notes import StoppingNote
from runnerd.protocol.requests import ExecWrite

from .access import Peer
from .arrivals import has_hung_up
from .effects import each_of
from .ends import Cancelling, Waiting
from .methods import dispatch
from .outgoing import Outgoing
from .running import Running

if TYPE_CHECKING:
    from .service import Service

_READ_BYTES: Final = 64 * 1024
_TURN_S: Final = 0.002
_WRONG_TOKENS_MAX: Final = 3


class Connection:
    """Serve one peer.

    Args:
        service: The daemon's shared parts.
        sock: Connected, not blocking; closed here.
        peer: Who it is.
        refusal: Why it may not go on; told in answer to its first frame.

    Attributes:
        number: For the log.
        is_open: Whether hello was accepted.
        fence: What its hello brought, see core/fence.py; None = nothing.
        waiting: What of its requests is left with an exec, to be taken back when it goes.
    """

    def __init__(
        self, service: Service, sock: socket.socket, peer: Peer, refusal: RequestError | None
    ) -> None:
        self.number = service.counters.connections_total
        self.peer = peer
        self.client: str | None = None
        self.is_open = False
        self.fence: int | None = None
        self._service = service
        self._sock = sock
        self._outgoing = Outgoing(service, sock, self.number, self.close)
        self._refusal = refusal
        self._splitter = FrameSplitter(HELLO_BYTES_MAX)
        self._incoming_bytes = 0
        self._codec: Codec | None = None
        self.waiting: set[Waiting | Cancelling] = set()
        self._reserved = 0
        self._unanswered: set[RequestId] = set()
        self._next_subscription = 1
        self._closing = False
        self._has_frames = False
        self._held: trio.Event | None = None
        self._wrong_tokens = 0
        self._audited: dict[RequestId, Asked] = {}
        self._scope = trio.CancelScope()

    # ------------------------------------------------------------------ life

    async def serve(self) -> None:
        """Serve until either side is done; clean up whatever happens."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outgoing.serve_slow)
                    await self._read_loop()
                    self._outgoing.finish()
        finally:
            self._release()

    def _release(self) -> None:
        held = self._outgoing.closed()
        self._service.counters.incoming_bytes -= self._incoming_bytes
        self._splitter.drop()  # what is left of us may wait long for a collection
        self._sock.close()
        self._service.counters.subscriptions -= self._reserved
        self._reserved = 0
        for request_id in [*self._audited]:
            self._settle(request_id, UNANSWERED, None)
        each_of(
            *(waiting.abandon for waiting in list(self.waiting)),
            *(
                functools.partial(running.readers.remove, subscription, lost=True)
                for subscription, running in held
            ),
        )

    def close(self) -> None:
        """End it now, without a word; frames that came already are not served any more."""
        self._closing = True
        self._scope.cancel()

    def hold(self) -> None:
        """Take no further request until `release`."""
        self._held = trio.Event()

    def release(self) -> None:
        """Go on with what came meanwhile."""
        held, self._held = self._held, None
        if held is not None:
            held.set()

    async def _read_loop(self) -> None:
        with trio.CancelScope() as hello_scope:
            hello_scope.deadline = trio.current_time() + self._service.bounds.hello_s
            while not self._closing:
                data = await self._receive()
                if not data:
                    return  # a half-close ends the connection; what it asked for goes on
                self._splitter.feed(data)
                self._has_frames = True
                while self._has_frames and not self._closing:
                    if self._held is not None:
                        await self._held.wait()
                    self._service.poller.batch(self._take_frames)
                    if self.is_open:
                        hello_scope.deadline = float("inf")
                    await trio.lowlevel.checkpoint()
                self._count_incoming()
        if hello_scope.cancelled_caught:
            self._say_and_close(self._refusal or self._no_hello())

    def _no_hello(self) -> RequestError:
        self._service.refused("hello_required")
        return RequestError("hello_required", f"no hello within {self._service.bounds.hello_s:g} s")

    def _count_incoming(self) -> None:
        service, pending = self._service, self._splitter.pending_bytes
        service.counters.incoming_bytes += pending - self._incoming_bytes
        self._incoming_bytes = pending
        most = service.bounds.incoming_total_bytes_max
        if service.counters.incoming_bytes > most and pending > _READ_BYTES and not self._closing:
            service.refused("busy")
            error = RequestError(
                "busy",
                f"unfinished requests take more than {most} bytes; no further one is taken in",
                retry_after_s=1.0,
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
        # A turn, then others have theirs: one read may hold a thousand requests.
        until_s = time.monotonic() + _TURN_S
        while not self._closing and self._held is None and time.monotonic() < until_s:
            if self.is_open:
                self._splitter.frame_bytes_max = self._service.bounds.frame_bytes_max
            try:
                payload = self._splitter.next_frame()
            except FramingError as error:
                kind = "frame_too_large" if error.too_large else "invalid_request"
                self._service.refused(kind)
                self._say_and_close(RequestError(kind, str(error)))
                return
            if payload is None:
                self._has_frames = False
                return
            if self._codec is None:
                assert self._splitter.encoding is not None
                self._codec = self._outgoing.codec = Codec(self._splitter.encoding)
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
            self.fail_inside(request.id)

    def _admit(self, request_id: RequestId) -> bool:
        most = self._service.bounds.pipelined_requests_max
        if request_id in self._unanswered:
            error = RequestError("invalid_request", f"id {request_id!r} is still unanswered")
            self._service.refused("invalid_request")
            self._outgoing.send(self._codec_or_json().failure(None, error))
            return False
        if len(self._unanswered) >= most:
            self._service.refused("busy")
            self._outgoing.send(
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
        """Send an answer; a notification gets none, and no request two."""
        if request_id is not None and request_id in self._unanswered:
            message = self._codec_or_json().answer(request_id, result)
            self._unanswered.discard(request_id)
            self._settle(request_id, "ok", getattr(result, "exec_id", None))
            self._outgoing.send(message)

    def fail(self, request_id: RequestId | None, error: RequestError) -> None:
        """Send an error; one about no request of its own has no id."""
        self._service.refused(error.kind)
        if request_id is not None:
            if request_id not in self._unanswered:
                return
            self._unanswered.discard(request_id)
            self._settle(request_id, error.kind, None)
        self._outgoing.send(self._codec_or_json().failure(request_id, error))

    def fail_inside(self, request_id: RequestId | None) -> None:
        """Answer a request that a stray failure met."""
        self.fail(request_id, RequestError("internal", "the request failed inside runnerd"))

    def audit(self, request: Request, params: Params | None) -> None:
        """Note a change that is asked for; it is written down with its answer.

        Args:
            request: As it came.
            params: None where they could not be read.
        """
        if self._service.audit is None or request.id is None:
            return
        stdin_bytes = None
        cost_bytes = len(request.params)
        if isinstance(params, ExecWrite):
            stdin_bytes = len(params.data)
            params, cost_bytes = msgspec.structs.replace(params, data=b""), 0
        self._audited[request.id] = Asked(
            time.time(), self.number, *self.peer, self.client, self.fence, request.method, params,
            stdin_bytes, cost_bytes + AUDIT_ENTRY_BYTES,
        )  # fmt: skip

    def _settle(self, request_id: RequestId, result: str, exec_id: str | None) -> None:
        asked = self._audited.pop(request_id, None) if self._audited else None
        if asked is not None and self._service.audit is not None:
            exec_id = exec_id or getattr(asked.params, "exec_id", None)
            self._service.audit.settled(asked, result, exec_id)

    def count_wrong_token(self) -> None:
        """A hello was refused for its token; after a few nothing more is read from this peer."""
        self._wrong_tokens += 1
        if self._wrong_tokens >= _WRONG_TOKENS_MAX:
            self._closing = True  # the refusal itself is still written, see serve()

    def note_stopping(self, note: StoppingNote) -> None:
        """Tell an open connection that the daemon stops."""
        if self.is_open and self._codec is not None:
            self._outgoing.send(self._codec.note("daemon.stopping", note))

    def _say_and_close(self, error: RequestError) -> None:
        self._outgoing.send(self._codec_or_json().failure(None, error))
        self._closing = True
        self._outgoing.finish()

    def _codec_or_json(self) -> Codec:
        # Before a first byte is known to mean anything, an error is one plain JSON line.
        return self._codec or Codec(self._splitter.encoding or Encoding.JSON)

    # ------------------------------------------------------------------ subscriptions

    def subscribe(
        self,
        running: Running,
        make: Callable[[int], Subscription],
        generation: int | None,
    ) -> Subscription:
        """Open a subscription; its answer must be sent before the writer's next turn.

        Not once the connection is gone: only its end would close it again.

        Args:
            running: The exec it reads.
            make: Makes it, given its number on this connection.
            generation: Of its name; checked before.

        Raises:
            RequestError: What `make` raises.
        """
        assert not self.is_gone
        subscription = make(self._next_subscription)
        self._next_subscription += 1
        self._outgoing.open(subscription, running)
        running.readers.add(subscription, self, generation)
        return subscription

    def subscribe_events(self) -> EventReader:
        """Subscribe to events; its answer must be sent before the writer's next turn.

        Raises:
            RequestError: busy at the limit of subscriptions.
        """
        self.check_room()
        number = self._next_subscription
        self._next_subscription += 1
        return self._outgoing.open_events(number)

    def check_room(self) -> None:
        """Refuse one more subscription where there is no room for it.

        Raises:
            RequestError: busy at the limit.
        """
        most = self._service.bounds.subscriptions_max
        if self._service.counters.subscriptions >= most:
            raise RequestError(
                "busy", f"{most} subscriptions are open; that is the most", retry_after_s=1.0
            )

    def reserve_subscription(self) -> None:
        """Keep room for one that is to be opened later.

        Raises:
            RequestError: busy at the limit.
        """
        self.check_room()
        self._service.counters.subscriptions += 1
        self._reserved += 1

    def unreserve_subscription(self) -> None:
        """Give that room back; a connection that is gone has done so."""
        if self._reserved:
            self._reserved -= 1
            self._service.counters.subscriptions -= 1

    def subscription(self, number: int) -> tuple[Subscription, Running]:
        """Return a subscription opened here.

        Raises:
            RequestError: subscription_unknown.
        """
        found = self._outgoing.subscriptions.get(number)
        if found is None:
            raise RequestError(
                "subscription_unknown", f"subscription: {number} is not open on this connection"
            )
        return found

    def was_open(self, number: int) -> bool:
        """Whether a subscription of that number was opened here and is over."""
        return 0 < number < self._next_subscription and (number not in self._outgoing.subscriptions)

    def unsubscribe(self, number: int) -> None:
        """Close one, on purpose."""
        if self._outgoing.end_events(number):
            return
        subscription, running = self.subscription(number)
        self._outgoing.end(subscription)
        running.readers.remove(subscription, lost=False)

    def wake(self, subscription: Subscription) -> None:
        """See Subscriber: something may be there to be sent."""
        self._outgoing.wake(subscription)

    def look(self) -> None:
        """See Subscriber: acknowledge what the peer has read."""
        self._outgoing.arrivals.settle()

    def superseded(self, subscription: Subscription, generation: int | None) -> None:
        """See Subscriber: a newer attach of the same name took its place."""
        self._outgoing.superseded(subscription, generation)

    async def flushed(self) -> None:
        """Wait until everything for it has been written, or it is gone."""
        await self._outgoing.flushed()

    @property
    def is_leaving(self) -> bool:
        """See Subscriber: the peer closed its end, whether or not the reader has got there."""
        if self._closing or self.is_gone:
            return True
        return has_hung_up(self._sock)

    @property
    def is_gone(self) -> bool:
        """Whether nobody is there any more to be answered."""
        return self._sock.fileno() < 0
