"""What both clients ask for that has one answer: arguments into requests.

A request whose fields cannot be right is refused here, by the daemon's own rules and with its own
error, before a byte is sent.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Literal

from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import (
    EnvSet,
    ExecCancel,
    ExecInspect,
    ExecList,
    ExecResize,
    ExecSignal,
    ExecWait,
)

from .errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LIVE: Final[tuple[Literal["starting", "running", "draining", "lingering"], ...]] = (
    "starting",
    "running",
    "draining",
    "lingering",
)
_PAGE: Final = 1000  # execs in one answer of exec.list


@contextlib.contextmanager
def _refused_here() -> Iterator[None]:
    """Turn a field out of its range into the error the daemon would answer with."""
    try:
        yield
    except RequestError as error:
        raise RemoteError.before_sending(error) from error


def wait_request(
    exec_id: str, until: Literal["exited", "closed"], timeout_s: float | None
) -> tuple[ExecWait, float | None]:
    """Make a wait, and say for how long its answer is waited for, in seconds.

    The daemon keeps the time, so that no wait is left behind there; the client's own is a second
    later and only for a daemon that does not answer.
    """
    patience_s = None if timeout_s is None else max(timeout_s, 0.001)
    with _refused_here():
        params = ExecWait(exec_id=exec_id, until=until, timeout_s=patience_s)
    return params, None if patience_s is None else patience_s + 1


def signal_request(
    exec_id: str, signal: str | int, to: Literal["command", "group", "tree"]
) -> ExecSignal:
    """Make a signal.

    Raises:
        RemoteError: invalid_params, naming the field.
    """
    with _refused_here():
        return ExecSignal(exec_id=exec_id, signal=signal, to=to)


def resize_request(exec_id: str, rows: int, cols: int) -> ExecResize:
    """Make a resize.

    Raises:
        RemoteError: invalid_params, naming the field.
    """
    with _refused_here():
        return ExecResize(exec_id=exec_id, rows=rows, cols=cols)


def cancel_request(
    exec_id: str, *, grace_s: float | None, wait: bool, tombstone: bool, if_nonce: str | None
) -> ExecCancel:
    """Make a cancel.

    Raises:
        RemoteError: invalid_params, naming the field.
    """
    with _refused_here():
        return ExecCancel(
            exec_id=exec_id, grace_s=grace_s, wait=wait, tombstone=tombstone, if_nonce=if_nonce
        )


def inspect_request(exec_id: str, *, usage: bool, tree: bool) -> ExecInspect:
    """Make an inspect."""
    with _refused_here():
        return ExecInspect(exec_id=exec_id, usage=usage, tree=tree)


def list_request(
    cursor: int | None, labels: Mapping[str, str] | None, *, usage: bool, live_only: bool
) -> ExecList:
    """Make a request for one page of a list."""
    with _refused_here():
        return ExecList(
            state=[*LIVE] if live_only else None,
            labels=dict(labels or {}),
            cursor=cursor,
            limit=_PAGE,
            usage=usage,
        )


def env_request(variables: Mapping[str, str] | None, unset: Sequence[str]) -> EnvSet:
    """Make a change of the environment.

    Raises:
        RemoteError: invalid_params, naming the variable.
    """
    with _refused_here():
        return EnvSet(set=dict(variables or {}), unset=list(unset))
