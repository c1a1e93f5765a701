"""The async client's requests that have one answer and open nothing.

Each is one call(); requests.py has the same for the blocking client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from runnerd.protocol.answers import (
    CancelAnswer,
    DaemonInfo,
    EnvAnswer,
    ExecInfo,
    Exit,
    ListAnswer,
    MetricsAnswer,
    SignalAnswer,
)
from runnerd.protocol.requests import (
    DaemonDrain,
    DaemonInfoRequest,
    DaemonMetrics,
    DaemonStop,
    DaemonUndrain,
    ExecForget,
    Params,
    Ping,
)

from .asking import (
    cancel_request,
    env_request,
    inspect_request,
    list_request,
    resize_request,
    signal_request,
    wait_request,
)
from .errors import ClientTimeout, RemoteError
from .requesting import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T", bound=msgspec.Struct)


class AsyncRequests:
    """What is asked of the daemon and answered once; a base of AsyncClient."""

    async def call(
        self, method: str, params: Params, *, timeout_s: float | None = None
    ) -> msgspec.Struct:
        """Make one request and wait for its answer; see AsyncClient.call."""
        raise NotImplementedError

    async def wait(
        self,
        exec_id: str,
        *,
        until: Literal["exited", "closed"] = "exited",
        timeout_s: float | None = None,
    ) -> Exit:
        """Wait for an exec's end; consumes nothing.

        Args:
            exec_id: The exec.
            until: exited = the command's own exit; closed = nothing of it is left.
            timeout_s: The most to wait, in seconds; None = as long as it takes.

        Raises:
            ClientTimeout: If it has not ended by then; nothing was changed.
            RemoteError: exec_unknown.
        """
        params, call_s = wait_request(exec_id, until, timeout_s)
        try:
            return await self._ask("exec.wait", params, Exit, call_s)
        except RemoteError as error:
            if error.kind == "wait_timeout":
                raise ClientTimeout(f"'{exec_id}' has not {until} after {timeout_s} s") from error
            raise

    async def signal(
        self,
        exec_id: str,
        signal: str | int,
        *,
        to: Literal["command", "group", "tree"] = "command",
    ) -> SignalAnswer:
        """Send one signal to an exec's command, its process group or its whole tree.

        Raises:
            RemoteError: exec_unknown; exec_ended; not_permitted.
            Ambiguous: If the connection was lost before the answer: it is never sent twice.
        """
        return await self._ask("exec.signal", signal_request(exec_id, signal, to), SignalAnswer)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Tell an exec's terminal its new size, 1 to 65535 each.

        Raises:
            RemoteError: exec_unknown; exec_ended; invalid_params where it has no terminal.
        """
        await self.call("exec.resize", resize_request(exec_id, rows, cols))

    async def cancel(
        self,
        exec_id: str,
        *,
        grace_s: float | None = None,
        wait: bool = True,
        tombstone: bool = False,
        if_nonce: str | None = None,
    ) -> CancelAnswer:
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
        params = cancel_request(
            exec_id, grace_s=grace_s, wait=wait, tombstone=tombstone, if_nonce=if_nonce
        )
        return await self._ask(
            "exec.cancel", params, CancelAnswer, None if wait else CALL_TIMEOUT_S
        )

    async def inspect(self, exec_id: str, *, usage: bool = False, tree: bool = False) -> ExecInfo:
        """Describe an exec: everything but its environment.

        Raises:
            RemoteError: exec_unknown.
        """
        return await self._ask(
            "exec.inspect", inspect_request(exec_id, usage=usage, tree=tree), ExecInfo
        )

    async def forget(self, exec_id: str) -> None:
        """Let go of a finished exec's output and record; its id stays taken, its exit known.

        Raises:
            RemoteError: exec_unknown; exec_live, if it is not over.
        """
        await self.call("exec.forget", ExecForget(exec_id=exec_id), timeout_s=CALL_TIMEOUT_S)

    async def list_execs(
        self,
        *,
        labels: dict[str, str] | None = None,
        usage: bool = False,
        live_only: bool = False,
    ) -> list[ExecInfo]:
        """List execs, in order of acceptance, over as many pages as it takes.

        Args:
            labels: Only those that carry all of these.
            usage: Whether to have each one's processes counted.
            live_only: Leave out those that are closed.
        """
        found: list[ExecInfo] = []
        cursor: int | None = None
        while True:
            params = list_request(cursor, labels, usage=usage, live_only=live_only)
            page = await self._ask("exec.list", params, ListAnswer)
            found += page.execs
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def set_env(
        self, variables: Mapping[str, str] | None = None, *, unset: Sequence[str] = ()
    ) -> EnvAnswer:
        """Set and unset variables of every exec started later in this incarnation.

        Args:
            variables: Name to value.
            unset: Names to take away.

        Raises:
            RemoteError: invalid_params, with nothing changed.
        """
        return await self._ask("env.set", env_request(variables, unset), EnvAnswer)

    async def ping(self) -> None:
        """Return once the daemon has answered."""
        await self.call("ping", Ping())

    async def info(self) -> DaemonInfo:
        """Describe the daemon."""
        return await self._ask("daemon.info", DaemonInfoRequest(), DaemonInfo)

    async def metrics(self, format: Literal["text", "openmetrics"] = "text") -> MetricsAnswer:  # noqa: A002
        """Read the daemon's metrics."""
        return await self._ask("daemon.metrics", DaemonMetrics(format=format), MetricsAnswer)

    async def drain(self) -> None:
        """Let the daemon take no new work, until undrain()."""
        await self.call("daemon.drain", DaemonDrain())

    async def undrain(self) -> None:
        """Let the daemon take new work again."""
        await self.call("daemon.undrain", DaemonUndrain())

    async def stop(self) -> None:
        """Stop the daemon; returns when it has begun to, every exec is then being ended."""
        await self.call("daemon.stop", DaemonStop())

    async def _ask(
        self,
        method: str,
        params: Params,
        kind: type[T],
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> T:
        answer = await self.call(method, params, timeout_s=timeout_s)
        assert isinstance(answer, kind)
        return answer
