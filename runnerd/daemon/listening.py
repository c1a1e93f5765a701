"""The socket: made in a safe place, by one daemon at a time, closed to others from the start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import secrets
import socket
import stat
from typing import Final

PATH_BYTES_MAX: Final = 107  # sun_path has 108 bytes and its NUL, unix(7)
_BACKLOG: Final = 512
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


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
        self._folder, self._name = os.path.split(self.path)
        self._mode, self._uid, self._gid = mode, _uid(owner), _gid(group)
        self._above: tuple[int, int] | None = None
        self._folder_fd, _ = self._open_folder(os.O_PATH)
        try:
            # A link that comes later is no place of ours, unless it was one from the start.
            self._nofollow = 0 if os.path.islink(self._folder) else os.O_NOFOLLOW
            self._lock_fd = self._lock(self._folder_fd)
            try:
                self._remove_stale()
                self.socket, self._identity = self._bind(self.path)
            except BaseException:
                self._unlock()
                raise
        except BaseException:
            os.close(self._folder_fd)
            raise

    def bind_again_if_gone(self) -> socket.socket | None:
        """Bind again where the socket's file is gone: with the same gates, mode, owner and lock.

        Another's file in its place is left alone, and so is a directory that is not the one we
        began in, unless it is new and empty.

        Returns:
            The new socket, or None where the file is there. The one before is the caller's to
            close: somebody may be waiting at it.

        Raises:
            SocketError: Why nobody new can reach us; nothing was changed then, but for a missing
                directory, which is made.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                found = _identity(os.lstat(self.path))
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError as error:
                raise SocketError(f"cannot look at '{self.path}': {error.strerror}") from error
            if found == self._identity:
                return None
            raise SocketError(f"'{self.path}' has been replaced by another's; it is left alone")
        folder_fd, is_made = self._open_folder(self._nofollow)
        try:
            if not is_made and _identity(os.fstat(folder_fd)) != _identity(
                os.fstat(self._folder_fd)
            ):
                self._check_empty(folder_fd)
            self._keep_lock(folder_fd)
            # Through the descriptor, so that no swap of a directory can lead us elsewhere.
            through = f"/proc/self/fd/{folder_fd}/{self._name}"
            self.socket, self._identity = self._bind(through)
        except BaseException:
            os.close(folder_fd)
            raise
        os.close(self._folder_fd)
        self._folder_fd = folder_fd
        return self.socket

    def _check_empty(self, folder_fd: int) -> None:
        try:
            names = os.listdir(f"/proc/self/fd/{folder_fd}")
        except OSError as error:
            raise SocketError(f"cannot look at '{self._folder}': {error.strerror}") from error
        if names:
            raise SocketError(f"directory '{self._folder}' is another one, and not empty")

    def _open_folder(self, more_flags: int) -> tuple[int, bool]:
        """Open the socket's directory, or make it; returns it and whether it was made.

        Raises:
            SocketError: If it cannot be had, or others could replace the socket in it.
        """
        folder = self._folder
        try:
            is_made = self._make_folder()
        except OSError as error:
            raise SocketError(
                f"cannot make directory '{folder}': {error.strerror}; make it, or say --socket PATH"
            ) from error
        try:
            fd = os.open(folder, _DIRECTORY | more_flags)
        except NotADirectoryError as error:
            raise SocketError(f"'{folder}' is not a directory") from error
        except OSError as error:
            raise SocketError(f"cannot use directory '{folder}': {error.strerror}") from error
        try:
            self._check_folder(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd, is_made

    def _make_folder(self) -> bool:
        """Make the directory, if it is missing; returns whether it was made.

        Raises:
            OSError: If it cannot be made; ESTALE where what is above it is not what it was.
        """
        above_fd = os.open(os.path.dirname(self._folder), _DIRECTORY)
        try:
            above = _identity(os.fstat(above_fd))
            self._above = self._above or above
            if os.path.lexists(self._folder):
                return False
            if above != self._above:
                raise OSError(errno.ESTALE, "what is above it is another directory than before")
            os.mkdir(os.path.basename(self._folder), 0o700, dir_fd=above_fd)
        except FileExistsError:
            return False
        finally:
            os.close(above_fd)
        return True

    def _check_folder(self, status: os.stat_result) -> None:
        folder = self._folder
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

    def _lock(self, folder_fd: int) -> int:
        name = f"{self._name}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
            except OSError as error:
                raise SocketError(
                    f"cannot make the lock '{self.path}.lock': {error.strerror}"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                raise SocketError(f"another runnerd serves '{self.path}'") from error
            # The one before us removes the file as it goes; a lock on a removed file is none.
            with contextlib.suppress(OSError):
                if self._is_named(fd, folder_fd):
                    return fd
            os.close(fd)

    def _is_named(self, lock_fd: int, folder_fd: int) -> bool:
        named = os.stat(f"{self._name}.lock", dir_fd=folder_fd, follow_symlinks=False)
        return _identity(named) == _identity(os.fstat(lock_fd))

    def _keep_lock(self, folder_fd: int) -> None:
        """Hold the lock in this directory: the same, or a new one where that was removed too."""
        with contextlib.suppress(OSError):
            if self._is_named(self._lock_fd, folder_fd):
                return
        lock_fd = self._lock(folder_fd)
        os.close(self._lock_fd)
        self._lock_fd = lock_fd

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_named(self._lock_fd, self._folder_fd):
                os.unlink(f"{self._name}.lock", dir_fd=self._folder_fd)
        os.close(self._lock_fd)

    def _bind(self, path: str) -> tuple[socket.socket, tuple[int, int]]:
        """Bind at a path that leads to ours; returns the socket, and what its file is."""
        mode, uid, gid = self._mode, self._uid, self._gid
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise SocketError(f"cannot make a socket: {error.strerror}") from error
        is_bound = False
        try:
            # The mode of the socket itself is what bind(2) gives the file, less the umask: so it
            # is never, not even for a moment, wider than asked for.
            os.fchmod(listening.fileno(), mode)
            before = os.umask(0o777 & ~mode)
            try:
                _bind_at(listening, path)
                is_bound = True
            finally:
                os.umask(before)
            if uid >= 0 or gid >= 0:
                os.chown(path, uid, gid, follow_symlinks=False)
            listening.listen(_BACKLOG)
            return listening, _identity(os.lstat(path))
        except OSError as error:
            listening.close()
            if is_bound:
                os.unlink(path)
            raise SocketError(f"cannot bind '{self.path}': {error.strerror}") from error

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
            status = os.stat(self._name, dir_fd=self._folder_fd, follow_symlinks=False)
            if _identity(status) == self._identity:
                os.unlink(self._name, dir_fd=self._folder_fd)
        self._unlock()
        os.close(self._folder_fd)


def _bind_at(listening: socket.socket, path: str) -> None:
    """Bind at a path, also at one that bind(2) has no room for: through a descriptor it is longer.

    Raises:
        OSError: As the calls say. Nothing is at the path then that was not there before.
    """
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:
        listening.bind(path)
        return
    beside = f"{os.path.dirname(path)}/.{secrets.token_hex(4)}"
    listening.bind(beside)
    try:
        os.link(beside, path)  # a rename would replace what another put there
    finally:
        os.unlink(beside)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


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
