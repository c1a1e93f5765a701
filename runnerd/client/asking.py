"""What both clients ask for that has one answer, written once for both.

Each request is a generator of steps. `blocking` and `asynchronous` make a client's method of it,
whose signature and docstring are the generator's.

A request whose fields cannot be right is refused here, by the daemon's own rules and with its own
error, before a byte is sent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, Final, Literal, ParamSpec, TypeVar

import msgspec

from runnerd.protocol.answers import (
    CancelAnswer,
    EnvAnswer,
    ExecInfo,
    ListAnswer,
    SignalAnswer,
    WriteAnswer,
)
from runnerd.protocol.daemon_answers import DaemonInfo, HealthAnswer, MetricsAnswer
from runnerd.protocol.daemon_requests import (
    DaemonDrain,
    DaemonHealth,
    DaemonInfoRequest,
    DaemonMetrics,
    DaemonStop,
    DaemonUndrain,
    EnvSet,
    Ping,
    SandboxActivity,
    SandboxClaim,
    SandboxPin,
)
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Exit
from runnerd.protocol.fields import Params
from runnerd.protocol.requests import (
    ExecCancel,
    ExecForget,
    ExecInspect,
    ExecList,
    ExecResize,
    ExecSignal,
    ExecWait,
)
from runnerd.protocol.sandbox_answers import ActivityAnswer, ClaimAnswer, PinAnswer

from .errors import ClientTimeout, RemoteError
from .requesting import CALL_TIMEOUT_S
from .steps import Ask, Steps, drive, drive_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping, Sequence

    from .feeding import StdinFeeder
    from .steps import AsyncCaller, Caller

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)

LIVE: Final[tuple[Literal["starting", "running", "draining", "lingering"], ...]] = (
    "starting",
    "running",
    "draining",
    "lingering",
)
_PAGE: Final = 1000  # execs in one answer of exec.list


def blocking(
    steps: Callable[Concatenate[Requests, P], Steps[T]],
) -> Callable[Concatenate[Caller, P], T]:
    """Make a blocking client's method of these steps."""

    @functools.wraps(steps)
    def method(self: Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return drive(self, steps(_REQUESTS, *args, **kwargs))

    return method


def asynchronous(
    steps: Callable[Concatenate[Requests, P], Steps[T]],
) -> Callable[Concatenate[AsyncCaller, P], Awaitable[T]]:
    """Make an async client's method of these steps."""

    @functools.wraps(steps)
    async def method(self: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await drive_async(self, steps(_REQUESTS, *args, **kwargs))

    return method


@contextlib.contextmanager
def _refused_here() -> Iterator[None]:
    """Turn a field out of its range into the error the daemon would answer with."""
    try:
        yield
    except RequestError as error:
        raise RemoteError.before_sending(error) from error


def _ask(
    method: str, params: Params, kind: type[A], timeout_s: float | None = CALL_TIMEOUT_S
) -> Steps[A]:
    answer = yield Ask(method, params, timeout_s)
    assert isinstance(answer, kind)
    return answer


def _tell(method: str, params: Params, timeout_s: float | None = CALL_TIMEOUT_S) -> Steps[None]:
    yield Ask(method, params, timeout_s)


class Requests:
    """The steps of each; `self` stands for the client, and is not looked at."""

    def wait(
        self,
        exec_id: str,
        *,
        until: Literal["exited", "closed"] = "exited",
        timeout_s: float | None = None,
    ) -> Steps[Exit]:
        """Wait for an exec's end; consumes nothing.

        Args:
            exec_id: The exec.
            until: exited = the command's own exit; closed = nothing of it is left.
            timeout_s: The most to wait, in seconds; None = as long as it takes.

        Raises:
            ClientTimeout: If it has not ended by then; nothing was changed.
            RemoteError: exec_unknown.
        """
        # The daemon keeps the time, so that no wait is left behind there; the client's own is a
        # second later and only for a daemon that does not answer.
        patience_s = None if timeout_s is None else max(timeout_s, 0.001)
        with _refused_here():
            params = ExecWait(exec_id=exec_id, until=until, timeout_s=patience_s)
        try:
            return (
                yield from _ask(
                    "exec.wait", params, Exit, None if patience_s is None else patience_s + 1
                )
            )
        except RemoteError as error:
            if error.kind == "wait_timeout":
                raise ClientTimeout(f"'{exec_id}' has not {until} after {timeout_s} s") from error
            raise

    def signal(
        self,
        exec_id: str,
        signal: str | int,
        *,
        to: Literal["command", "group", "tree"] = "command",
    ) -> Steps[SignalAnswer]:
        """Send one signal to an exec's command, its process group or its whole tree.

        Raises:
            RemoteError: exec_unknown; exec_ended; not_permitted.
            Ambiguous: If the connection was lost before the answer: it is never sent twice.
        """
        with _refused_here():
            params = ExecSignal(exec_id=exec_id, signal=signal, to=to)
        return (yield from _ask("exec.signal", params, SignalAnswer))

    def resize(self, exec_id: str, rows: int, cols: int) -> Steps[None]:
        """Tell an exec's terminal its new size, 1 to 65535 each.

        Raises:
            RemoteError: exec_unknown; exec_ended; invalid_params where it has no terminal.
        """
        with _refused_here():
            params = ExecResize(exec_id=exec_id, rows=rows, cols=cols)
        yield from _tell("exec.resize", params, None)

    def cancel(
        self,
        exec_id: str,
        *,
        grace_s: float | None = None,
        wait: bool = True,
        tombstone: bool = False,
        if_nonce: str | None = None,
    ) -> Steps[CancelAnswer]:
        """End an exec and everything it started, and tell what that took.

        Args:
            exec_id: The exec.
            grace_s: Seconds between TERM and KILL; the exec's own if None; 0 = KILL at once.
            wait: Return once all is gone or the survivors are known, not when ending began.
            tombstone: Of an id never seen, leave a mark that refuses a start arriving later.
            if_nonce: Act only on an exec that was started with this nonce.

        Raises:
            RemoteError: exec_unknown, without `tombstone`; not_owner.
        """
        with _refused_here():
            params = ExecCancel(
                exec_id=exec_id, grace_s=grace_s, wait=wait, tombstone=tombstone, if_nonce=if_nonce
            )
        timeout_s = None if wait else CALL_TIMEOUT_S
        return (yield from _ask("exec.cancel", params, CancelAnswer, timeout_s))

    def inspect(self, exec_id: str, *, usage: bool = False, tree: bool = False) -> Steps[ExecInfo]:
        """Describe an exec: everything but its environment.

        Raises:
            RemoteError: exec_unknown.
        """
        with _refused_here():
            params = ExecInspect(exec_id=exec_id, usage=usage, tree=tree)
        return (yield from _ask("exec.inspect", params, ExecInfo))

    def forget(self, exec_id: str) -> Steps[None]:
        """Let go of a finished exec's output and record; its id stays taken, its exit known.

        Raises:
            RemoteError: exec_unknown; exec_live, if it is not over.
        """
        yield from _tell("exec.forget", ExecForget(exec_id=exec_id))

    def list_execs(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        usage: bool = False,
        live_only: bool = False,
    ) -> Steps[list[ExecInfo]]:
        """List execs, in order of acceptance, over as many pages as it takes.

        Args:
            labels: Only those that carry all of these.
            usage: Whether to have each one's processes counted.
            live_only: Leave out those that are closed.
        """
        found: list[ExecInfo] = []
        cursor: int | None = None
        while True:
            with _refused_here():
                params = ExecList(
                    state=[*LIVE] if live_only else None,
                    labels=dict(labels or {}),
                    cursor=cursor,
                    limit=_PAGE,
                    usage=usage,
                )
            page = yield from _ask("exec.list", params, ListAnswer)
            found += page.execs
            cursor = page.next_cursor
            if cursor is None:
                return found

    def set_env(
        self, variables: Mapping[str, str] | None = None, *, unset: Sequence[str] = ()
    ) -> Steps[EnvAnswer]:
        """Set and unset variables of every exec started later in this incarnation.

        Args:
            variables: Name to value.
            unset: Names to take away.

        Raises:
            RemoteError: invalid_params, with nothing changed.
        """
        with _refused_here():
            params = EnvSet(set=dict(variables or {}), unset=list(unset))
        return (yield from _ask("env.set", params, EnvAnswer))

    def claim(
        self,
        owner: str,
        *,
        expect: Literal["unclaimed", "claimed", "any"],
        nonce: str | None = None,
    ) -> Steps[ClaimAnswer]:
        """Become the sandbox's owner; needs a client that was connected with a fence.

        Args:
            owner: Who claims it, for people and errors: 1 to 256 characters.
            expect: unclaimed for whoever creates the sandbox, claimed for whoever resumes it, any
                for neither. Of any number who create at once, exactly one succeeds.
            nonce: Marks this claim, so that it may be sent again; made here if None.

        Returns:
            The claim; `durable` says whether it outlives the daemon.

        Raises:
            RemoteError: already_claimed, not_claimed, fenced; nothing was changed.
        """
        with _refused_here():
            params = SandboxClaim(
                owner=owner, expect=expect, nonce=os.urandom(16).hex() if nonce is None else nonce
            )
        return (yield from _ask("sandbox.claim", params, ClaimAnswer))

    def pin(self, reason: str, *, ttl_s: float | None = None) -> Steps[PinAnswer]:
        """Keep the sandbox from counting as idle, also once this connection is gone.

        Args:
            reason: Why, for people; what the pin is known by. The same again sets it anew.
            ttl_s: Seconds until it ends by itself; None = it does not, but for the daemon's end.

        Raises:
            RemoteError: busy where there are too many.
        """
        with _refused_here():
            params = SandboxPin(reason=reason, ttl_s=ttl_s)
        return (yield from _ask("sandbox.pin", params, PinAnswer))

    def unpin(self, reason: str) -> Steps[PinAnswer]:
        """End a pin; `was_pinned` says whether there was one of that reason."""
        with _refused_here():
            params = SandboxPin(reason=reason, unpin=True)
        return (yield from _ask("sandbox.pin", params, PinAnswer))

    def activity(
        self, *, if_idle_for_s: float = 0.0, leftovers_count: bool = False
    ) -> Steps[ActivityAnswer]:
        """Say whether the sandbox is idle, since when, and why not.

        Args:
            if_idle_for_s: How many seconds without work make it idle.
            leftovers_count: Whether what a command left running keeps it from being idle.
        """
        with _refused_here():
            params = SandboxActivity(if_idle_for_s=if_idle_for_s, leftovers_count=leftovers_count)
        return (yield from _ask("sandbox.activity", params, ActivityAnswer))

    def ping(self) -> Steps[None]:
        """Return once the daemon has answered."""
        yield from _tell("ping", Ping(), None)

    def info(self) -> Steps[DaemonInfo]:
        """Describe the daemon."""
        return (yield from _ask("daemon.info", DaemonInfoRequest(), DaemonInfo))

    def health(self, timeout_s: float | None = CALL_TIMEOUT_S) -> Steps[HealthAnswer]:
        """Ask whether the daemon is well, and what works worse than it should.

        Args:
            timeout_s: The most to wait for the answer, in seconds.
        """
        return (yield from _ask("daemon.health", DaemonHealth(), HealthAnswer, timeout_s))

    def metrics(
        self,
        format: Literal["text", "openmetrics"] = "text",  # noqa: A002
    ) -> Steps[MetricsAnswer]:
        """Read the daemon's metrics."""
        return (yield from _ask("daemon.metrics", DaemonMetrics(format=format), MetricsAnswer))

    def drain(
        self, *, if_idle_for_s: float | None = None, leftovers_count: bool = False
    ) -> Steps[None]:
        """Let the daemon take no new work, until undrain().

        Args:
            if_idle_for_s: Only if the sandbox has been idle for so many seconds, looked at and
                drained in one step; 0 = idle now. None = in any case.
            leftovers_count: With it: whether what a command left running counts.

        Raises:
            RemoteError: busy where it is not idle, with the reasons in data.reasons.
        """
        with _refused_here():
            params = DaemonDrain(if_idle_for_s=if_idle_for_s, leftovers_count=leftovers_count)
        yield from _tell("daemon.drain", params, None)

    def undrain(self) -> Steps[None]:
        """Let the daemon take new work again."""
        yield from _tell("daemon.undrain", DaemonUndrain(), None)

    def stop(
        self, *, if_idle_for_s: float | None = None, leftovers_count: bool = False
    ) -> Steps[None]:
        """Stop the daemon; returns when it has begun to, every exec is then being ended.

        Args:
            if_idle_for_s: As in drain: only if idle, looked at and stopped in one step.
            leftovers_count: As in drain.

        Raises:
            RemoteError: busy where it is not idle, with the reasons in data.reasons.
        """
        with _refused_here():
            params = DaemonStop(if_idle_for_s=if_idle_for_s, leftovers_count=leftovers_count)
        yield from _tell("daemon.stop", params, None)


_REQUESTS: Final = Requests()


def write_steps(feeder: StdinFeeder, timeout_s: float | None) -> Steps[int]:
    """Feed what was offered to the feeder, waiting for room as a pipe does.

    Raises:
        RemoteError: stdin_closed, exec_ended.
        ClientTimeout: If there was no room for all of it in time; what was taken, was.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    size = feeder.waiting_bytes
    while True:
        # A wait of 0 is refused by the daemon, which takes it for a mistake.
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.001)
        request = feeder.next_write(left_s)
        if request is None:
            return feeder.accepted_bytes
        feeder.answered((yield from _ask("exec.write", request, WriteAnswer, None)))
        if feeder.waiting_bytes and deadline_s is not None and time.monotonic() >= deadline_s:
            raise ClientTimeout(
                f"{feeder.waiting_bytes} of {size} bytes found no room in stdin of "
                f"'{feeder.exec_id}'",
                hint="the command does not read its stdin, or nobody reads its output",
            )
