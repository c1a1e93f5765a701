"""Where log lines go, without ever waiting for whoever reads them.

A pipe or terminal is opened anew through /proc, not blocking: the descriptor we were given is
shared with others (a shell, a sidecar) for whom it must stay as it is, and asking before a write
is not enough, since they write as well. A socket is told not to wait for each send. Where it
cannot be opened anew (a pipe of another user's, no /proc), poll(2) is asked first: a pipe it calls
writable takes PIPE_BUF bytes whole, pipe(7).
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable
from typing import Final

WriteNow = Callable[[bytes], bool]
"""Writes one line, at most PIPE_BUF bytes; returns whether it was taken whole."""

_FLAGS: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_end(fd: int) -> WriteNow:
    """Return what writes lines to `fd` without waiting."""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            return _Socket(socket.socket(fileno=os.dup(fd)))
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            return _to(os.open(f"/proc/self/fd/{fd}", _FLAGS))
        if stat.S_ISREG(mode):  # always writable, poll(2) says
            return _to(fd)
    except OSError:
        pass
    return _asked_first(fd)


def _to(fd: int) -> WriteNow:
    def write(line: bytes) -> bool:
        try:
            return os.write(fd, line) == len(line)
        except OSError:  # full, or its reader is gone
            return False

    return write


class _Socket:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def __call__(self, line: bytes) -> bool:
        try:
            return self.socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(line)
        except OSError:
            return False


def _asked_first(fd: int) -> WriteNow:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    write = _to(fd)

    def write_if_ready(line: bytes) -> bool:
        try:
            ready = poll.poll(0)
        except OSError:  # EINVAL where we may have no descriptor at all, poll(2)
            return False
        return bool(ready) and bool(ready[0][1] & select.POLLOUT) and write(line)

    return write_if_ready
