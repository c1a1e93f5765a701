"""What the daemon does to its own process before it serves, each step with its reason."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from .linux import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_NAME, prctl, set_title

_RESERVED_FDS = 6  # 0-2, and the three numbers a shim is given its own as


def open_fds() -> frozenset[int]:
    """Return the descriptors this process has been given: to be asked before any is opened."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.fstat(int(name))  # not the one this list was read through
                found.add(int(name))
    return frozenset(found)


def fill_standard_fds() -> None:
    """Open 0-5 on /dev/null where they are free.

    Else the next descriptor opened would be one of them: a socket as somebody's stderr, or a
    control socket that the shim's dup2 overwrites.

    Raises:
        OSError: If /dev/null cannot be opened: commands could not be given it as their stdin.
    """
    for fd in range(_RESERVED_FDS):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            if null != fd:
                os.dup2(null, fd, inheritable=fd < 3)
                os.close(null)
            elif fd < 3:
                os.set_inheritable(fd, True)


def close_on_exec() -> None:
    """Keep every inherited descriptor from the commands."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 2:
                    os.set_inheritable(int(name), False)


def raise_nofile() -> tuple[int, int]:
    """Use all descriptors the hard limit allows.

    Returns:
        The limits as they were, soft and hard: commands get them back.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def take_process() -> bool:
    """Make the process a daemon's: signals, directory, name, orphans.

    Returns:
        Whether orphans of a dead shim come to us.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would reap for us
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file size limit is an error, not our end
    # The disk's thread has the GIL within this long of asking for it: with Python's own 5 ms a
    # command that writes 1 GB/s is 16 MiB ahead of it after two turns.
    sys.setswitchinterval(0.001)
    os.umask(0o022)
    os.chdir("/")  # the directory we were started in may go away
    with contextlib.suppress(OSError):
        prctl(PR_SET_NAME, b"runnerd")
    set_title("runnerd serve")  # an agent's `pkill -f python` must not hit the daemon
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    except OSError:
        return os.getpid() == 1
    return True


def hide_process() -> None:
    """From here on no process of our user can read or trace us, or take our descriptors."""
    with contextlib.suppress(OSError):
        prctl(PR_SET_DUMPABLE, 0)
