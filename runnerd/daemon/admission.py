"""How much of the memory limit is in use, read so cheaply that every start can ask.

The files are opened once, at boot, and read again at most every 0.1 s; memory.stat, which costs
ten times the others, only where the cheap figure alone would refuse: the working set is never
more than what is charged. All cgroups up to the highest that we see are looked at, since a limit
above ours is as deadly.

Source: cgroup v2: memory.current, memory.max, memory.stat; v1: memory.usage_in_bytes,
memory.limit_in_bytes, memory.stat with total_inactive_file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from runnerd.core.admission import MemoryUse
from runnerd.protocol.daemon_answers import MemoryAdmission

from .memory import V1_UNLIMITED, Cgroup

_FRESH_S: Final = 0.1
_LEVELS_MAX: Final = 8  # three descriptors each; the nearest ones, where there are more
_STAT_BYTES_MAX: Final = 16 * 1024  # about 1.5 KiB today


class _Names(NamedTuple):
    usage: str
    limit: str
    inactive: bytes


_NAMES: Final = {
    1: _Names("memory.usage_in_bytes", "memory.limit_in_bytes", b"total_inactive_file"),
    2: _Names("memory.current", "memory.max", b"inactive_file"),
}


class _Level:
    """One cgroup's files, kept open.

    Raises:
        OSError: If it has not got them: the root has none.
    """

    def __init__(self, folder: Path, names: _Names) -> None:
        self._inactive = names.inactive
        self._fds: list[int] = []
        try:
            for name in (names.limit, names.usage, "memory.stat"):
                self._fds.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            for fd in self._fds:
                os.close(fd)
            raise

    def use(self, enough_percent: int) -> MemoryUse | None:
        """Return what is in use; None without a limit, or where the cgroup has gone.

        Args:
            enough_percent: Where all that is charged is no more than this of the limit, that is
                returned, and memory.stat not read.
        """
        limit_fd, usage_fd, stat_fd = self._fds
        limit_text = os.pread(limit_fd, 64, 0).strip()
        if not limit_text.isdigit() or (limit := int(limit_text)) >= V1_UNLIMITED:
            return None
        charged = int(os.pread(usage_fd, 64, 0))
        if charged * 100 <= enough_percent * limit:
            return MemoryUse(charged, limit)
        return MemoryUse(max(0, charged - self._inactive_bytes(stat_fd)), limit)

    def _inactive_bytes(self, stat_fd: int) -> int:
        for line in os.pread(stat_fd, _STAT_BYTES_MAX, 0).splitlines():
            name, _, count = line.partition(b" ")
            if name == self._inactive and count.isdigit():
                return int(count)
        return 0


class MemoryGauge:
    """Says what is in use of the limit that is nearest.

    Args:
        cgroup: The daemon's, as memory.find_cgroup returns it.
        percent_max: The share from which on starts are refused, 0-100; 0 = nothing is read.
    """

    def __init__(self, cgroup: Cgroup, percent_max: int) -> None:
        self._percent_max = percent_max
        self._levels: list[_Level] = []
        self._known: MemoryUse | None = None
        self._read_s = -_FRESH_S
        if cgroup.version is not None and cgroup.folder is not None and percent_max:
            self._open(cgroup.folder, _NAMES[cgroup.version])

    def _open(self, folder: Path, names: _Names) -> None:
        with contextlib.suppress(OSError):
            for each in [folder, *folder.parents][:_LEVELS_MAX]:
                self._levels.append(_Level(each, names))

    def use(self, now_s: float) -> MemoryUse | None:
        """Return what is in use, at most 0.1 s old; None where there is no limit to be seen."""
        if now_s - self._read_s >= _FRESH_S:
            self._read_s = now_s
            self._known = self._read(self._percent_max)
        return self._known

    def _read(self, enough_percent: int) -> MemoryUse | None:
        found: list[MemoryUse] = []
        for level in self._levels:
            with contextlib.suppress(OSError, ValueError):
                use = level.use(enough_percent)
                if use is not None:
                    found.append(use)
        return max(found, default=None, key=_share)

    def info(self) -> MemoryAdmission:
        """Describe it, with the true working set."""
        use = self._read(0)
        reason = None
        if not self._percent_max:
            reason = "it is off: --admit-memory-percent 0"
        elif not self._levels:
            reason = "no memory cgroup can be read"
        elif use is None:
            reason = "the memory cgroup has no limit"
        return MemoryAdmission(
            percent_max=self._percent_max,
            working_set_bytes=None if use is None else use.working_set_bytes,
            limit_bytes=None if use is None else use.limit_bytes,
            reason=reason,
        )


def _share(use: MemoryUse) -> float:
    return use.working_set_bytes / max(1, use.limit_bytes)
