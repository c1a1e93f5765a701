"""Accept connections for as long as the daemon serves."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections import Counter
from typing import Final, Literal

import trio

from runnerd.protocol.errors import RequestError

from .access import Allowed, Peer, check_peer, peer_of
from .connection import Connection
from .service import Service
from .shortage import NO_RESOURCES

_BACK_OFF_S: Final = 0.1
_SHORTAGE_SAID_EVERY_S: Final = 5.0
_REFUSING_MAX: Final = 32  # refused connections that are still told why, at a time, of each kind

_By = Literal["gate", "limit"]  # what a connection is refused by


class Server:
    """The accept loop.

    Args:
        service: The daemon's shared parts.
        listening: The bound socket, not blocking.
        allowed: Peers besides our own user and root.
    """

    def __init__(self, service: Service, listening: socket.socket, allowed: Allowed) -> None:
        self._service = service
        self._listening = listening
        self._next: socket.socket | None = None
        self._allowed = allowed
        # Given up for a moment when no descriptor is free, so that a peer is closed cleanly and
        # does not hang in the backlog.
        self._reserve: int | None = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._refusals = 0
        self._refusing: Counter[_By] = Counter()
        self._shortage_next_s = 0.0

    async def run(self, nursery: trio.Nursery) -> None:
        """Serve for ever. A core task: what escapes it is an uncaught error of the daemon.

        Connections are tasks of `nursery`; none of them can end it.
        """
        while True:
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                if self._service.registry.state == "stopping":
                    return  # the stop has closed the socket
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno not in NO_RESOURCES:
                    raise
                self._shed(error)
                await trio.sleep(_BACK_OFF_S)
                continue
            self._take_reserve()
            self._admit(sock, nursery)
            await trio.lowlevel.checkpoint()

    def replace(self, listening: socket.socket) -> None:
        """Listen there from now on, once who waits at the socket before has been let in."""
        self._next = listening
        trio.lowlevel.notify_closing(self._listening)

    async def _wait(self) -> None:
        if self._next is not None:  # nobody waits there any more, and nobody can come
            self._listening.close()
            self._listening, self._next = self._next, None
            return
        with contextlib.suppress(trio.ClosedResourceError):  # replace() has woken us
            await trio.lowlevel.wait_readable(self._listening)

    def _shed(self, error: OSError) -> None:
        counters, now_s = self._service.counters, time.monotonic()
        counters.accept_failures += 1
        # One shortage fails an accept every tenth of a second: it is one thing to say.
        if now_s >= self._shortage_next_s:
            self._shortage_next_s = now_s + _SHORTAGE_SAID_EVERY_S
            self._service.log.warning(
                "accept_failed", error=str(error), total=counters.accept_failures
            )
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
            with contextlib.suppress(OSError):
                self._listening.accept()[0].close()
        self._take_reserve()

    def _take_reserve(self) -> None:
        if self._reserve is None:
            with contextlib.suppress(OSError):  # then with the next peer that there is room for
                self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _admit(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        service, counters = self._service, self._service.counters
        peer, refusal = self._look(sock)
        by: _By | None = None if refusal is None else "gate"
        if refusal is None and (refusal := self._too_many()) is not None:
            by = "limit"
        if refusal is not None and by is not None:
            service.refused(refusal.kind)
            self._log_refusal(refusal, peer)
            # Told why, a few at a time and beside the limit: else a command that is refused could
            # keep everybody else out by trying. Apart, or it could keep `busy` from whom the gates
            # let in, and a probe would take the daemon for dead.
            if self._refusing[by] >= _REFUSING_MAX:
                sock.close()
                return
        counters.connections_total += 1
        nursery.start_soon(self._serve, Connection(service, sock, peer, refusal), by)
        if by is None:
            counters.connections += 1
        else:
            self._refusing[by] += 1

    def _look(self, sock: socket.socket) -> tuple[Peer, RequestError | None]:
        """Return who it is, as far as that can be seen, and why the gates refuse it."""
        peer = Peer(0, -1, -1)
        try:
            sock.setblocking(False)
            peer = peer_of(sock)
            check_peer(sock, peer, self._allowed)
        except RequestError as error:
            return peer, error
        except OSError as error:  # no descriptor left to look with: nobody gets in unseen
            return peer, RequestError(
                "busy", f"cannot look at the peer: {error.strerror}", retry_after_s=1.0
            )
        except Exception as error:  # noqa: BLE001 - stray: what this one peer is made of
            self._service.stray(error, "access")
            return peer, RequestError("internal", "the peer could not be looked at")
        return peer, None

    def _too_many(self) -> RequestError | None:
        most = self._service.bounds.connections_max
        if self._service.counters.connections < most:
            return None
        return RequestError(
            "busy", f"{most} connections are open; that is the most", retry_after_s=1.0
        )

    def _log_refusal(self, refusal: RequestError, peer: Peer) -> None:
        self._refusals += 1
        self._service.log.warning(
            "peer_refused",
            kind=refusal.kind,
            error=refusal.message,
            pid=peer.pid,
            uid=peer.uid,
            total=self._refusals,
        )

    async def _serve(self, connection: Connection, refused_by: _By | None) -> None:
        service = self._service
        service.connections.add(connection)
        try:
            await connection.serve()
        except Exception as error:  # noqa: BLE001 - stray: one connection's own failure
            service.stray(error, "connection", connection=connection.number)
        finally:
            service.connections.discard(connection)
            if refused_by is None:
                service.counters.connections -= 1
            else:
                self._refusing[refused_by] -= 1
