"""The socket: made in a safe place, by one daemon at a time, closed to others from the start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
from pathlib import Path
from typing import Final

PATH_BYTES_MAX: Final = 107  # sun_path has 108 bytes and its NUL, unix(7)
_BACKLOG: Final = 512


class SocketError(Exception):
    """The socket cannot be had; the daemon exits 73."""


class Listener:
    """The listening socket and the lock that makes it ours.

    Args:
        path: Where; made absolute, since the daemon does not stay in its start directory.
        mode: Its permission bits, in force before it has a name.
        owner: A user name or uid it is given to, or None.
        group: A group name or gid it is given to, or None.

    Raises:
        SocketError: With the reason and what would mend it. Nothing was changed then, but for a
            missing directory, which is made.
    """

    def __init__(
        self, path: str, *, mode: int = 0o600, owner: str | None = None, group: str | None = None
    ) -> None:
        if "\0" in path or path.startswith("@") or not path:
            raise SocketError(
                f"{path!r} is no path in the file system; abstract names have no owner"
            )
        self.path = os.path.abspath(path)
        size = len(os.fsencode(self.path))
        if size > PATH_BYTES_MAX:
            raise SocketError(
                f"socket path of {size} bytes; the most is {PATH_BYTES_MAX}: '{self.path}'"
            )
        self._check_directory()
        self._lock_path = f"{self.path}.lock"
        self._lock_fd = self._lock()
        try:
            self.socket = self._bind(mode, _uid(owner), _gid(group))
        except BaseException:
            self._unlock()
            raise
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)

    def _check_directory(self) -> None:
        folder = Path(self.path).parent
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise SocketError(
                f"cannot make directory '{folder}': {error.strerror}; make it, or say --socket PATH"
            ) from error
        try:
            status = folder.stat()
        except OSError as error:
            raise SocketError(f"cannot use directory '{folder}': {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise SocketError(f"'{folder}' is not a directory")
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise SocketError(
                f"directory '{folder}' can be written by others (mode "
                f"{stat.S_IMODE(status.st_mode):04o}): anyone could replace the socket; "
                "chmod go-w it, or choose another"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise SocketError(
                f"directory '{folder}' belongs to uid {status.st_uid}, neither to us nor to root"
            )

    def _lock(self) -> int:
        while True:
            try:
                fd = os.open(
                    self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                raise SocketError(
                    f"cannot make the lock '{self._lock_path}': {error.strerror}"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                raise SocketError(f"another runnerd serves '{self.path}'") from error
            # The one before us removes the file as it goes; a lock on a removed file is none.
            with contextlib.suppress(OSError):
                named, held = os.stat(self._lock_path, follow_symlinks=False), os.fstat(fd)
                if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                    return fd
            os.close(fd)

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._lock_path)
        os.close(self._lock_fd)

    def _bind(self, mode: int, uid: int, gid: int) -> socket.socket:
        self._remove_stale()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        is_bound = False
        try:
            # The mode of the socket itself is what bind(2) gives the file, less the umask: so it
            # is never, not even for a moment, wider than asked for.
            os.fchmod(listening.fileno(), mode)
            before = os.umask(0o777 & ~mode)
            try:
                listening.bind(self.path)
                is_bound = True
            finally:
                os.umask(before)
            if uid >= 0 or gid >= 0:
                os.chown(self.path, uid, gid, follow_symlinks=False)
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            if is_bound:
                os.unlink(self.path)
            raise SocketError(f"cannot bind '{self.path}': {error.strerror}") from error
        return listening

    def _remove_stale(self) -> None:
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise SocketError(f"cannot look at '{self.path}': {error.strerror}") from error
        if not stat.S_ISSOCK(status.st_mode):
            raise SocketError(f"'{self.path}' exists and is no socket; it is left alone")
        # We hold the lock, so no runnerd serves it; somebody else's server would answer.
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.settimeout(1)
            code = probe.connect_ex(self.path)
        finally:
            probe.close()
        if code not in (errno.ECONNREFUSED, errno.ENOENT):
            raise SocketError(f"'{self.path}' is served by another program; it is left alone")
        try:
            os.unlink(self.path)
        except OSError as error:
            raise SocketError(f"cannot remove stale '{self.path}': {error.strerror}") from error

    def close(self) -> None:
        """Stop listening and remove the socket file, if it is still ours, and the lock."""
        self.socket.close()
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
        self._unlock()


def _uid(owner: str | None) -> int:
    if owner is None:
        return -1
    try:
        return int(owner) if owner.isdigit() else pwd.getpwnam(owner).pw_uid
    except KeyError as error:
        raise SocketError(f"--socket-owner: there is no user '{owner}'") from error


def _gid(group: str | None) -> int:
    if group is None:
        return -1
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise SocketError(f"--socket-group: there is no group '{group}'") from error
