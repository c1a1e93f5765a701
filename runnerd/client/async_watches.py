"""Events in the async client, for `async for`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .async_link import Bells
from .watching import Watching

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import msgspec

    from runnerd.protocol.events import EventNote

    from .async_link import AsyncLink
    from .routing import Record


class AsyncWatch(Watching):
    """What happens in the daemon, from when it was opened; see watches.Watch."""

    def __init__(self, link: AsyncLink, answer: msgspec.Struct) -> None:
        self._link = link
        self._bells = Bells()
        super().__init__(link.router, answer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Be told nothing more; whoever waits in next() is told so."""
        super().close()
        self._bells.ring()

    def receive(self, record: Record) -> None:
        """Take an event; called by the client."""
        super().receive(record)
        self._bells.ring()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventNote:
        return await self.next()

    async def next(self, timeout_s: float | None = None) -> EventNote:
        """Wait for the next event; see Watch.next. Each comes once, to one of who wait."""
        while (event := self._take()) is None:
            await self._link.wait(self._bells, lambda: self._has_news, timeout_s, "an event")
        return event
