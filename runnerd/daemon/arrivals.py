"""How much of what was written to a peer it has read, for readers that come back by name.

Bytes in the buffer of a socket that dies are gone, and nobody can ask it afterwards: the kernel
throws them away with the peer's end (tried: SIOCOUTQ, unix(7), falls to 0 at the peer's close). So
it is asked while the peer is there, and what was not read by the last time counts as not sent.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from collections import deque
from typing import Final

from runnerd.core.flow import Subscription

from .poller import EPOLLOUT, Owner, Poller
from .running import Running

_EPOLLOUT_EDGE: Final = EPOLLOUT | select.EPOLLET
_asked = select.epoll()  # made now: when it is needed no descriptor may be had


def unread_bytes(sock: socket.socket) -> int:
    """Return what the peer has yet to read of what was written, or a little more.

    The kernel counts what the bytes cost it, 0.8 kB for the smallest message. 0 is exact.
    """
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0"))[0])


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the peer closed its end, noticed or not."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    try:
        return bool(poll.poll(0))
    except OSError:  # EINVAL where our limit of descriptors is 0, poll(2)
        return _has_hung_up(sock)


def _has_hung_up(sock: socket.socket) -> bool:
    # Three calls instead of one, but none that our limit of descriptors could fail.
    _asked.register(sock, select.EPOLLRDHUP)
    try:
        return bool(_asked.poll(0))
    finally:
        _asked.unregister(sock)


class Arrivals:
    """What is on its way over one socket, and for whom that matters.

    Args:
        sock: Not blocking; closed by its connection, after `close`.
        poller: Tells when the peer reads, while a command waits for just that.
        owner: Who is told of a failure.

    Attributes:
        written_bytes: All that the socket has taken.
    """

    def __init__(self, sock: socket.socket, poller: Poller, owner: Owner) -> None:
        self.written_bytes = 0
        self._sock = sock
        self._poller = poller
        self._owner = owner
        self._on_the_way: dict[Subscription, tuple[Running, deque[tuple[int, int]]]] = {}
        self._watching = False

    def sent(self, subscription: Subscription, running: Running, seq: int, end_bytes: int) -> None:
        """A record was handed out; it has arrived once that much of all that is written has."""
        if subscription not in self._on_the_way:
            self._on_the_way[subscription] = (running, deque())
        self._on_the_way[subscription][1].append((end_bytes, seq))

    def forget(self, subscription: Subscription) -> None:
        """It is over."""
        self._on_the_way.pop(subscription, None)

    def settle(self) -> None:
        """Acknowledge what the peer has read; look again when it reads, if a command waits."""
        if not self._on_the_way:
            self._watch(wanted=False)
            return
        arrived_bytes = self.written_bytes - unread_bytes(self._sock)
        # In this order: a peer that goes is seen to go before its unread bytes are thrown away.
        if has_hung_up(self._sock):
            return
        is_waited_for = False
        for subscription, (running, ends) in list(self._on_the_way.items()):
            seq = 0
            while ends and ends[0][0] <= arrived_bytes:
                seq = ends.popleft()[1]
            if seq:
                subscription.ack(seq)
            if not ends:
                self.forget(subscription)
            may_read = running.readers.advanced()
            is_waited_for = is_waited_for or bool(ends and not may_read)
        self._watch(wanted=is_waited_for)

    def _watch(self, *, wanted: bool) -> None:
        if wanted and not self._watching:
            # Edge-triggered, it is told each time the peer has read something; once a quarter of
            # the buffer or less is in use, which the peer gets to by reading on.
            fd = self._sock.fileno()
            self._poller.watch(fd, _EPOLLOUT_EDGE, lambda _events: self.settle(), self._owner)
        elif not wanted and self._watching:
            self._poller.unwatch(self._sock.fileno())
        self._watching = wanted

    def close(self) -> None:
        """The socket is about to be closed."""
        self._on_the_way.clear()
        self._watch(wanted=False)
