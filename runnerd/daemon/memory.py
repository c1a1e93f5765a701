"""Whose turn it is when memory runs out: the cgroup's limit and counter, and the OOM order.

The kernel kills the process with the highest badness: resident set + swap + page tables +
oom_score_adj/1000 x limit. So a gap of 400 points protects a daemon only while it is smaller
than the command plus 0.4 x limit, and only if the kernel chooses one process at all.

Source: proc_pid_oom_score_adj(5); cgroup v2: memory.max, memory.events, memory.oom.group;
v1: memory.limit_in_bytes, memory.oom_control. v1 and v2 are told apart by which file exists: in
a container without a cgroup namespace /proc/self/cgroup names a path of the host's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, Literal, NamedTuple

from runnerd.protocol.daemon_answers import OomOrder

from .linux import CAP_SYS_RESOURCE, has_capability

COMMAND_SCORE: Final = 900
_SCORE_MIN: Final = -1000
V1_UNLIMITED: Final = 2**62  # v1 shows "no limit" as the largest multiple of a page
_OWN_SCORE: Final = Path("/proc/self/oom_score_adj")


class Cgroup(NamedTuple):
    """The memory cgroup the daemon sees.

    Attributes:
        version: 1, 2, or None where none can be read.
        folder: Where its files are.
    """

    version: Literal[1, 2] | None
    folder: Path | None

    def read(self, name: str) -> str | None:
        """Return a file's text, or None."""
        if self.folder is None:
            return None
        try:
            return (self.folder / name).read_text().strip()
        except OSError:
            return None

    def read_upwards(self, name: str) -> list[str]:
        """Return a file's texts here and, of v2, in each cgroup above that we see.

        What holds for a cgroup holds for all below it; its root has no such files.
        """
        here = self.read(name)
        if here is None or self.folder is None or self.version != 2:
            return [] if here is None else [here]
        return [here, *Cgroup(2, self.folder.parent).read_upwards(name)]

    def limit_bytes(self) -> int | None:
        """Return the tightest memory limit, or None for none."""
        texts = self.read_upwards("memory.max" if self.version == 2 else "memory.limit_in_bytes")
        limits = [int(text) for text in texts if text.isdigit()]
        return min((each for each in limits if each < V1_UNLIMITED), default=None)


def find_cgroup(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Cgroup:
    """Find the daemon's memory cgroup.

    Args:
        root: Where cgroups are mounted.
        own: The file that names our own path.
    """
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(",") or [""]:
                paths[controller] = path.lstrip("/")
    for version, base, path, probe in (
        (1, root / "memory", paths.get("memory", ""), "memory.oom_control"),
        (2, root, paths.get("", ""), "memory.events"),
        (2, root / "unified", paths.get("", ""), "memory.events"),
    ):
        # In a container the mount's root is our own cgroup, whatever path the file names.
        for folder in (base / path, base):
            if (folder / probe).exists():
                return Cgroup(1 if version == 1 else 2, folder)
    return Cgroup(None, None)


class OomCounter:
    """The cgroup's count of OOM kills; its file is kept open, so a read costs one call."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._fd: int | None = None
        if cgroup.folder is not None:
            name = "memory.events" if cgroup.version == 2 else "memory.oom_control"
            with contextlib.suppress(OSError):
                self._fd = os.open(cgroup.folder / name, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int | None:
        """Return the kills so far, or None where they cannot be read."""
        if self._fd is None:
            return None
        try:
            text = os.pread(self._fd, 4096, 0)
        except OSError:
            return None
        for line in text.splitlines():
            name, _, count = line.partition(b" ")
            if name == b"oom_kill" and count.isdigit():
                return int(count)
        return None


def own_score() -> int | None:
    """Return this process's oom_score_adj."""
    try:
        return int(_OWN_SCORE.read_text())
    except (OSError, ValueError):
        return None


def lower_own_score() -> bool:
    """Lower our own score as far as the kernel lets us; returns whether it went down.

    Without CAP_SYS_RESOURCE the floor is what a privileged process last set, and no file names
    it, so it is searched for.
    """
    before = own_score()
    if before is None:
        return False
    low, high = _SCORE_MIN, before
    while low < high:
        middle = (low + high) // 2
        try:
            _OWN_SCORE.write_text(str(middle))
            high = middle
        except OSError:
            low = middle + 1
    return high < before


def oom_order(cgroup: Cgroup, *, lowered: bool) -> OomOrder:
    """Say which protection is real here, with warnings for an operator."""
    score, limit = own_score(), cgroup.limit_bytes()
    room = None if score is None else COMMAND_SCORE - score
    groups = cgroup.read_upwards("memory.oom.group") if cgroup.version == 2 else []
    high = cgroup.read("memory.high") if cgroup.version == 2 else None
    warnings: list[str] = []
    verdict: Literal["protected", "equal", "group_kill", "unlimited", "unknown"] = "protected"
    if "1" in groups:
        verdict = "group_kill"
        warnings.append(
            "memory.oom.group is 1, of our cgroup or one above: at the limit the kernel kills all "
            "processes here, whatever the scores"
        )
    elif room is None:
        verdict = "unknown"
    elif room <= 0:
        verdict = "equal"
        warnings.append(
            f"the daemon's oom_score_adj is {score}: nothing can be ranked above it, so at the "
            "limit the kernel may kill the daemon first (a BestEffort pod has 1000)"
        )
    elif limit is None:
        verdict = "unlimited"
    capable = has_capability(CAP_SYS_RESOURCE)
    return OomOrder(
        own_score=score,
        command_score=COMMAND_SCORE,
        room=room,
        lowered=lowered,
        cap_sys_resource=capable,
        cgroup_version=cgroup.version,
        limit_bytes=limit,
        high_bytes=int(high) if high is not None and high.isdigit() else None,
        group_kill="1" in groups if groups else None,
        protects_up_to_bytes=None if room is None or limit is None else limit * room // 1000,
        verdict=verdict,
        warnings=warnings,
    )
