"""The state directory: found or made, looked at for tricks, and held by a lock.

What outlives the daemon is in it: last-words.json, the journal, spooled output. The daemon works
without one, and says why it has none. Whoever can write it could make a restarted daemon answer
with lies, so a directory that others can write, or that is not ours, is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

DEFAULT: Final = "/var/lib/runnerd"
LOCK_NAME: Final = "lock"
_LOCK_WAIT_S: Final = 0.2
_LOCK_STEP_S: Final = 0.01
# A daemon that was killed while it started a shim is outlived by the lock for a moment: between
# fork and execve the child has the descriptor too.


class StateUnusableError(Exception):
    """A directory cannot be the state directory; says which and why."""


class StateDirectory:
    """A directory that is ours alone, as long as this process lives.

    Args:
        path: Where; made 0700 if only its last part is missing.

    Raises:
        StateUnusableError: Nothing was changed then, but for a missing directory, which is made.

    Attributes:
        path: Absolute.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(os.path.abspath(path))
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise StateUnusableError(f"cannot make '{self.path}': {error.strerror}") from error
        try:
            folder_fd = os.open(
                self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            what = "is a symbolic link" if self.path.is_symlink() else error.strerror
            raise StateUnusableError(f"cannot use '{self.path}': {what}") from error
        try:
            check_ours(self.path, os.fstat(folder_fd))
            self._lock_fd = self._lock(folder_fd)
        finally:
            os.close(folder_fd)

    def close(self) -> None:
        """Let another one have it."""
        os.close(self._lock_fd)

    def _lock(self, folder_fd: int) -> int:
        try:
            fd = os.open(
                LOCK_NAME,
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                0o600,
                dir_fd=folder_fd,
            )
        except OSError as error:
            raise StateUnusableError(f"cannot write '{self.path}': {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StateUnusableError(f"'{self.path / LOCK_NAME}' is no plain file")
        until_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < until_s:
                    time.sleep(_LOCK_STEP_S)
                    continue
                os.close(fd)
                raise StateUnusableError(f"another runnerd uses '{self.path}'") from error
            return fd


def find_state(asked: str | None) -> tuple[StateDirectory | None, str | None]:
    """Find or make the state directory, and lock it.

    Args:
        asked: --state-dir, or None for /var/lib/runnerd, else $XDG_STATE_HOME/runnerd.

    Returns:
        The directory and None, or None and why there is none.
    """
    reasons: list[str] = []
    for place in _places(asked):
        try:
            return StateDirectory(place), None
        except StateUnusableError as error:
            reasons.append(str(error))
    return None, "; ".join(reasons)


def find_read_only(asked: str | None) -> Path | None:
    """Find a state directory of ours that can only be read, where find_state has found none.

    Args:
        asked: As in find_state.
    """
    for place in map(Path, _places(asked)):
        with contextlib.suppress(OSError, StateUnusableError):
            status = place.lstat()
            check_ours(place, status)
            if stat.S_ISDIR(status.st_mode) and not os.access(place, os.W_OK, effective_ids=True):
                return place
    return None


def _places(asked: str | None) -> list[str]:
    if asked:
        return [asked]
    home = os.environ.get("XDG_STATE_HOME", "")
    # One that is no absolute path is to be ignored, XDG Base Directory Specification.
    return [DEFAULT, f"{home}/runnerd"] if home.startswith("/") else [DEFAULT]


def check_ours(path: Path, status: os.stat_result) -> None:
    """Refuse a directory that others can write, or that is not ours.

    Raises:
        StateUnusableError: Says which it is.
    """
    if status.st_uid != os.geteuid():
        raise StateUnusableError(
            f"'{path}' belongs to uid {status.st_uid}, not to us (uid {os.geteuid()})"
        )
    if status.st_mode & 0o022:
        raise StateUnusableError(
            f"'{path}' can be written by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod go-w it"
        )
