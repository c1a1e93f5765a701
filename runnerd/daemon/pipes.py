"""What lies between the daemon and one command: pipes, and what is done with the daemon's ends.

A command with a terminal has daemon/terminal.py's instead; Streams is what both have in common.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from typing import Final

from runnerd.protocol.answers import TerminalSize
from runnerd.protocol.requests import ExecStart

from .users import Account

BIG_PIPE_BYTES: Final = 256 * 1024
BIG_PIPES_MAX: Final = 32

DEV_NULL: Final = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class Streams:
    """The three streams of one exec: ours to read and write, theirs to hand over.

    Attributes:
        is_terminal: Whether one terminal is all three of them.
        stdin: What is written to feed the command, None where it is closed.
        output: What is read, by stream; None at its end.
        theirs: The command's descriptors 0 to 2, until given().
    """

    is_terminal = False

    def __init__(self) -> None:
        self.stdin: int | None = None
        self.output: list[int | None] = [None, None]
        self.theirs: list[int] = []
        self._given: list[int] = []

    def read(self, fd: int, size: int) -> bytes:
        """Read once; nothing is the end of the stream, for now at least with a terminal."""
        return os.read(fd, size)

    def waiting_bytes(self, fd: int) -> int:
        """Return how many bytes have to be read to have all that is there now."""
        return bytes_waiting(fd)

    def write(self, fd: int, data: bytes | bytearray) -> int:
        """Write as much as goes in now; returns how much."""
        return os.write(fd, data)

    def end_mark(self) -> bytes:
        """Return what has to be written to end the input; nothing where closing does it."""
        return b""

    def resize(self, _rows: int, _cols: int) -> bool:
        """Say that there is no terminal whose size could be set."""
        return False

    def size(self) -> TerminalSize | None:
        """Say that there is no terminal that has a size."""
        return None

    def link(self, fd: int) -> str:
        """Return what /proc/PID/fd shows of the other end of one of ours."""
        return f"pipe:[{os.fstat(fd).st_ino}]"

    def given(self) -> None:
        """The command has its ends: close ours of them, or EOF would never come."""
        for fd in self._given:
            os.close(fd)
        self._given.clear()

    def close(self) -> None:
        """Close everything still open."""
        self.given()
        for fd in (self.stdin, *self.output):
            if fd is not None:
                os.close(fd)
        self.stdin = None
        self.output = [None, None]


class Pipes(Streams):
    """The pipes of one exec.

    The two ends of a pipe are descriptions of their own, so O_NONBLOCK on ours does not reach
    the command. They are real pipes, not sockets: a command may open /dev/stdout.

    Args:
        params: Which streams are wanted.
        account: The user who has to be able to open them through /dev/stdout.

    Raises:
        OSError: If a descriptor cannot be had; nothing is left open then.
    """

    def __init__(self, params: ExecStart, account: Account | None) -> None:
        super().__init__()
        self._account = account
        try:
            self.theirs.append(self._stdin() if params.stdin == "pipe" else DEV_NULL)
            self.theirs.append(self._output(0))
            if params.stderr == "pipe":
                self.theirs.append(self._output(1))
            else:
                self.theirs.append(self.theirs[1] if params.stderr == "stdout" else DEV_NULL)
        except OSError:
            self.close()
            raise

    def _pipe(self, theirs: int) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC)
        self._given.append(ends[theirs])
        try:
            os.set_blocking(ends[1 - theirs], False)
        except OSError:
            os.close(ends[1 - theirs])  # nobody knows of it yet
            raise
        account = self._account
        if account is not None and account.switch is not None:
            try:
                os.fchown(ends[theirs], account.uid, account.gid)
            except OSError:
                # Without CAP_CHOWN: only who reaches /proc/PID/fd of this exec can open it.
                with contextlib.suppress(OSError):
                    os.fchmod(ends[theirs], 0o666)
        return ends

    def _stdin(self) -> int:
        reader, self.stdin = self._pipe(0)
        return reader

    def _output(self, stream: int) -> int:
        self.output[stream], writer = self._pipe(1)
        return writer


class BigPipes:
    """Give a few bulk streams bigger pipes.

    A full pipe stops its writer until the daemon has been woken; one of four times the size lets
    both go on, which is worth a fifth in throughput (DECISIONS.md). Only a few may have one: the
    pages of pipes are counted against the user, beyond 16,384 of them new pipes become tiny, and
    other processes of the user would pay for ours. Source: pipe(7), "/proc files".

    Attributes:
        given: How many are big now.
    """

    def __init__(self) -> None:
        self.given = 0

    def grow(self, fd: int) -> bool:
        """Make a pipe bigger; False where it may not be."""
        if self.given >= BIG_PIPES_MAX:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, BIG_PIPE_BYTES)
        except OSError:  # over the user's limit, which is no reason to do anything else
            return False
        self.given += 1
        return True


def bytes_waiting(fd: int) -> int:
    """Return how many bytes a pipe holds now. Source: FIONREAD, ioctl_tty(2), pipe(7)."""
    return int(struct.unpack("I", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
