"""The shim's program as it is started: in a form that none of our user may read.

A process hides itself by prctl(2), but only once it runs. From its execve until then one of the
same user can take its descriptors: tried, a command that guessed pids had the control socket of 6
shims in 710 starts. The kernel hides a process from its first moment where who runs the program
may not read it. So an unprivileged daemon runs a copy in memory that its owner may only execute.
Root may read everything, and as root's own user a command can do worse.

Source: would_dump() in the kernel's fs/exec.c; PR_SET_DUMPABLE in prctl(2); memfd_create(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

_ELF: Final = b"\x7fELF"
_MFD_EXEC: Final = 0x10  # Linux 6.3, which may else make it without the right to be executed
# No /proc, or memory that a policy does not let us execute.
_NOT_HERE: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class ShimProgram:
    """Where posix_spawn(3) finds the shim.

    Args:
        path: The binary.

    Attributes:
        path: What is started: the copy, by its descriptor, or the binary itself where there can be
            none, or need not be.
    """

    def __init__(self, path: str) -> None:
        self._plain = self.path = path
        self._fd: int | None = None
        if os.geteuid() != 0:
            with contextlib.suppress(OSError):
                self._fd = _unreadable_copy(path)
        if self._fd is not None:
            self.path = f"/proc/self/fd/{self._fd}"

    def give_up_copy(self, error: OSError) -> bool:
        """Go on with the binary itself, if the copy cannot be executed here.

        Returns:
            Whether it is worth another try.
        """
        if self._fd is None or error.errno not in _NOT_HERE:
            return False
        os.close(self._fd)
        self._fd, self.path = None, self._plain
        return True


def _unreadable_copy(path: str) -> int | None:
    """Return a descriptor; None for a script, whose interpreter has to read it.

    Raises:
        OSError: If there can be none; also where the binary is one that we may not read.
    """
    with open(path, "rb", buffering=0) as binary:
        if os.pread(binary.fileno(), len(_ELF), 0) != _ELF:
            return None
        try:
            fd = os.memfd_create("runnerd-shim", os.MFD_CLOEXEC | _MFD_EXEC)
        except OSError:  # an older kernel does not know the flag
            fd = os.memfd_create("runnerd-shim", os.MFD_CLOEXEC)
        try:
            while os.sendfile(fd, binary.fileno(), None, 1 << 20):
                pass
            os.fchmod(fd, 0o100)
        except OSError:
            os.close(fd)
            raise
    return fd
