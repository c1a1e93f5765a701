"""The socket under a conversation: moves bytes, never waits, and says when it wants to go on.

Both clients drive it alike: wait until the socket is readable, or writable where wants_write, or
`wake_at_s` has come; then step(). Every byte is counted as handed over exactly when the kernel
has taken it, which is what never-sent and ambiguous are told apart by.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from runnerd import __version__
from runnerd.protocol.framing import Encoding

from .conversation import Conversation
from .errors import ClientError
from .locate import find_token
from .repeating import Patience
from .routing import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from .errors import StreamLost
    from .locate import Way

_READ_BYTES: Final = 256 * 1024

# A daemon answers hello in milliseconds, or says no. One that does neither is as good as gone.
HELLO_S: Final = 10.0

# Whoever has a subscription hears from the daemon every 5 s, if only by a heartbeat. After four
# of them that did not come the connection is taken for lost: nothing else would ever say so.
SILENCE_S: Final = 20.0

RECONNECT_S: Final = 60.0

# A command that connects ends by itself once its connection is closed, as soon as what was in it
# has passed; one that does not is killed.
LEAVE_S: Final = 1.0
LEAVE_STEP_S: Final = 0.002


class OptionFields(TypedDict, total=False):
    """The arguments of Options, for functions that pass them on."""

    client: str
    incarnation: str | None
    fence: int | Literal["current"] | None
    token: str | None
    token_file: str | os.PathLike[str] | None
    encoding: Encoding
    reconnect_s: float
    on_lost: Callable[[StreamLost], None] | None


class Options:
    """How a client behaves over its connections; see blocking.connect for each.

    Raises:
        TokenUnreadable: If the token's file cannot be read.
    """

    def __init__(
        self,
        *,
        client: str = f"runnerd.client/{__version__}",
        incarnation: str | None = None,
        fence: int | Literal["current"] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        encoding: Encoding = Encoding.MSGPACK,
        reconnect_s: float = RECONNECT_S,
        on_lost: Callable[[StreamLost], None] | None = None,
    ) -> None:
        self.client = client
        self.incarnation = incarnation
        self.fence = fence
        self.token = find_token(token, token_file)
        self.encoding = encoding
        self.reconnect_s = reconnect_s
        self.on_lost = on_lost


class Wire:
    """One client's sockets, one after the other.

    Args:
        connection: The first, connected; the wire owns and closes it.
        way: How the next ones are made.
        options: See Options.

    Attributes:
        router: What is asked and told over it.
        socket: The present connection, None between two.
    """

    def __init__(self, connection: socket.socket, way: Way, options: Options) -> None:
        connection.setblocking(False)
        self.socket: socket.socket | None = connection
        self._way = way
        self._options = options
        self._conversation = Conversation(
            mint=lambda: os.urandom(16).hex(),
            client=options.client,
            incarnation=options.incarnation,
            fence=options.fence,
            token=options.token,
            encoding=options.encoding,
        )
        self.router = Router(self._conversation, self.send_some)
        self._patience = Patience(options.reconnect_s, _jitter)
        self._hello_by_s: float | None = None
        self._silent_since_s: float | None = None
        self._is_write_broken = False
        self._was_heard = False
        # Found set, an exception from outside (Ctrl-C) came in the middle of it.
        self._is_sending = False
        self._is_reading = False
        self._is_handing_out = False
        self._is_losing = False
        self._now_s = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._buffer = bytearray(_READ_BYTES)
        self._conversation.opened()

    @property
    def unsent_bytes(self) -> int:
        """Bytes the socket has not taken yet."""
        return len(self._conversation.unsent)

    @property
    def wants_write(self) -> bool:
        """Whether to wait for the socket to be writable too."""
        return self.unsent_bytes > 0 and not self._is_write_broken

    @property
    def wake_at_s(self) -> float | None:
        """When to step at the latest, on the clock step() is given; None = whenever it is ready."""
        at_s = self._patience.next_at_s if self.socket is None else self._lost_at_s
        times_s = [each_s for each_s, _ in self._later]
        return min(times_s if at_s is None else [at_s, *times_s], default=None)

    @property
    def _lost_at_s(self) -> float | None:
        """When the connection is lost unless something is read; None = never."""
        if self._hello_by_s is not None:
            return self._hello_by_s
        if self._silent_since_s is None or not self._conversation.is_owed_heartbeats:
            return None
        return self._silent_since_s + SILENCE_S

    def close(self) -> None:
        """Close it; every later use of the router raises."""
        self.router.close()
        self._drop_socket()

    def step(self, now_s: float) -> bool:
        """Connect if it is time to, send what the socket takes, read once, hand out what came.

        Args:
            now_s: Monotonic seconds.

        Returns:
            Whether anything moved on: something was read, a connection came or went, or what was
            followed ended. After a False there is nothing to do before the socket is ready or
            `wake_at_s` has come.
        """
        self._now_s = now_s
        if self._conversation.end is not None:
            self._drop_socket()
            return False
        if self._is_sending or self._is_reading or self._is_handing_out or self._is_losing:
            self._mend(now_s)
            return True
        if self._later:
            self._call_due()
        if self.socket is None:
            return self._connect(now_s)
        self.send_some()
        if self._read_some(now_s):
            return True
        # Only now: a caller that was busy elsewhere has not read what came meanwhile.
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if self._lost_at_s is not None and now_s >= self._lost_at_s:
            self._lose(now_s)
            return True
        return False

    def later(self, wait_s: float, action: Callable[[], None]) -> None:
        """Have a step call `action`, wait_s from now; from within a step, which knows the time."""
        self._later.append((self._now_s + wait_s, action))

    def _call_due(self) -> None:
        due = [action for at_s, action in self._later if at_s <= self._now_s]
        self._later = [each for each in self._later if each[0] > self._now_s]
        for action in due:
            action()

    def send_some(self) -> None:
        """Send what the socket takes now."""
        if self._is_sending or self._is_reading:
            return
        unsent = self._conversation.unsent
        while unsent and self.socket is not None and not self._is_write_broken:
            self._is_sending = True
            try:
                sent_bytes = self.socket.send(unsent)
            except BlockingIOError:
                self._is_sending = False
                return
            except OSError:
                self._is_sending = False
                # The daemon is gone, or going. What it still had to say is read first; the
                # stream's end then tells what is lost.
                self._is_write_broken = True
                return
            self._conversation.sent(sent_bytes)
            self._is_sending = False

    def _mend(self, now_s: float) -> None:
        """Go on behind a step that was interrupted, without what may have been lost by it."""
        if self._is_sending:
            # Nobody knows how much the socket took. All counts as handed over: nothing is made
            # twice that must not be.
            self._conversation.sent(self.unsent_bytes)
        if self._is_reading or self._is_handing_out:
            self.router.break_off()
        if self._is_sending or self._is_reading or self._is_losing:
            self._lose(now_s)  # where its bytes go on is not known
        self._is_sending = self._is_reading = self._is_handing_out = False

    def _read_some(self, now_s: float) -> bool:
        assert self.socket is not None
        self._is_reading = True
        try:
            count_bytes = self.socket.recv_into(self._buffer)
        except BlockingIOError:
            self._is_reading = False
            return False
        except ConnectionResetError:
            # Not the end of what was said: Linux reports it once, then goes on with the rest.
            return self._read_some(now_s)
        self._silent_since_s = None
        if not count_bytes:
            self._is_reading = False
            self._lose(now_s)
            return True
        self._was_heard = True
        was_greeted = self._conversation.is_greeted
        events = self._conversation.receive(memoryview(self._buffer)[:count_bytes])
        if self._conversation.is_greeted and not was_greeted:
            self._hello_by_s = None
            self._patience.greeted()
        self._is_handing_out = True
        self._is_reading = False
        try:
            self.router.hand_out(events)
        except ClientError:
            self._is_handing_out = False
            raise
        self._is_handing_out = False
        if self._conversation.is_turned_away and self._conversation.end is None:
            self._lose(now_s)
        self.send_some()
        return True

    def _connect(self, now_s: float) -> bool:
        assert self._patience.next_at_s is not None
        if now_s < self._patience.next_at_s:
            return False
        try:
            self.socket = self._way.reopen()
        except (FileNotFoundError, ConnectionRefusedError):
            self._patience.refused(now_s)
        except OSError:  # a full backlog, no descriptor: not the end of anything
            self._patience.lost(now_s)
        else:
            self._hello_by_s = now_s + HELLO_S
            self._conversation.opened()
            self.send_some()
            return True
        self._give_up_if_over()
        return True

    def _lose(self, now_s: float) -> None:
        self._is_losing = True
        lost = self._conversation.lost_error()
        self._drop_socket()
        was_greeted = self._conversation.is_greeted
        events = self._conversation.lost()
        self._patience.lost(now_s)
        if not self._was_heard and self._conversation.end is None:
            self._conversation.end = self._way.turned_away()
        self._give_up_if_over(lost)
        # First: what the caller's own function raises must not keep an answer from whom it is for.
        self.router.hand_out(events)
        self._is_losing = False
        if self._conversation.end is None and was_greeted and self._options.on_lost is not None:
            self._options.on_lost(lost)

    def _give_up_if_over(self, lost: StreamLost | None = None) -> None:
        if self._patience.next_at_s is None and self._conversation.end is None:
            lost = lost or self._conversation.lost_error()
            if words := self._way.words():
                lost.hint = f"what connects says: {words}"
            self._conversation.end = lost

    def _drop_socket(self) -> None:
        self._hello_by_s = self._silent_since_s = None
        self._is_write_broken = False
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def _jitter() -> float:
    # Not from random, whose import takes a millisecond of every command line.
    return int.from_bytes(os.urandom(6), "big") / 2**48
