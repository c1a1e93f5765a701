"""runnerctl bridge: one connection to the daemon on standard input and output, bytes as they are.

For an engine whose sockets cannot be reached from outside: `docker exec -i NAME runnerctl bridge`.
One loop, and no thread: at the pids limit an engine still gets one process in, and that is when a
sandbox has to be looked at. Neither direction holds up the other, and nothing is held here but one
read of each.

Whichever side ends first ends it. Where standard input ends, what it brought is passed on and the
daemon told by a half-close; what it still says comes through before its own end ends us. Where
nobody reads standard output any more, what stands in standard input still reaches the daemon.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from typing import TYPE_CHECKING, Final

from runnerd.client.locate import open_socket

from .endings import REFUSED, say
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Ends with 0 once either side has ended, and with 125 if there is no daemon. Fence and token are for
whoever connects through it to say: --fence and --token-file are refused here.

examples:
  docker exec -i sandbox runnerctl bridge
  from Python: connect_command(["docker", "exec", "-i", "sandbox", "runnerctl", "bridge"])
"""

CONNECT_S: Final = 10.0
READ_BYTES: Final = 64 * 1024  # what a pipe holds
LAST_MS: Final = 1000  # for the daemon to take what stands in standard input at our end
_TROUBLE: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: it has none of its own."""
    parser.epilog = EPILOG


def main(options: argparse.Namespace) -> int:
    """Run it."""
    for option in ("fence", "token_file"):
        if getattr(options, option, None) is not None:
            # Said in the hello, which is not ours: ignored, they would seem to hold.
            name = f"--{option.replace('_', '-')}"
            options.parser.error(f"{name} is for whoever connects through the bridge to say")
    connection, _path = open_socket(where(options)["path"], CONNECT_S)
    try:
        Bridge(connection).run()
    except OSError as error:
        say(f"cannot write standard output: {(error.strerror or str(error)).lower()}")
        return REFUSED
    return 0


class Bridge:
    """Copies both ways between a connection and our standard streams.

    Those are never made non-blocking: that flag is shared with whoever gave them to us. They are
    read where something stands in them, and written where something fits.

    Args:
        connection: Connected.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._to_daemon = memoryview(b"")
        self._from_daemon = memoryview(b"")
        self._reads_input = True
        self._is_over = False
        self._has_reader = True
        mode = os.fstat(1).st_mode
        self._out = socket.socket(fileno=os.dup(1)) if stat.S_ISSOCK(mode) else None

    def run(self) -> None:
        """Copy until either side has ended.

        Raises:
            OSError: If standard output cannot be written; not where nobody reads it.
        """
        while not self._is_over:
            ready = self._wait()
            if not ready and not self._has_reader:
                return
            if ready.get(1, 0) & _TROUBLE and not self._from_daemon:
                self._has_reader = False
            if 1 in ready and self._from_daemon:
                self._write_output()
            if 0 in ready:
                self._read_input()
            if self._connection.fileno() in ready:
                self._send()
                self._receive()

    def _wait(self) -> dict[int, int]:
        poll = select.poll()
        connection = 0
        if self._to_daemon:
            connection |= select.POLLOUT
        elif self._reads_input:
            poll.register(0, select.POLLIN)
        if self._has_reader:
            if self._from_daemon:
                poll.register(1, select.POLLOUT)
            else:
                connection |= select.POLLIN
                poll.register(1, 0)  # its reader's end is told all the same, poll(2)
        if connection:
            poll.register(self._connection, connection)
        if self._has_reader:
            return dict(poll.poll())
        return dict(poll.poll(LAST_MS if self._to_daemon else 0))

    def _read_input(self) -> None:
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:  # whoever shares it was faster
            return
        except OSError:
            data = b""  # a terminal that hung up, a peer that left with something unread
        self._to_daemon = memoryview(data)
        if not data:
            self._reads_input = False
            try:
                self._connection.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the daemon has ended it; that is read next
        self._send()

    def _send(self) -> None:
        try:
            while self._to_daemon:
                self._to_daemon = self._to_daemon[self._connection.send(self._to_daemon) :]
        except BlockingIOError:
            return
        except OSError:  # the daemon is gone, or going: what it still says is read first
            self._to_daemon = memoryview(b"")
            self._reads_input = False

    def _receive(self) -> None:
        if self._from_daemon or not self._has_reader:
            return
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # reset: the daemon left with something unread
        self._from_daemon = memoryview(data)
        self._is_over = not data

    def _write_output(self) -> None:
        try:
            if self._out is not None:
                sent = self._out.send(self._from_daemon, socket.MSG_DONTWAIT)
            else:
                # A pipe that can be written takes this much without waiting, pipe(7).
                sent = os.write(1, self._from_daemon[: select.PIPE_BUF])
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._has_reader = False
            self._from_daemon = memoryview(b"")
        else:
            self._from_daemon = self._from_daemon[sent:]
