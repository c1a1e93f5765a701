"""The metrics by HTTP on a loopback port, where --metrics-listen asks for it.

Commands can connect to that port, so whoever does is taken for hostile. There is no HTTP library
and no thread: one request is read up to a limit and answered, then the connection is closed.
What it can cost the daemon is fixed: eight connections of five seconds, 4 KiB read of each in at
most 16 pieces, twenty a second, and one exposition made a second. What comes beyond that waits in
the kernel.

A failure of any of it, the port taken by somebody else included, is a stray one: it is counted,
told by daemon.health, and tried again after 30 s.

Source: RFC 9112 (HTTP/1.1), 3 and 9.6; what a scraper accepts: Prometheus, "Content negotiation".
"""

from __future__ import annotations

import errno
import socket
import time
from typing import TYPE_CHECKING, Final

import trio

from .metrics import exposition
from .shortage import NO_RESOURCES

if TYPE_CHECKING:
    from runnerd.protocol.daemon_answers import MetricsAnswer

    from .service import Service

_CONNECTIONS_MAX: Final = 8
_CONNECTION_S: Final = 5.0
_REQUEST_BYTES_MAX: Final = 4096
_READS_MAX: Final = 16  # a request byte by byte would cost a turn of the loop for each
_WRITES_MAX: Final = 64
_REQUESTS_A_SECOND: Final = 20
_BACKLOG: Final = 16
_MADE_S: Final = 1.0  # an exposition is as old as this at most
_AGAIN_S: Final = 30.0
_OPENMETRICS: Final = b"application/openmetrics-text"
_WORDS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
}


class MetricsPort:
    """The port and who is connected to it.

    Args:
        service: The daemon's shared parts.
        address: A loopback address and a port; 0 = any free one.

    Attributes:
        trouble: Why nothing listens there, or None.
        address: Where it listens, HOST:PORT.
    """

    def __init__(self, service: Service, address: tuple[str, int]) -> None:
        self.trouble: str | None = None
        self._service = service
        self._asked = address
        self._free = trio.Semaphore(_CONNECTIONS_MAX)
        self._second_s = 0.0
        self._accepted = 0
        self._made: dict[str, tuple[float, MetricsAnswer]] = {}
        self._listening = self._open()

    @property
    def address(self) -> str | None:
        """Where it listens, HOST:PORT; None where it does not."""
        if self._listening is None:
            return None
        host, port = self._listening.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _open(self) -> socket.socket | None:
        host, port = self._asked
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                # A port that connections of before us still linger at; never one that is taken.
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((host, port))
                listening.listen(_BACKLOG)
                # What it imports is imported now, not at the first scrape.
                exposition(self._service, "text")
            except BaseException:
                listening.close()
                raise
        except Exception as error:  # noqa: BLE001 - stray: nobody's command needs metrics
            self._failed(error)
            return None
        self.trouble = None
        return listening

    def _failed(self, error: Exception) -> None:
        said = error.strerror if isinstance(error, OSError) else repr(error)
        self.trouble = f"cannot serve metrics at port {self._asked[1]}: {said}"
        self._service.stray(error, "metrics_port")

    async def run(self) -> None:
        """Serve for ever; nothing escapes it but the end of the daemon."""
        while True:
            if self._listening is not None:
                try:
                    async with trio.open_nursery() as nursery:
                        await self._accept(nursery, self._listening)
                except Exception as error:  # noqa: BLE001 - stray: the daemon goes on without it
                    self._failed(error)
                self._listening.close()
                self._listening = None
            await trio.sleep(_AGAIN_S)
            self._listening = self._open()

    async def _accept(self, nursery: trio.Nursery, listening: socket.socket) -> None:
        while True:
            await self._free.acquire()
            await self._turn()
            try:
                peer, _ = listening.accept()
            except OSError as error:
                self._free.release()
                if isinstance(error, BlockingIOError):
                    await trio.lowlevel.wait_readable(listening)
                elif error.errno in NO_RESOURCES:
                    await trio.sleep(1.0)  # it stays in the backlog: commands come first
                elif error.errno != errno.ECONNABORTED:
                    raise
                continue
            self._accepted += 1
            nursery.start_soon(self._serve, peer)

    async def _turn(self) -> None:
        """Wait for the next second once this one has had its requests."""
        left_s = self._second_s + 1.0 - time.monotonic()
        if self._accepted >= _REQUESTS_A_SECOND and left_s > 0:
            await trio.sleep(left_s)
        if time.monotonic() >= self._second_s + 1.0:
            self._second_s, self._accepted = time.monotonic(), 0

    async def _serve(self, peer: socket.socket) -> None:
        try:
            with trio.move_on_after(_CONNECTION_S):
                await self._answer(peer)
        except OSError:
            pass  # it went away
        except Exception as error:  # noqa: BLE001 - stray: one scrape's own failure
            self._service.stray(error, "metrics_port")
        finally:
            peer.close()
            self._free.release()

    async def _answer(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        request = b""
        for _ in range(_READS_MAX):
            data = await _receive(peer, _REQUEST_BYTES_MAX - len(request))
            request += data
            if b"\r\n\r\n" in request or b"\n\n" in request:
                await _send(peer, self._response_to(request))
                return
            if not data:
                return
            if len(request) == _REQUEST_BYTES_MAX:
                break
        await _send(peer, _response(431))

    def _response_to(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        target, _, rest = rest.partition(b" ")
        if not rest.startswith(b"HTTP/1."):
            return _response(400)
        if method not in (b"GET", b"HEAD"):
            return _response(405, "Allow: GET, HEAD\r\n")
        if target[:7].lower() == b"http://":  # as a proxy is asked, RFC 9112, 3.2.2
            target = b"/" + target[7:].partition(b"/")[2]
        if target.partition(b"?")[0] != b"/metrics":
            return _response(404)
        form = "openmetrics" if _OPENMETRICS in rest.lower() else "text"
        made = self._exposition(form)
        body = made.text.encode()
        head = _response(200, f"Content-Type: {made.content_type}\r\n", len(body))
        return head if method == b"HEAD" else head + body

    def _exposition(self, form: str) -> MetricsAnswer:
        now_s = time.monotonic()
        made_s, made = self._made.get(form, (0.0, None))
        if made is None or now_s - made_s >= _MADE_S:
            made = exposition(self._service, form)
            self._made[form] = now_s, made
        return made


def _response(code: int, fields: str = "", size: int = 0) -> bytes:
    return (
        f"HTTP/1.1 {code} {_WORDS[code]}\r\nConnection: close\r\nContent-Length: {size}\r\n"
        f"{fields}\r\n"
    ).encode()


async def _receive(peer: socket.socket, most: int) -> bytes:
    while True:
        try:
            return peer.recv(most)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(peer)


async def _send(peer: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    for _ in range(_WRITES_MAX):
        if not left:
            break
        try:
            left = left[peer.send(left) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(peer)
    peer.shutdown(socket.SHUT_WR)
