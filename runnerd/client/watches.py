"""Events in the blocking client, for `for`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .link import deadline
from .watching import Watching

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import msgspec

    from runnerd.protocol.events import EventNote

    from .link import Link


class Watch(Watching):
    """What happens in the daemon, from when it was opened; see Watching.

    Iterating never ends by itself: it raises what ends the conversation (StreamLost,
    DaemonRestarted), once all that came before was given out.
    """

    def __init__(self, link: Link, answer: msgspec.Struct) -> None:
        super().__init__(link.router, answer)
        self._link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EventNote:
        return self.next()

    def next(self, timeout_s: float | None = None) -> EventNote:
        """Wait for the next event.

        Args:
            timeout_s: The most to wait, in seconds; None = as long as it takes.

        Raises:
            ClientTimeout: If none came in time.
            StreamLost: If the connection was lost, and none came in its place.
            RemoteError: If it could not subscribe again on the next connection.
        """
        while (event := self._take()) is None:
            self._link.wait_until(lambda: self._has_news, deadline(timeout_s), "an event")
        return event
