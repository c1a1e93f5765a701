"""Which requests may be made again on the next connection, and when to try for one. No I/O.

A request's fate at the loss of its connection depends on how far it got:
    never sent   its last byte was not handed to the socket: the daemon has not read it, so it is
                 sent on the next connection, whatever it is.
    ambiguous    all of it was handed over and no answer came: it took effect, or not. Only what is
                 safe twice is sent again; what is not fails as Ambiguous.
Every repeat carries the incarnation the client knows (in hello), so that none of them ever meets
another daemon than the one that may have seen the first.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from runnerd.protocol.daemon_requests import SandboxClaim
from runnerd.protocol.requests import ExecStart, ExecWrite

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.protocol.fields import Params

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0

# A Unix socket that is missing, or where nobody listens, says that the daemon which had it is
# gone. Another one may come up and can then be told apart; more patience would find no better.
GONE_S: Final = 5.0


class Repeat(Enum):
    """Whether an ambiguous request is made again.

    ALWAYS: It reads, or its effect is the same once and twice.
    MARKED: Where its fields make the daemon take it once: exec.start and sandbox.claim with a
        nonce, exec.write with an offset.
    NEVER: A second one would be a second effect.
    MOOT: It was about the connection that is lost; what it asked for has happened with that.
    """

    ALWAYS = "always"
    MARKED = "marked"
    NEVER = "never"
    MOOT = "moot"


REPEATS: Final = {
    "hello": Repeat.MOOT,  # every connection begins with its own
    "ping": Repeat.ALWAYS,
    "exec.start": Repeat.MARKED,
    "exec.attach": Repeat.ALWAYS,  # under the next generation
    "exec.detach": Repeat.MOOT,
    "exec.ack": Repeat.MOOT,
    "exec.write": Repeat.MARKED,
    "exec.signal": Repeat.NEVER,
    "exec.resize": Repeat.ALWAYS,  # a size, not a step; two of them keep their order
    "exec.cancel": Repeat.ALWAYS,  # a latch; a further one repeats no TERM
    "exec.wait": Repeat.ALWAYS,
    "exec.inspect": Repeat.ALWAYS,
    "exec.list": Repeat.ALWAYS,
    "exec.forget": Repeat.ALWAYS,
    "env.set": Repeat.ALWAYS,  # likewise
    "sandbox.claim": Repeat.MARKED,
    "sandbox.pin": Repeat.ALWAYS,  # a state, not a step; its time begins anew
    "sandbox.activity": Repeat.ALWAYS,
    "events.subscribe": Repeat.ALWAYS,  # from then on; what is missed between is said
    "daemon.info": Repeat.ALWAYS,
    "daemon.health": Repeat.ALWAYS,
    "daemon.metrics": Repeat.ALWAYS,
    "daemon.drain": Repeat.ALWAYS,  # a state, not a step
    "daemon.undrain": Repeat.ALWAYS,
    "daemon.stop": Repeat.ALWAYS,  # this incarnation's stop; a later one is never asked
}
"""Every method; tests/unit/test_client_repeating.py holds it to METHODS."""


def may_repeat(method: str, params: Params) -> bool:
    """Whether a request that was handed over and not answered may be made again."""
    rule = REPEATS[method]
    if rule is not Repeat.MARKED:
        return rule is Repeat.ALWAYS
    if isinstance(params, ExecStart):
        return params.exec_id is not None and params.nonce is not None
    if isinstance(params, SandboxClaim):
        return params.nonce is not None
    assert isinstance(params, ExecWrite)
    return params.offset is not None


class Patience:
    """When to try for the next connection, and when to give up.

    Full jitter: the n-th wait is anything from 0 to 0.5 s doubled n times, at most 8 s, so that a
    thousand clients of one daemon do not come back in step.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Args:
        reconnect_s: How long to try before giving up, in seconds; 0 = not at all.
        random: Returns a number from 0 to 1, a new one each time.

    Attributes:
        next_at_s: When to try next, on the caller's clock; None = give up.
    """

    def __init__(self, reconnect_s: float, random: Callable[[], float]) -> None:
        self._reconnect_s = reconnect_s
        self._random = random
        self._attempts = 0
        self._lost_at_s: float | None = None
        self._refused_at_s: float | None = None
        self.next_at_s: float | None = None

    def lost(self, now_s: float) -> None:
        """Take the loss of a connection, or of one that had not come as far as its hello."""
        self._refused_at_s = None
        self._schedule(now_s)

    def refused(self, now_s: float) -> None:
        """Take an attempt that found no socket, or nobody listening at it."""
        if self._refused_at_s is None:
            self._refused_at_s = now_s
        self._schedule(now_s)

    def greeted(self) -> None:
        """Take a connection whose hello was answered: the next loss is a new one."""
        self._attempts = 0
        self._lost_at_s = self._refused_at_s = self.next_at_s = None

    def _schedule(self, now_s: float) -> None:
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        over_at_s = self._lost_at_s + self._reconnect_s
        if self._refused_at_s is not None:
            over_at_s = min(over_at_s, self._refused_at_s + GONE_S)
        if now_s >= over_at_s:
            self.next_at_s = None
            return
        longest_s = min(BACKOFF_FIRST_S * 2**self._attempts, BACKOFF_MAX_S)
        self._attempts = min(self._attempts + 1, 16)
        # The last attempt is at the very end, not before it.
        self.next_at_s = min(now_s + longest_s * self._random(), over_at_s)
