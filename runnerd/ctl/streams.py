"""Our own standard streams: none is closed, and output that cannot be written is said."""

from __future__ import annotations

import errno
import os
import select
import sys
from typing import Final

from .endings import REFUSED, SIGNAL_BASE, say

DESCRIPTORS: Final = {"stdout": 1, "stderr": 2}
SIGPIPE: Final = 13
_CANNOT_WRITE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
)
"""What a print raises; sockets and files have their errors typed where they are used."""


def open_standard_streams() -> None:
    """Fill closed descriptors 0 to 2, so that no socket of ours takes their number.

    Without it `runnerctl run -- cmd >&-` would write the command's output into its own
    connection to the daemon, and `runnerctl health >&-` would find nothing to print on.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest free number is the next one opened
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    # A path that is no UTF-8, a tree's lines in a locale without them: shown as standard error
    # shows them, and no failure.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def write_all(descriptor: int, data: bytes) -> None:
    """Write a command's output to a standard stream, waiting for its reader.

    Raises:
        OSError: If it cannot be written; what was before that is.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            # Whoever shares this descriptor with us has made it non-blocking.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def flush(code: int) -> int:
    """Write what stands in standard output; returns `code`, or what its failure makes of it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return output_lost(error)
    return code


def output_lost(error: OSError) -> int:
    """Say that standard output cannot be written, and return the exit code for that.

    Raises:
        OSError: The same, if it is about something else.
    """
    if isinstance(error, BrokenPipeError):
        # Its reader is gone, `runnerctl ps | head -1`: end as SIGPIPE would, without a word.
        code = SIGNAL_BASE + SIGPIPE
    elif error.errno in _CANNOT_WRITE:
        say(f"cannot write standard output: {(error.strerror or str(error)).lower()}")
        code = REFUSED
    else:
        raise error
    sys.stdout = None  # else its flush at exit fails once more
    return code
