"""Who owns the sandbox: only the connection with the highest fence may change anything. No I/O.

A fence is a number that grows with each new owner. An owner that was replaced and does not know it
yet (a paused machine, a partitioned network) is refused before any effect, on every connection
it has, from the moment the new one has said hello.
"""

from __future__ import annotations

from typing import Final, Literal

from runnerd.protocol.errors import RequestError

CHANGES: Final[dict[str, bool]] = {
    "hello": False,
    "ping": False,
    "exec.start": True,
    "exec.attach": False,  # but under a subscriber's name: see changes()
    "exec.detach": False,
    "exec.ack": False,
    "exec.write": True,
    "exec.signal": True,
    "exec.resize": True,
    "exec.cancel": True,
    "exec.wait": False,
    "exec.inspect": False,
    "exec.list": False,
    "exec.forget": True,
    "env.set": True,
    "sandbox.claim": True,
    "sandbox.pin": True,
    "sandbox.activity": False,
    "events.subscribe": False,
    "daemon.info": False,
    "daemon.health": False,
    "daemon.metrics": False,
    "daemon.drain": True,
    "daemon.undrain": True,
    "daemon.stop": True,
}
"""Whether a method changes anything; every method is in it."""


def changes(method: str, subscriber: str | None = None) -> bool:
    """Whether a request changes anything.

    An attach under a subscriber's name does: it takes the place of whoever had that name, and the
    command waits for it. A nameless one is a reader like any other.

    Args:
        method: A key of METHODS.
        subscriber: The name it attaches under, if it does.
    """
    return CHANGES[method] or (method == "exec.attach" and subscriber is not None)


class Fence:
    """The highest fence seen, and what that means for a connection.

    Args:
        highest: As an earlier incarnation left it, or None.

    Attributes:
        highest: The highest seen, or None before the first.
    """

    def __init__(self, highest: int | None = None) -> None:
        self.highest = highest

    def is_new(self, asked: int | Literal["current"] | None) -> bool:
        """Whether a hello brings a new owner."""
        return isinstance(asked, int) and (self.highest is None or asked > self.highest)

    def hold(self, asked: int | Literal["current"] | None) -> int | None:
        """Take a hello's fence; returns what its connection holds from now on.

        "current" is what is highest now: an operator's override, that a later owner ends too.
        """
        if asked == "current":
            return self.highest
        if asked is not None and self.is_new(asked):
            self.highest = asked
        return asked

    def check(self, held: int | None) -> None:
        """Let a change pass, or refuse it.

        Args:
            held: What `hold` returned for the connection.

        Raises:
            RequestError: fenced, with the highest fence.
        """
        if self.highest is None or (held is not None and held >= self.highest):
            return
        mine = "without a fence" if held is None else f"with fence {held}"
        raise RequestError(
            "fenced",
            f"this connection is {mine}, and the sandbox has an owner with {self.highest}",
            fence=self.highest,
        )
