"""The one way in for a reader: exec.attach, exec.start with attach, and a start sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runnerd.core.flow import Subscription
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import Attach, ExecAttach

if TYPE_CHECKING:
    from .connection import Connection
    from .running import Running


def subscribe(
    connection: Connection,
    running: Running,
    asked: Attach | ExecAttach,
    after: int | Literal["tail"] = 0,
    tail_bytes: int | None = None,
) -> Subscription:
    """Open a subscription; its answer must be sent before the writer's next turn.

    Args:
        connection: Who reads.
        running: The exec, started.
        asked: Streams, name, generation and window.
        after: The sequence the reader has, or "tail".
        tail_bytes: With "tail": so much of what is there already is sent as well.

    Raises:
        RequestError: exec_evicted, superseded, cursor_invalid or busy; nothing was changed.
    """
    its_exec = running.exec
    if its_exec.is_evicted:
        raise RequestError(
            "exec_evicted",
            f"the output of exec '{its_exec.exec_id}' is no longer kept",
            exit=its_exec.exit,
        )
    its_exec.names.check(asked.subscriber, asked.generation)
    if not its_exec.names.in_use(asked.subscriber):
        connection.check_room()  # one that only takes an older one's place needs none

    transcript = its_exec.transcript
    begins_at = 0
    if tail_bytes is not None:
        after, begins_at = transcript.tail(tail_bytes)

    def make(number: int) -> Subscription:
        return Subscription(
            number,
            transcript,
            streams=asked.streams,
            after=after,
            begins_at=begins_at,
            window_bytes=asked.window_bytes,
            subscriber=asked.subscriber,
        )

    return connection.subscribe(running, make, asked.generation)
