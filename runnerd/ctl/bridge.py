"""runnerctl bridge: one connection to the daemon on standard input and output, bytes as they are.

For an engine whose sockets cannot be reached from outside: `docker exec -i NAME runnerctl bridge`.
Each direction has a thread that waits, reads and writes in turn, so that neither can hold up the
other and nothing is held here but one read of each.

Whichever side ends first ends it. Where standard input ends, what it brought is passed on and the
daemon told by a half-close; what it still says comes through before its own end ends us. Where
nobody reads standard output any more, what stands in standard input still reaches the daemon.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Final

from runnerd.client.locate import open_socket

from .endings import REFUSED, say
from .passing import open_standard_streams, wait_ready
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  docker exec -i sandbox runnerctl bridge
  from Python: connect_command(["docker", "exec", "-i", "sandbox", "runnerctl", "bridge"])

Ends with 0 once either side has ended, and with 125 if there is no daemon.
"""

CONNECT_S: Final = 10.0
READ_BYTES: Final = 64 * 1024  # what a pipe holds
LAST_S: Final = 1.0  # for what stands in standard input when nobody reads our output any more


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: it has none of its own."""
    parser.epilog = EPILOG


def main(options: argparse.Namespace) -> int:
    """Run it."""
    open_standard_streams()
    connection, _path = open_socket(where(options)["path"], CONNECT_S)
    connection.setblocking(True)
    feeder = threading.Thread(target=pass_on, args=[connection], daemon=True)
    try:
        feeder.start()
    except RuntimeError:
        say("cannot start a thread: no process is left here; use the socket itself, from a mount")
        return REFUSED
    try:
        pass_back(connection)
    except BrokenPipeError:
        feeder.join(LAST_S)
    except OSError as error:
        say(f"cannot write standard output: {(error.strerror or str(error)).lower()}")
        return REFUSED
    return 0


def pass_on(connection: socket.socket) -> None:
    """Copy standard input to the daemon, and its end as a half-close."""
    buffer = bytearray(READ_BYTES)
    try:
        while count := _read_some(buffer):
            connection.sendall(memoryview(buffer)[:count])
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the daemon has ended the connection; the other direction sees that


def _read_some(buffer: bytearray) -> int:
    while True:
        try:
            return os.readv(0, [buffer])
        except BlockingIOError:  # whoever shares this descriptor with us has made it so
            wait_ready(0, select.POLLIN)
        except OSError:
            return 0  # a terminal that hung up, a peer that left with something unread


def pass_back(connection: socket.socket) -> None:
    """Copy what the daemon says to standard output, until its end.

    Raises:
        BrokenPipeError: If nobody reads standard output any more, also while nothing is said.
        OSError: If it cannot be written.
    """
    buffer = bytearray(READ_BYTES)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(1, 0)  # errors and hang-ups are always told, poll(2)
    while True:
        if any(descriptor == 1 for descriptor, _ in poll.poll()):
            raise BrokenPipeError
        count = _receive_some(connection, buffer)
        if not count:
            return
        rest = memoryview(buffer)[:count]
        while rest:
            try:
                rest = rest[os.write(1, rest) :]
            except BlockingIOError:
                wait_ready(1, select.POLLOUT)


def _receive_some(connection: socket.socket, buffer: bytearray) -> int:
    try:
        return connection.recv_into(buffer)
    except OSError:
        return 0  # reset: the daemon left with something unread
