"""One connected socket and its session: sends what waits, reads, and hands out what came.

Strategy: everything the daemon sends passes through advance(), which reads once and gives each
event to whoever asked for it: an answer to its request's taker, a record to its subscription's
follower, all else to `events`. So one connection carries any number of execs, and whoever waits
moves all of them on. While bytes wait to be sent, what arrives is still read, so that neither
side can block the other.
"""

from __future__ import annotations

import select
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from runnerd.protocol.answers import (
    AttachAnswer,
    ClosedNote,
    ExitedNote,
    GapNote,
    OutputNote,
    StartAnswer,
)
from runnerd.protocol.requests import ExecDetach

from .errors import ClientError, ClientTimeout, OutputOverflow, ProtocolViolation, StreamLost
from .session import Answer, Event, Failure, Session

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from runnerd.protocol.framing import Encoding
    from runnerd.protocol.requests import Params

    Reply = Answer | Failure
    Record = OutputNote | GapNote | ExitedNote | ClosedNote

# What may wait on the client for one exec while others are read. With a window the daemon
# stops sending long before; without one this is where an exec is detached.
QUEUE_BYTES_MAX: Final = 8 * 1024 * 1024

_READ_BYTES: Final = 256 * 1024


def deadline(timeout_s: float | None) -> float | None:
    """Return the point in time, on the monotonic clock, at which a wait ends; None = never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class Link:
    """A connection's I/O and routing.

    Args:
        connection: A connected stream socket; the link owns and closes it.
        encoding: How messages are written.

    Attributes:
        events: What nobody in particular asked for, oldest first.
        end: Why nothing can be sent or received any more, once that is so.
    """

    def __init__(self, connection: socket.socket, encoding: Encoding) -> None:
        connection.setblocking(False)
        self.events: deque[Event] = deque()
        self.end: ClientError | None = None
        self._socket = connection
        self._session = Session(encoding)
        self._poll = select.poll()
        self._buffer = bytearray(_READ_BYTES)
        self._unsent = bytearray()
        self._takers: dict[int, Callable[[Reply], None]] = {}
        self._followers: dict[int, Callable[[Record], None]] = {}
        self._events_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes the socket has not taken yet; the next advance() sends them."""
        return len(self._unsent)

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; every later use raises."""
        self._socket.close()
        if self.end is None:
            self.end = ClientError("the client was closed", preserved="what runs keeps running")

    def request(
        self, method: str, params: Params, taker: Callable[[Reply], None] | None = None
    ) -> int:
        """Send a request, as far as the socket takes it now.

        Args:
            method: A key of METHODS.
            params: Of the type METHODS has for it.
            taker: Gets the answer or failure; None = it goes to `events`.

        Returns:
            The request's id.
        """
        if self.end is not None:
            raise self.end
        request_id, framed = self._session.request(method, params)
        if taker is not None:
            self._takers[request_id] = taker
        self._unsent += framed
        self._send_some()
        return request_id

    def abandon(self, request_id: int) -> None:
        """Have a late answer thrown away; a subscription it opened is detached."""
        self._takers[request_id] = self._throw_away

    def follow(self, subscription: int, follower: Callable[[Record], None]) -> None:
        """Hand a subscription's records to `follower`, until it is closed or detached."""
        self._followers[subscription] = follower

    def detach(self, subscription: int) -> None:
        """End a subscription, without waiting for the answer; nothing of it is told any more."""
        # Records may stand in the bytes being handed out just now: they have no follower either.
        self._followers[subscription] = _ignore
        if self.end is not None:
            return

        def detached(_reply: Reply) -> None:
            self._followers.pop(subscription, None)

        self.request("exec.detach", ExecDetach(subscription=subscription), detached)

    def ack(self, subscription: int, seq: int) -> None:
        """Acknowledge a subscription's output up to a sequence."""
        if self.end is None:
            self._unsent += self._session.ack(subscription, seq)
            self._send_some()

    def wait_until(
        self, is_there: Callable[[], object], deadline_s: float | None, what: str
    ) -> None:
        """Advance until `is_there()`.

        Args:
            is_there: Whether what is waited for has come.
            deadline_s: When to give up, on the monotonic clock; None = never.
            what: What is waited for, for the error's text.

        Raises:
            ClientTimeout: If it has not come by then.
            StreamLost: If the connection ended first.
            ProtocolViolation: If the daemon broke the protocol.
        """
        while not is_there():
            if not self.advance(deadline_s) or (
                # What keeps arriving for others must not stretch this wait.
                deadline_s is not None and time.monotonic() >= deadline_s and not is_there()
            ):
                raise ClientTimeout(f"{what} did not come in time")

    def advance(self, deadline_s: float | None) -> bool:
        """Send what waits, read once, and hand out what came.

        Args:
            deadline_s: When to give up, on the monotonic clock; None = never. One that has
                passed takes what is there and does not wait.

        Returns:
            Whether anything was read.

        Raises:
            StreamLost: If the connection ended; what had come before was handed out.
            ProtocolViolation: If the daemon broke the protocol; likewise.
        """
        while True:
            if self.end is not None:
                raise self.end
            self._send_some()
            if self._read_some():
                return True
            wait_ms: int | None = None
            if deadline_s is not None:
                wait_ms = int((deadline_s - time.monotonic()) * 1000) + 1
                if wait_ms <= 0:
                    return False
            wanted = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
            self._poll.register(self._socket, wanted)
            self._poll.poll(wait_ms)

    def _send_some(self) -> None:
        while self._unsent:
            try:
                sent_bytes = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                # The daemon is gone, or going. What it still had to say is read first; the
                # stream's end then tells what is lost.
                self._unsent.clear()
                return
            del self._unsent[:sent_bytes]

    def _read_some(self) -> bool:
        try:
            count_bytes = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # Not the end of what was said: Linux reports it once, then goes on with the rest.
            return self._read_some()
        if not count_bytes:
            self.end = self._session.receive_eof() or StreamLost("the daemon ended the connection")
            raise self.end
        try:
            events = self._session.receive(memoryview(self._buffer)[:count_bytes])
        except ProtocolViolation as violation:
            self.end = violation
            for event in violation.events:
                self._hand_out(event)
            raise
        for event in events:
            self._hand_out(event)
        return True

    def _hand_out(self, event: Event) -> None:
        if isinstance(event, (Answer, Failure)):
            taker = None if event.request_id is None else self._takers.pop(event.request_id, None)
            if taker is not None:
                taker(event)
                return
        elif isinstance(event, (OutputNote, GapNote, ExitedNote, ClosedNote)):
            follower = self._followers.get(event.subscription)
            if follower is not None:
                if isinstance(event, ClosedNote):
                    del self._followers[event.subscription]
                follower(event)
                return
        self._keep(event)

    def _keep(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, OutputNote):
            self._events_bytes += len(event.data)
            if self._events_bytes > QUEUE_BYTES_MAX:
                self.detach(event.subscription)
                raise OutputOverflow(event.exec_id, event.seq, QUEUE_BYTES_MAX)

    def take_events(self) -> list[Event]:
        """Return and forget what nobody in particular asked for."""
        taken = [*self.events]
        self.events.clear()
        self._events_bytes = 0
        return taken

    def _throw_away(self, reply: Reply) -> None:
        result = reply.result if isinstance(reply, Answer) else None
        if isinstance(result, (StartAnswer, AttachAnswer)) and result.subscription is not None:
            self.detach(result.subscription)


def _ignore(_record: Record) -> None:
    """Take a record nobody wants any more."""
