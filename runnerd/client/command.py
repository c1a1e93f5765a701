"""The way by a command: its standard input and output are the connection."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Final

from .errors import ConnectFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

WORDS_BYTES: Final = 16 * 1024
"""What is kept of a command's standard error: its first words. It can never fill up and block."""


class CommandWay:
    """One command at a time, started anew for each connection; see locate.Way.

    Each is given a socket for standard input and output, so that each direction has the kernel's
    back-pressure, and its end of it is all that keeps the connection.

    Args:
        command: The program and its arguments, run in the folder that is the current one now.
    """

    def __init__(self, command: Sequence[str]) -> None:
        assert not isinstance(command, str), "a list of words: no shell is involved"
        self._command = list(command)
        if not command:
            raise ValueError("no program is named")
        self._folder = os.getcwd()  # noqa: PTH109
        self._process: subprocess.Popen[bytes] | None = None
        self._words = -1

    @classmethod
    def open(cls, command: Sequence[str]) -> tuple[socket.socket, Self]:
        """Start the first.

        Raises:
            ConnectFailed: If it cannot be started.
        """
        name = command[0] if command else ""
        try:
            way = cls(command)
            return way.reopen(), way
        except (OSError, ValueError) as error:  # ValueError: a word that no program can be given
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            hint = "see whether the program is there and may be run"
            raise ConnectFailed(f"cannot run {name!r}: {reason}", paths=[], hint=hint) from error

    def reopen(self) -> socket.socket:
        """End the one before, whatever it does, and start the next.

        Raises:
            OSError: If it cannot be started.
        """
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._words = _bounded_file()
                self._process = subprocess.Popen(  # noqa: S603  # the caller's own words
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._words,
                    cwd=self._folder,
                    # Ctrl-C is for whoever uses the client: it must not cut the connection.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                self.end()
                raise
        ours.setblocking(False)
        return ours

    def turned_away(self) -> ConnectFailed:
        """Say why the first ended without a byte: by its own words, which came before its end."""
        return ConnectFailed(
            f"'{self._command[0]}' ended without reaching a daemon: {self.words() or 'no word'}",
            paths=[],
            hint="run the command by hand: it should wait for input",
        )

    def words(self) -> str:
        """Return what the last one said on standard error; empty = nothing."""
        if self._words < 0:
            return ""
        said = os.pread(self._words, WORDS_BYTES, 0).partition(b"\0")[0]
        return said.decode("utf-8", "replace").strip()

    def has_left(self) -> bool:
        """Whether it has ended; what it has left in its group is then ended too."""
        if self._process is None:
            return True
        try:
            # Not reaped yet, so that its number is still its group's.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # whoever ignores SIGCHLD has it reaped by the kernel
            self._process.wait()
            self._process = None
            return True
        if ended is not None:
            self.end()
        return ended is not None

    def end(self) -> None:
        """Kill it with all of its group, and reap it."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._words >= 0:
            os.close(self._words)
            self._words = -1


def _bounded_file() -> int:
    # Memory of a fixed size: what is written beyond it is an error for the writer, memfd_create(2).
    file = os.memfd_create("runnerd-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, WORDS_BYTES)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file
