"""How the async client waits: one wire, a task that reads and one that writes, and bells.

The tasks are the only ones that wait for the socket; a caller queues its request, which is sent
at once as far as the socket takes it, and waits for a bell. So a caller that is cancelled leaves
the connection as whole as one that is not.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from .errors import ClientError, ClientTimeout
from .wire import LEAVE_S, LEAVE_STEP_S, Wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from runnerd.protocol.fields import Params

    from .locate import Way
    from .routing import Reply
    from .wire import Options


class Bells:
    """Wakes whoever waits for one thing to change; nobody may be waiting."""

    def __init__(self) -> None:
        self._waiting: set[anyio.Event] = set()

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits, woken or not."""
        return bool(self._waiting)

    def ring(self) -> None:
        """Wake all who wait now."""
        for bell in self._waiting:
            bell.set()

    async def wait(self, is_there: Callable[[], object]) -> None:
        """Return once `is_there()`, which is looked at now and after each ring."""
        while not is_there():
            bell = anyio.Event()
            self._waiting.add(bell)
            try:
                await bell.wait()
            finally:
                self._waiting.discard(bell)


class AsyncLink(Wire):
    """A wire whose waiting is done by two tasks; run them with serve().

    Attributes:
        ended: Rung once the conversation is over.
    """

    def __init__(self, connection: socket.socket, way: Way, options: Options) -> None:
        self.bells: set[Bells] = set()
        self._greeted = Bells()
        self._unsent = Bells()
        self._serving = anyio.CancelScope(shield=True)
        self._owed: set[int] = set()
        self._paid = Bells()
        super().__init__(connection, way, options)

    async def serve(self) -> None:
        """Carry the conversation until it is over; errors end it, and are its `end`.

        No scope around it ends it, only end(): what a cancelled block still has to ask on its way
        out, the end of what it started, needs the answer.
        """
        with self._serving:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                await self._read()

    async def wait(
        self, bells: Bells, is_there: Callable[[], object], timeout_s: float | None, what: str
    ) -> None:
        """Wait for `is_there()`.

        Args:
            bells: Rung when it may have come.
            is_there: Whether it has.
            timeout_s: The most to wait, in seconds; None = as long as it takes.
            what: What is waited for, for the error's text.

        Raises:
            ClientTimeout: If it has not come in time.
            ClientError: Why the conversation is over, if that came first.
        """
        conversation = self.router.conversation
        self.bells.add(bells)
        try:
            with anyio.move_on_after(timeout_s):
                await bells.wait(lambda: is_there() or conversation.end is not None)
        finally:
            # Others may wait for the same: the end of it all has to reach them too.
            if not bells.is_waited_for:
                self.bells.discard(bells)
        if is_there():
            return
        if conversation.end is not None:
            raise conversation.end
        raise ClientTimeout(f"{what} did not come in time")

    async def wait_greeted(self, timeout_s: float) -> None:
        """Wait for the first hello's answer; see wait()."""
        conversation = self.router.conversation
        await self.wait(
            self._greeted, lambda: conversation.is_greeted, timeout_s, "the answer to hello"
        )

    def send_some(self) -> None:
        """Send what the socket takes now; the writing task sends the rest."""
        super().send_some()
        if self.wants_write:
            self._unsent.ring()

    def ask_on_the_way_out(self, method: str, params: Params) -> None:
        """Make a request that nobody waits for, but for settle()."""

        def taken(_reply: Reply) -> None:
            self._owed.discard(request_id)
            self._paid.ring()

        request_id = self.router.request(method, params, taken)
        self._owed.add(request_id)

    async def settle(self) -> None:
        """Wait for what was asked on the way out: for what LEAVE_S says at most.

        The socket may not have taken it yet; what is closed over it is gone.
        """
        with anyio.CancelScope(shield=True), contextlib.suppress(ClientError):
            await self.wait(self._paid, lambda: not self._owed, LEAVE_S, "the last answer")

    async def _read(self) -> None:
        conversation = self.router.conversation
        while conversation.end is None:
            if self.step(time.monotonic()):
                self._greeted.ring()
                # Others have their turn, however much there is to read.
                await anyio.lowlevel.checkpoint()
            else:
                await self._wait_readable()
        self.end()

    async def _wait_readable(self) -> None:
        wait_s = None
        if self.wake_at_s is not None:
            wait_s = max(0.0, self.wake_at_s - time.monotonic())
        with anyio.move_on_after(wait_s):
            if self.socket is None:
                await anyio.sleep_forever()
                return
            # Closed while this waits for it: the next step sees that.
            with contextlib.suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self.socket)

    async def _write(self) -> None:
        while True:
            await self._unsent.wait(lambda: self.wants_write and self.socket is not None)
            assert self.socket is not None
            try:
                await anyio.wait_writable(self.socket)
            except anyio.ClosedResourceError:
                continue  # lost meanwhile; the next connection sends what is left
            self.send_some()

    def end(self) -> None:
        """End the tasks and wake everyone: nothing more comes."""
        self.close()
        self._serving.cancel()
        for bells in [*self.bells]:
            bells.ring()

    async def leave(self) -> None:
        """Close it, and see that nothing of ours is left of it: for what LEAVE_S says at most."""
        self.close()
        with anyio.move_on_after(LEAVE_S, shield=True):
            while not self._way.has_left():  # noqa: ASYNC110  # the kernel rings no bell of ours
                await anyio.sleep(LEAVE_STEP_S)
        self._way.end()

    def _drop_socket(self) -> None:
        if self.socket is not None:
            anyio.notify_closing(self.socket)
        super()._drop_socket()
