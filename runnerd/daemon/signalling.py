"""Processes held by a pidfd, and what stands in where the kernel or a seccomp filter has none.

An old kernel says ENOSYS, an engine's filter EPERM. What is then left of the proof is to look
twice: the number cannot have changed hands where the start time has not.

Source: pidfd_open(2), pidfd_send_signal(2).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Final

_NOT_HERE: Final = (errno.ENOSYS, errno.EPERM)


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None where they cannot be had here.

    Raises:
        OSError: As the call says: ESRCH where there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise


def send_signal(pid: int, number: int, is_right: Callable[[], bool]) -> bool:
    """Send one signal to a process that was checked after it could no longer change.

    Args:
        pid: The process.
        number: The signal.
        is_right: Looks whether the pid names the process that is meant.

    Returns:
        Whether it was sent. Never to 0, our own group, nor to 1, which holds the sandbox.

    Raises:
        OSError: As the call says.
    """
    if pid <= 1:
        return False
    pidfd = open_pidfd(pid)
    try:
        if not is_right():
            return False
        if pidfd is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(pidfd, number)
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True
