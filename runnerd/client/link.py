"""How the blocking client waits: one wire, and select.poll."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Final

from .errors import ClientTimeout
from .wire import LEAVE_S, LEAVE_STEP_S, Wire

if TYPE_CHECKING:
    from collections.abc import Callable


# poll() counts milliseconds in an int, which is full after 24.8 days. A longer wait is several.
POLL_S_MAX: Final = 24 * 3600.0


def deadline(timeout_s: float | None) -> float | None:
    """Return the point in time, on the monotonic clock, at which a wait ends; None = never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class Link(Wire):
    """A wire that is waited for.

    While bytes wait to be sent, what arrives is still read, so that neither side can block the
    other.
    """

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed, and between two connections."""
        return -1 if self.socket is None else self.socket.fileno()

    def wait_until(
        self, is_there: Callable[[], object], deadline_s: float | None, what: str
    ) -> None:
        """Advance until `is_there()`.

        Args:
            is_there: Whether what is waited for has come.
            deadline_s: When to give up, on the monotonic clock; None = never.
            what: What is waited for, for the error's text.

        Raises:
            ClientTimeout: If it has not come by then.
            StreamLost: If the connection was lost first, and none came in its place.
            ProtocolViolation: If the daemon broke the protocol.
        """
        while not is_there():
            has_moved = self.advance(deadline_s)
            if is_there():
                return
            if self.router.conversation.end is not None:
                raise self.router.conversation.end
            # What keeps arriving for others must not stretch this wait.
            if not has_moved or (deadline_s is not None and time.monotonic() >= deadline_s):
                raise ClientTimeout(f"{what} did not come in time")

    def advance(self, deadline_s: float | None) -> bool:
        """Move on by one step, waiting for one that can be made.

        Args:
            deadline_s: When to give up, on the monotonic clock; None = never. One that has
                passed takes what is there and does not wait.

        Returns:
            Whether a step was made.

        Raises:
            ClientError: Why the conversation is over; what had come before was handed out.
        """
        while True:
            end = self.router.conversation.end
            if end is not None:
                raise end
            if self.step(time.monotonic()):
                return True
            now_s = time.monotonic()
            times_s = [at_s for at_s in (deadline_s, self.wake_at_s) if at_s is not None]
            if deadline_s is not None and now_s >= deadline_s:
                return False
            self._wait(max(min(times_s) - now_s, 0.0) if times_s else None)

    def leave(self) -> None:
        """Close it, and see that nothing of ours is left of it: for what LEAVE_S says at most."""
        self.close()
        until_s = time.monotonic() + LEAVE_S
        while not self._way.has_left() and time.monotonic() < until_s:
            time.sleep(LEAVE_STEP_S)
        self._way.end()

    def _wait(self, wait_s: float | None) -> None:
        poll = select.poll()
        if self.socket is not None:
            wanted = select.POLLIN | select.POLLOUT if self.wants_write else select.POLLIN
            poll.register(self.socket, wanted)
        poll.poll(None if wait_s is None else int(min(wait_s, POLL_S_MAX) * 1000) + 1)
