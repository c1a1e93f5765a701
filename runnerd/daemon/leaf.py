"""One cgroup v2: who is in it, what it has counted, how it is killed and removed.

What a command has made in its own counts as its own: a container engine makes some.

Source: Documentation/admin-guide/cgroup-v2.rst, cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .procfs import read_file
from .shortage import check_sight

_MADE_MAX: Final = 1024  # cgroups that a command made in its own, looked at in one go
_BATCH: Final = 128  # of those side by side that are removed before the next look at them
_LINKS_OF_EMPTY: Final = 2


class Leaf(NamedTuple):
    """One exec's cgroup.

    Attributes:
        folder: Where it is.
        counts: Whether it can say what was killed for memory, or how many there were.
    """

    folder: Path
    counts: bool = True

    def pids(self) -> list[int]:
        """Return the processes in it and in what the command made in it; none where it is gone.

        The dead are not among them, nor is what its owner keeps from being read.

        Raises:
            OSError: If we cannot look: no descriptor or memory is left.
        """
        pids = pids_in(self.folder)
        for each in _cgroups_in(self.folder):
            pids += pids_in(each)
        return pids

    def kill(self) -> None:
        """Kill everything in it, and what is being forked there meanwhile, where that can be."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_bytes(b"1")

    def oom_kills(self) -> int | None:
        """Return how many processes in it the kernel has killed for memory, None if not told."""
        if not self.counts:
            return None
        with contextlib.suppress(OSError):
            for line in (self.folder / "memory.events").read_bytes().splitlines():
                name, _, count = line.partition(b" ")
                if name == b"oom_kill":
                    return int(count)
        return None

    def cpu_s(self) -> float | None:
        """Return the CPU seconds used in it, by whoever is dead too; None if not told."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self.folder / "cpu.stat").read_bytes().splitlines():
                name, _, count = line.partition(b" ")
                if name == b"usage_usec":
                    return int(count) / 1e6
        return None

    def peak_tasks(self) -> int | None:
        """Return how many threads were in it at most, all processes together, None if not told."""
        if not self.counts:
            return None
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "pids.peak").read_bytes())
        return None

    def remove(self) -> bool:
        """Remove it with the cgroups made in it; False while something is in it.

        Of very many that were made only some go at a time, so that a turn of the loop stays short.
        """
        with contextlib.suppress(OSError):
            return _is_removed(self.folder)
        return False

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open its folder, which is what a shim is given.

        Raises:
            OSError: If that is not possible.
        """
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def pids_in(folder: Path) -> list[int]:
    """Return the processes in one cgroup, those below it not; none where it cannot be read.

    Those beyond our pid namespace have no number here, and are left out.

    Raises:
        OSError: No descriptor or memory is left.
    """
    return [pid for pid in _listed_in(folder) if pid]


def is_held(folder: Path) -> bool:
    """Say whether any process is right in a cgroup, one beyond our pid namespace too.

    Raises:
        OSError: No descriptor or memory is left.
    """
    return bool(_listed_in(folder))


def _listed_in(folder: Path) -> list[int]:
    try:
        return [int(word) for word in read_file(f"{folder}/cgroup.procs").split()]
    except OSError as error:
        check_sight(error)
        return []


def _cgroups_in(folder: Path) -> list[Path]:
    """Return the cgroups below one, parents first, at most _MADE_MAX of them.

    A container engine makes some, where the command is root or the cgroup is its user's own.

    Raises:
        OSError: No descriptor or memory is left.
    """
    found: list[Path] = []
    looking = deque([folder])
    while looking and len(found) < _MADE_MAX:
        each = looking.popleft()
        try:
            if _has_cgroups(each):
                inside = folders_in(each, _MADE_MAX - len(found))
                found += inside
                looking += inside
        except OSError as error:
            check_sight(error)
    return found


def _has_cgroups(folder: Path) -> bool:
    # Two links are its own name and its dot, each more is a cgroup in it: most have none, and
    # nobody's files are read through for that.
    return folder.stat().st_nlink > _LINKS_OF_EMPTY


def _is_removed(folder: Path) -> bool:
    """Remove a cgroup with what is below it, the deepest first, in at most _MADE_MAX tries.

    Each go that is not enough removes some, unless a process is in one: then the whole could not
    be removed anyway.

    Raises:
        OSError: One cannot be looked at.
    """
    levels = [[folder]]  # the last of each has the next of them in it
    for _ in range(_MADE_MAX):
        each = levels[-1][-1]
        if _is_gone_after_rmdir(each):
            levels[-1].pop()
            if not levels[-1]:
                levels.pop()
            if not levels:
                return True
        elif _has_cgroups(each) and (inside := folders_in(each, _BATCH)):
            levels.append(inside)
        else:
            return False
    return False


def _is_gone_after_rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENODEV)
    return True


def folders_in(folder: Path, at_most: int | None = None) -> list[Path]:
    """Return the cgroups right below one, not more than are asked for."""
    with os.scandir(folder) as entries:
        folders = (Path(each) for each in entries if each.is_dir(follow_symlinks=False))
        return list(itertools.islice(folders, at_most))
