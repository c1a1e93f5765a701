"""What /proc says about processes, read in a way that survives what they do meanwhile.

A process that is gone is an answer. That we cannot look (no descriptor, no memory) is none: it is
raised, or a tree would be called empty because nobody could see it.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Final, NamedTuple

from .shortage import check_sight

_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_ANCESTORS_MAX: Final = 4096
_DELETED: Final = " (deleted)"  # a terminal's name is, once it has been hung up
_READ_BYTES: Final = 4096

ChildrenOf = Callable[[int], list[int]]


class Stat(NamedTuple):
    """Fields of /proc/PID/stat. Source: proc_pid_stat(5).

    Attributes:
        pid, command, ppid, pgrp, session: As there.
        state: As there, but S for a process whose first thread has ended while others run: the
            kernel shows that thread's Z.
        cpu_s: User and system CPU seconds.
        waited_cpu_s: Those of the children it has waited for.
        start_ticks: When it started, in clock ticks since boot; with the pid it names a process.
        rss_bytes: Its resident set.
    """

    pid: int
    command: str
    state: str
    ppid: int
    pgrp: int
    session: int
    cpu_s: float
    waited_cpu_s: float
    start_ticks: int
    rss_bytes: int


def read_stat(pid: int) -> Stat | None:
    """Return what /proc/PID/stat says, or None where there is no such process.

    Raises:
        OSError: If we cannot look.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            data = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError as error:
        check_sight(error)
        return None
    # The command may hold spaces and parentheses: the last one closes it.
    head, _, tail = data.rpartition(b") ")
    fields = tail.split()
    if len(fields) < 22:
        return None
    state = fields[0].decode("ascii", "replace")
    return Stat(
        pid=pid,
        command=head.partition(b" (")[2].decode("utf-8", "replace"),
        state="S" if state == "Z" and int(fields[17]) > 1 else state,
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _CLOCK_TICKS,
        waited_cpu_s=(int(fields[13]) + int(fields[14])) / _CLOCK_TICKS,
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def read_file(path: str) -> bytes:
    """Return what a file of the kernel's says, in no more calls than it takes.

    A file object makes seven, and has None for one that is interrupted.

    Raises:
        OSError: As the calls say.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while data := os.read(fd, _READ_BYTES):
            found += data
    finally:
        os.close(fd)
    return found


@functools.cache
def lists_children() -> bool:
    """Say whether the kernel lists a thread's children: only with CONFIG_PROC_CHILDREN."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.F_OK)


def look() -> ChildrenOf:
    """Return what tells a process's direct children, from all its threads; none where it is gone.

    The kernel's own lists, read when they are asked for. Where it has none, one look at everybody
    in /proc: as of now, so who looks at many processes does so with one of these.

    Source: proc_pid_task(5), `children`; the list may miss some while they are being forked, so
    who needs all of them asks until nothing new is found.

    Raises:
        OSError: If we cannot look; so does what is returned.
    """
    if lists_children():
        return _listed_children
    by_parent = _scan()
    return lambda pid: by_parent.get(pid, [])


def _scan() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError as error:
        check_sight(error)
        return found
    for name in names:
        stat = read_stat(int(name)) if name.isdigit() else None
        if stat is not None:
            found.setdefault(stat.ppid, []).append(stat.pid)
    return found


def children(pid: int) -> list[int]:
    """Return a process's direct children, see look().

    Raises:
        OSError: If we cannot look.
    """
    return look()(pid)


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError as error:
        check_sight(error)
        return found
    for thread in threads:
        try:
            listed = read_file(f"/proc/{pid}/task/{thread}/children")
            found += [int(word) for word in listed.split()]
        except OSError as error:
            check_sight(error)
    return found


def tree(root: int, children_of: ChildrenOf | None = None) -> list[Stat]:
    """Return every descendant of a process, without itself, parents before children.

    Args:
        root: The process.
        children_of: What look() returned, where more than one tree is looked at; None to look.

    Raises:
        OSError: If we cannot look.
    """
    children_of = look() if children_of is None else children_of
    found: list[Stat] = []
    queue, seen = list(children_of(root)), {root}
    for pid in queue:  # it grows meanwhile
        if pid in seen:
            continue
        seen.add(pid)
        stat = read_stat(pid)
        if stat is not None:
            found.append(stat)
            queue += children_of(pid)
    return found


class TreeUse(NamedTuple):
    """What a tree is and has used.

    Attributes:
        processes: How many live.
        cpu_s: CPU seconds of the living and of the dead that were waited for.
        is_whole: Whether that is all of it. Who ignores SIGCHLD waits for nobody: the time of its
            dead is in no account but its cgroup's.
    """

    processes: int
    cpu_s: float
    is_whole: bool


def tree_use(root: int) -> TreeUse | None:
    """Return the use of a process's descendants; its own, a shim's, is no part of the tree.

    Returns:
        None where the root is gone or we cannot look.
    """
    try:
        found, stat = tree(root), read_stat(root)
    except OSError:
        return None
    if stat is None:
        return None
    return TreeUse(
        processes=sum(each.state not in "ZX" for each in found),
        cpu_s=stat.waited_cpu_s + sum(each.cpu_s + each.waited_cpu_s for each in found),
        is_whole=not any(_ignores_children(each.pid) for each in found),
    )


def _ignores_children(pid: int) -> bool:
    """Whether a process has SIGCHLD ignored; True where that cannot be seen."""
    try:
        lines = read_file(f"/proc/{pid}/status").splitlines()
        mask = next(line for line in lines if line.startswith(b"SigIgn:")).split()[1]
    except FileNotFoundError:
        return False
    except (OSError, StopIteration):
        return True
    return bool(int(mask, 16) >> (signal.SIGCHLD - 1) & 1)


def descends_from(pid: int, ancestor: int) -> bool | None:
    """Say whether a process is `ancestor` or descends from it, by walking up its parents.

    Returns:
        None where the walk was cut by a process that went away.

    Raises:
        OSError: If we cannot look.
    """
    for _ in range(_ANCESTORS_MAX):
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
        stat = read_stat(pid)
        if stat is None:
            return None
        pid = stat.ppid
    return None


def command_name(pid: int) -> str | None:
    """Return a process's name, or None."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    return None if stat is None else stat.command


def holds_one_of(pid: int, links: set[str]) -> bool | None:
    """Say whether a process has one of these files open; None where that cannot be read.

    The kernel's own text for a descriptor is read, and the link is never followed: that would ask
    the file system behind it, which may never answer (a FUSE server that hangs, a dead NFS).

    Args:
        pid: The process.
        links: What its descriptors would show, as Streams.links says.
    """
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").removesuffix(_DELETED) in links:
                return True
        except OSError:
            continue
    return False
