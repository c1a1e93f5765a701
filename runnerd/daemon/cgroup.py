"""A cgroup v2 leaf for each exec, where a subtree of our own can be had; everything works without.

A leaf holds the command and all it starts, whatever becomes of sessions, parents and scores. The
shim makes its parked child in it, since to move a process there can take 15 ms (DECISIONS.md). The
daemon and the shims stay where they are. Two things are found out apart: that
a leaf can be killed at once (`cgroup.kill`, Linux 5.14; needs no controller), and that it counts
its own OOM kills (`memory.events`), for which `memory` has to be on for the children of our
cgroup, and that is possible only where no process is in it ("no internal processes") or it is the
root.

Leaves lie in a folder `runnerd-INCARNATION`, on which the daemon holds a lock for life: one that
is not locked belongs to a daemon that died.

Source: Documentation/admin-guide/cgroup-v2.rst, proc_pid_mountinfo(5), cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import time
from pathlib import Path
from typing import Final

from .leaf import Leaf, folders_in, is_held
from .signalling import send_signal

_FOLDER: Final = "runnerd-"
_NAME: Final = re.compile(r"runnerd-[0-9a-f]{16}")
_PROBE: Final = "probe"
_COUNTING: Final = ("memory", "pids")  # one by one: where one is not to be had, the other may be
_CLOSE_TRIES: Final = 20
_CLOSE_PAUSE_S: Final = 0.005


class Leaves:
    """All leaves of one daemon.

    Args:
        where: auto (our own cgroup), off, or a cgroup's folder.
        incarnation: Names our folder.

    Attributes:
        kill: Whether a leaf is killed at once.
        memory: Whether a leaf counts its own OOM kills.
        reason: Why there are none; None where there are.
        parent: The cgroup ours is made in.
    """

    def __init__(self, where: str, incarnation: str) -> None:
        self.kill = self.memory = False
        self.reason: str | None = None
        self.parent: Path | None = None
        self._folder: Path | None = None
        self._lock: int | None = None
        self._made = 0
        self._counts = False
        self._retired: list[Leaf] = []
        if where == "off":
            self.reason = "off"
            return
        self.parent = own_cgroup() if where == "auto" else Path(where)
        if self.parent is None:
            self.reason = "no cgroup v2 of ours is mounted to be written"
            return
        folder = self.parent / f"{_FOLDER}{incarnation}"
        try:
            try:
                self._open(folder)
            except FileNotFoundError:  # another has removed it before it was locked
                self._open(folder)
        except OSError as error:
            self.give_up(f"{self.parent}: {error.strerror}")
            self.close()

    def _open(self, folder: Path) -> None:
        if not (folder.parent / "cgroup.controllers").exists():
            raise OSError(errno.EINVAL, "it is no cgroup v2")
        folder.mkdir(0o755)
        self._folder = folder
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        give_controllers_to(folder)
        leaf = Leaf(folder / _PROBE)
        leaf.folder.mkdir(0o755)
        try:
            if (leaf.folder / "cgroup.type").read_text().strip() != "domain":
                raise OSError(errno.EOPNOTSUPP, "it is threaded")
            self.kill = os.access(leaf.folder / "cgroup.kill", os.W_OK)
            self.memory = leaf.oom_kills() is not None
            self._counts = self.memory or leaf.peak_tasks() is not None
        finally:
            leaf.remove()

    def make(self) -> Leaf | None:
        """Return a new leaf, None where none is to be had."""
        if self._folder is None or self.reason is not None:
            return None
        self._made += 1
        leaf = Leaf(self._folder / str(self._made), self._counts)
        try:
            leaf.folder.mkdir(0o755)
        except OSError:
            return None
        return leaf

    def give_up(self, reason: str) -> None:
        """Make no more: they do not work here. Those there are stay ours."""
        self.kill = self.memory = False
        self.reason = reason

    def retire(self, leaf: Leaf) -> bool:
        """Remove a leaf once it is empty; False where that is later, by `remove_retired`."""
        if leaf.remove():
            return True
        self._retired.append(leaf)
        return False

    def remove_retired(self) -> bool:
        """Try again; returns whether nothing is left to be removed."""
        self._retired = [leaf for leaf in self._retired if not leaf.remove()]
        return not self._retired

    def close(self) -> None:
        """Leave nothing behind; what is not empty in time is the next daemon's to remove."""
        folder, self._folder = self._folder, None
        for _ in range(_CLOSE_TRIES):
            if folder is None or _removed(folder):
                break
            time.sleep(_CLOSE_PAUSE_S)  # the parked shims' children are just leaving
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def stale(self) -> list[Path]:
        """Return the folders beside ours of daemons that have died, with something in them.

        The empty ones are removed.
        """
        found: list[Path] = []
        if self.parent is None or self._folder is None:
            return found
        with contextlib.suppress(OSError):
            found = [each for each in folders_in(self.parent) if _NAME.fullmatch(each.name)]
        stale = [each for each in found if each != self._folder and not _is_locked(each)]
        return [each for each in stale if not _removed(each)]


def end_stale(folder: Path) -> bool:
    """Kill what a dead daemon's execs left, and remove its folder; False if it is not gone yet."""
    with contextlib.suppress(OSError):
        for each in () if _is_locked(folder) else (*folders_in(folder), folder):
            leaf = Leaf(each)
            leaf.kill()
            for pid in leaf.pids():  # one by one, where there is no cgroup.kill
                _kill_one(leaf, pid)
            leaf.remove()
    return not folder.exists()


def _kill_one(leaf: Leaf, pid: int) -> None:
    with contextlib.suppress(OSError):
        send_signal(pid, signal.SIGKILL, lambda: pid in leaf.pids())


def own_cgroup(
    mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """Return the folder of the v2 cgroup that this process is in, None where none is to be seen.

    Where the path in /proc/self/cgroup is beyond what is mounted (a container without a cgroup
    namespace of its own), the mount's root is the container's own cgroup.
    """
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
        lines = mounts.read_text().splitlines()
    except (OSError, StopIteration):
        return None
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if kind.split()[0] != "cgroup2":
            continue
        root, point = (_unescaped(field) for field in fields.split()[3:5])
        inside = path.startswith(root.rstrip("/") + "/") or path == root
        folder = Path(point) / (path[len(root.rstrip("/")) :].lstrip("/") if inside else "")
        with contextlib.suppress(OSError):
            if os.getpid() in Leaf(folder).pids():
                return folder
    return None


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def give_controllers_to(folder: Path) -> None:
    """Turn on what counts in the leaves made in our folder, as far as our cgroup lets us."""
    # EBUSY in the first: processes are in it, as ours in a container. Nobody is moved.
    for name in _COUNTING:
        for each in (folder.parent, folder):
            with contextlib.suppress(OSError):
                # Of one with processes in it, `pids` would be turned on and make it a threaded
                # root, whose children nobody may enter. Seen with Linux 6.1.
                is_closed = (each / "cgroup.type").exists() and is_held(each)
                given = (each / "cgroup.subtree_control").read_text().split()
                if not is_closed and name not in given:
                    (each / "cgroup.subtree_control").write_text(f"+{name}")


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        for each in folders_in(folder):
            Leaf(each).remove()
    return Leaf(folder).remove()


def _is_locked(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # somebody else has just removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
