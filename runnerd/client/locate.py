"""Where the daemon's socket and its token are, what it means when they cannot be had, the way."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, Final, Protocol

from runnerd.protocol.fields import TOKEN_CHARS_MAX

from .errors import ConnectFailed, TokenUnreadable

if TYPE_CHECKING:
    from typing import Self

_TOKEN_READ_BYTES: Final = TOKEN_CHARS_MAX + 3  # with a line's end
SOCKET_VARIABLE: Final = "RUNNERD_SOCKET"
TOKEN_VARIABLE: Final = "RUNNERD_TOKEN_FILE"  # noqa: S105 - names the file alone
SYSTEM_SOCKET: Final = "/run/runnerd/runnerd.sock"


class Way(Protocol):
    """How connections to a daemon are made, one after the other.

    Where that takes a process of our own (command.py), it ends once its connection is closed.
    """

    def reopen(self) -> socket.socket:
        """Make one more connection, not blocking, without waiting.

        Raises:
            FileNotFoundError: If nothing is there to connect to.
            ConnectionRefusedError: If nobody listens.
            OSError: If it cannot be had just now.
        """

    def turned_away(self) -> ConnectFailed | None:
        """Say why the first connection ended without a byte; None = it may be tried again."""

    def words(self) -> str:
        """Return what the last connection's maker had to say; empty = nothing."""

    def has_left(self) -> bool:
        """Whether nothing of ours is left of a connection that was closed."""

    def end(self) -> None:
        """Leave nothing of ours, whatever state it is in."""


class SocketWay:
    """The way by a Unix socket.

    Args:
        path: Absolute.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] | None, timeout_s: float
    ) -> tuple[socket.socket, Self]:
        """Make the first connection; see open_socket."""
        connection, found = open_socket(path, timeout_s)
        return connection, cls(found)

    def reopen(self) -> socket.socket:
        """Make one more."""
        return reopen_socket(self._path)

    def turned_away(self) -> None:
        """See Way: a daemon that ends a connection without a word may be about to stop."""

    def words(self) -> str:
        """See Way."""
        return ""

    def has_left(self) -> bool:
        """See Way."""
        return True

    def end(self) -> None:
        """See Way."""


def socket_paths() -> list[str]:
    """Return where a daemon's socket is looked for; the first that exists is taken."""
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return [named]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [SYSTEM_SOCKET, *([f"{runtime}/runnerd/runnerd.sock"] if runtime else [])]


def open_socket(path: str | os.PathLike[str] | None, timeout_s: float) -> tuple[socket.socket, str]:
    """Connect to the daemon's socket, and return the connection and the path it was found at.

    Args:
        path: The socket, or None for the first of socket_paths() that exists.
        timeout_s: The most to wait for the daemon to accept, in seconds.

    Raises:
        ConnectFailed: If no socket is there, nobody listens, or it may not be opened.
    """
    paths = socket_paths() if path is None else [os.fspath(path)]
    chosen = next((each for each in paths if os.path.lexists(each)), paths[-1])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(chosen)
    except OSError as error:
        connection.close()
        raise _connect_failed(error, chosen, paths) from error
    # Absolute: the next one is opened there too, wherever the program has gone meanwhile. Links
    # are left as they are: what a link leads to may change.
    return connection, os.path.abspath(chosen)  # noqa: PTH100


def find_token(token: str | None, path: str | os.PathLike[str] | None) -> str | None:
    """Return the token to say hello with, or None where none was given.

    Args:
        token: The token itself.
        path: The file that holds it, without its trailing newline; by default what
            $RUNNERD_TOKEN_FILE names.

    Raises:
        TokenUnreadable: If there is no token in the file, or it cannot be read.
    """
    if token is not None:
        return token
    named = os.fspath(path) if path is not None else os.environ.get(TOKEN_VARIABLE)
    if not named:
        return None
    try:
        with open(named, "rb") as file:  # noqa: PTH123 - pathlib would cost runnerctl its import
            held = file.read(_TOKEN_READ_BYTES).rstrip(b"\r\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TokenUnreadable(f"cannot read the token in '{named}': {reason}") from error
    if not held or len(held) > TOKEN_CHARS_MAX or not held.isascii():
        raise TokenUnreadable(f"there is no token in '{named}'")
    return held.decode("ascii")


def reopen_socket(path: str) -> socket.socket:
    """Connect once more, without waiting: to a Unix socket that takes it at once, or not at all.

    Raises:
        OSError: BlockingIOError where the daemon has more callers than it takes just now.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return True  # or was one


def _connect_failed(error: OSError, path: str, paths: list[str]) -> ConnectFailed:
    if not path or (isinstance(error, ConnectionRefusedError) and not _is_socket(path)):
        said = f"'{path}' is no socket" if path else "the path of the socket is empty"
        hint = f"name the socket that 'runnerd serve' made by --socket or {SOCKET_VARIABLE}"
        return ConnectFailed(said, paths=[path], hint=hint)
    if isinstance(error, FileNotFoundError):
        tried = " or ".join(f"'{each}'" for each in paths)
        hint = f"start it with 'runnerd serve', or name its socket by --socket or {SOCKET_VARIABLE}"
        return ConnectFailed(f"no runnerd socket at {tried}", paths=paths, hint=hint)
    if isinstance(error, ConnectionRefusedError):
        hint = "start it with 'runnerd serve', which replaces a stale socket"
        return ConnectFailed(f"no runnerd listens at '{path}'", paths=[path], hint=hint)
    reason = error.strerror.lower() if error.strerror else str(error)
    hint = "see whether runnerd runs, and whether it takes this connection"
    if isinstance(error, PermissionError):
        hint = "connect as the daemon's user, or see its --socket-mode and --socket-group"
    return ConnectFailed(f"cannot connect to '{path}': {reason}", paths=[path], hint=hint)
