"""What a round of chaos does to a daemon, its shims, its commands and their clients.

All of it from outside: signals, limits, a full disk, a wall clock that jumps, and system calls
that fail at the kernel's edge, which strace(1) makes them do; the product has no hook for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from pathlib import Path
from random import Random
from typing import Final

from tests.daemon.looking import command_name
from tests.harness import children, wait_for

DAEMON_CALLS: Final = {
    "accept4": "EMFILE ENFILE ENOMEM ECONNABORTED",
    "pipe2": "EMFILE ENFILE",
    "socketpair": "EMFILE ENOMEM",
    "pidfd_open": "EMFILE ENOMEM",
    "openat": "EMFILE ENFILE ENOMEM",
    "memfd_create": "EMFILE ENOMEM",
    "?vfork,clone,?clone3": "EAGAIN ENOMEM",
    "sendmsg": "ENOMEM ENOBUFS EAGAIN EPIPE",
    "sendto": "ENOMEM ENOBUFS EAGAIN",
    "recvfrom": "EAGAIN EINTR",
    "recvmsg": "ENOMEM EAGAIN",
    "read": "EAGAIN EINTR",
    "ioctl": "ENOMEM EIO",
    "fcntl": "EMFILE",
    "?epoll_wait,?epoll_pwait": "EINTR",
    "pwrite64": "ENOSPC EIO",
    "pread64": "EIO",
    "fallocate": "ENOSPC EIO EOPNOTSUPP",
    "ftruncate": "EIO ENOSPC",
    "?newfstatat,fstat": "ENOMEM EIO",
    "getdents64": "ENOMEM EIO",
    "pidfd_send_signal": "EAGAIN ENOMEM",
    "?mkdir,mkdirat": "ENOSPC ENOMEM",
    "waitid": "EINTR",
}
"""System calls of the daemon, and what they may say that they do not say on a good day."""
SHIM_CALLS: Final = {
    "recvmsg": "ENOMEM EAGAIN",
    "sendto": "ENOMEM EAGAIN ENOBUFS",
    "sendmsg": "ENOMEM EAGAIN ENOBUFS",
    "ppoll,?poll": "EINTR ENOMEM",
    "openat": "EMFILE ENOMEM",
    "read": "EIO ENOMEM",
    "getdents64": "ENOMEM",
    "pidfd_open": "EMFILE ENOMEM",
    "pidfd_send_signal": "EAGAIN",
    "kill": "EAGAIN",
    "waitid": "EINTR",
    "prctl": "EPERM",
    "prlimit64": "EPERM",
    "chdir": "EIO",
    "execve": "ENOMEM EIO",
    "dup2,dup3": "EMFILE",
    "fcntl": "EMFILE",
    "write": "EIO",
}


class Failing:
    """System calls of one process that fail, from now until `end`.

    Args:
        pid: Whose, with its threads; what it starts is not meant.
        calls: A table as above.
        chance: Which three, with what, and from the how-manieth on.
    """

    def __init__(self, pid: int, calls: dict[str, str], chance: Random) -> None:
        names = chance.sample([*calls], 3)
        injected: list[str] = []
        for name in names:
            errno = chance.choice(calls[name].split())
            first, count = chance.choice((1, 1, 2, 3, 5, 9)), chance.choice((1, 1, 2, 5))
            injected.append(f"{name}:error={errno}:when={first}..{first + count - 1}")
        self.what = " ".join(injected)
        threads = [each.name for each in Path(f"/proc/{pid}/task").iterdir()]
        self._said = tempfile.NamedTemporaryFile(prefix="chaos-strace-")  # noqa: SIM115
        self._strace = subprocess.Popen(
            [
                "strace", "-o", self._said.name, "-e", f"trace={','.join(names)}",
                *(word for each in injected for word in ("-e", f"inject={each}")),
                "-e", "signal=none", *(word for each in threads for word in ("-p", each)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        # "strace: Process N attached", once for each: from here on they fail.
        assert self._strace.stderr is not None
        for _ in threads:
            self._strace.stderr.readline()

    def end(self) -> int:
        """Let them work again; returns how many have failed."""
        self._strace.terminate()
        self._strace.communicate()
        text = Path(self._said.name).read_text(errors="replace")
        self._said.close()
        return text.count("(INJECTED)")


class FewDescriptors:
    """A daemon that may open few more descriptors, from now until `end`."""

    def __init__(self, pid: int, more: int) -> None:
        self._pid = pid
        self._before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        in_use = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use + more, self._before[1]))

    def end(self) -> None:
        """Give it back what it had."""
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._before)


class FullDisk:
    """A small file system in which nothing is free, from now until `end`."""

    def __init__(self, folder: Path, leave_bytes: int) -> None:
        self._path = folder / "filling"
        free = os.statvfs(folder)
        count = max(0, free.f_bavail * free.f_frsize - leave_bytes)
        with contextlib.suppress(OSError), self._path.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, count))

    def end(self) -> None:
        """Give the space back."""
        self._path.unlink(missing_ok=True)


def send(pid: int, number: int) -> bool:
    """Send a signal; False where nobody is there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def shims_of(daemon_pid: int) -> list[tuple[int, set[int]]]:
    """Return the daemon's shims, in order of age, each with its children."""
    return [
        (pid, children(pid))
        for pid in sorted(children(daemon_pid))
        if command_name(pid) == "runnerd-shim"
    ]


def kill_for_good(pid: int) -> None:
    """Kill a child of ours, and take its status."""
    send(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        wait_for(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))
