"""Who may talk to the daemon: the peer's user, and where its process comes from.

Gate 1: the peer's uid is ours, root's, or allowed by --allow-uid. A user who has no uid in our user
namespace is shown as the overflow uid, which says nothing of who it is: one from beyond our pid
namespace too is let in by --allow-uid overflow alone, which needs a token (tokens.py, gate 3).
Gate 2: the peer does not descend from runnerd: that is what a hostile command would be. Asked
under the peer's pidfd, alive before and after, so that the pid cannot have changed hands in
between; a peer already gone is refused, since a command can hand its socket to a child and leave.
Before Linux 6.5 the pidfd is had by the peer's number, which may be another's by then.
Only pid 0, a peer beyond our pid namespace, counts as outside without a look.

Source: unix(7), SO_PEERCRED; SO_PEERPIDFD since Linux 6.5; user_namespaces(7), "Unmapped user
and group IDs".
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from runnerd.protocol.errors import RequestError

from .linux import SO_PEERPIDFD
from .procfs import Stat, descends_from, read_stat
from .shortage import check_sight
from .signalling import open_pidfd

_CRED: Final = struct.Struct("iII")
_NO_SUCH_OPTION: Final = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP})
_EVERY_UID: Final = 2**32 - 1  # what the first user namespace maps: nobody is beyond it


class Peer(NamedTuple):
    """Who is at the other end; pid 0 = beyond our pid namespace."""

    pid: int
    uid: int
    gid: int


class Allowed(NamedTuple):
    """Whom gate 1 lets in besides our own user and root.

    Attributes:
        uids: By uid.
        overflow: Whether also peers from beyond our user and pid namespaces.
        overflow_uid: What those are shown as; None where nobody can be beyond.
    """

    uids: frozenset[int] = frozenset()
    overflow: bool = False
    overflow_uid: int | None = None


def find_overflow_uid() -> int | None:
    """Return the uid that stands for every user without one here, None where all have one."""
    try:
        mapped = sum(
            int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()
        )
        if mapped >= _EVERY_UID:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return 65534  # DEFAULT_OVERFLOWUID, include/linux/highuid.h


def peer_of(sock: socket.socket) -> Peer:
    """Return the credentials the kernel recorded at connect(2)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size)
    return Peer(*_CRED.unpack(raw))


def _check_uid(peer: Peer, allowed: Allowed) -> None:
    if peer.uid == allowed.overflow_uid:
        if peer.pid == 0 and allowed.overflow:
            return
        # From beyond the pid namespace too, it is nobody whom a number could name: not even ours.
        if peer.pid == 0:
            raise RequestError(
                "unauthorized",
                f"uid {peer.uid} is a user beyond our user namespace: --allow-uid overflow lets "
                "it in, with a token",
            )
    if peer.uid not in {0, os.geteuid()} and peer.uid not in allowed.uids:
        raise RequestError("unauthorized", f"uid {peer.uid} is not allowed")


def check_peer(sock: socket.socket, peer: Peer, allowed: Allowed) -> None:
    """Let a peer in, or say why not.

    Raises:
        RequestError: unauthorized, peer_gone or peer_refused.
        OSError: If we cannot look.
    """
    _check_uid(peer, allowed)
    if peer.pid == 0:
        return
    pidfd = _peer_pidfd(sock, peer)
    try:
        before = read_stat(peer.pid)
        if not _is_alive(pidfd, before):
            raise _gone(peer)
        descends = descends_from(peer.pid, os.getpid())
        after = read_stat(peer.pid)
        if not _is_alive(pidfd, after) or descends is None or not _same(before, after):
            raise _gone(peer)
        if descends and peer.pid != os.getpid():
            raise RequestError(
                "peer_refused",
                f"process {peer.pid} was started by runnerd: commands may not connect",
            )
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _peer_pidfd(sock: socket.socket, peer: Peer) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        check_sight(error)
        # Anything else is said of a peer already reaped (EINVAL on Linux 6.5):
        # its number may be that of somebody else by now, who would be let in.
        if error.errno not in _NO_SUCH_OPTION:
            raise _gone(peer) from error
    try:
        return open_pidfd(peer.pid)
    except OSError as error:
        check_sight(error)
        raise _gone(peer) from error


def _is_alive(pidfd: int | None, stat: Stat | None) -> bool:
    if stat is None or stat.state in "ZX":
        return False
    if pidfd is None:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)  # a pidfd is readable once its process has ended, pidfd_open(2)


def _same(before: Stat | None, after: Stat | None) -> bool:
    # Without a pidfd the start time stands for it.
    return before is not None and after is not None and before.start_ticks == after.start_ticks


def _gone(peer: Peer) -> RequestError:
    return RequestError("peer_gone", f"process {peer.pid} ended before it could be looked at")
