"""A look each second, or every four while idle: late loop, lost socket, hanging journal.

All that is looked at now and then is looked at here, dead children too (daemon/reaper.py), so that
an idle daemon is woken by one timer and no other.

A loop that is late is late for everything; by how much is measured by the timer itself. The
socket's file is only looked for, with one lstat(2): where somebody has removed it, connections
live on, but nobody new could ever come, so it is bound again.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .listening import Listener, SocketError

if TYPE_CHECKING:
    from .counters import Counters
    from .log import Log
    from .poller import Poller
    from .service import Service

PULSE_S: Final = 1.0
IDLE_PULSE_S: Final = 4.0  # an idle sandbox is left asleep; a lost socket is bound within 5 s
RECENT_S: Final = 60.0  # longer than from one look at health or scrape to the next, usually
_IDLE_SHARE: Final = 0.05  # of a processor: who uses less is idle
_LOOK_AT_JOURNAL_EVERY: Final = 10  # beats


class Pulse:
    """A timer for life.

    Args:
        poller: Whose turns are measured.
        service: Told of failures; its journal is looked at.
        log: A line for each change.
        counters: socket_rebinds is counted.
        listener: The socket.

    Attributes:
        socket_trouble: Why nobody new can reach the daemon, or None.
    """

    def __init__(
        self,
        poller: Poller,
        service: Service,
        log: Log,
        counters: Counters,
        listener: Listener,
    ) -> None:
        self.socket_trouble: str | None = None
        self._poller = poller
        self._service = service
        self._log = log
        self._counters = counters
        self._listener = listener
        self._lags_s: deque[tuple[float, float]] = deque()  # when, and by how much
        self._due_s = 0.0
        self._armed_s = 0.0
        self._cpu_s = 0.0
        self._beats = 0
        self._bound_again_s: float | None = None
        self._on_bound: Callable[[socket.socket], None] = lambda _socket: None

    def start(self, on_bound: Callable[[socket.socket], None]) -> None:
        """Beat from now on.

        Args:
            on_bound: Told of a new listening socket; closes the one before.
        """
        self._on_bound = on_bound
        self._arm()

    def worst_lag_s(self) -> float:
        """Return by how many seconds the loop was late at most, in the last minute."""
        since_s = time.monotonic() - RECENT_S
        return max((lag_s for at_s, lag_s in self._lags_s if at_s >= since_s), default=0.0)

    def was_bound_again(self) -> bool:
        """Whether the socket's file was gone, in the last minute."""
        at_s = self._bound_again_s
        return at_s is not None and time.monotonic() - at_s < RECENT_S

    def _arm(self) -> None:
        now_s, cpu_s = time.monotonic(), time.process_time()
        is_idle = cpu_s - self._cpu_s < _IDLE_SHARE * (now_s - self._armed_s)
        self._armed_s, self._cpu_s = now_s, cpu_s
        self._due_s = now_s + (IDLE_PULSE_S if is_idle else PULSE_S)
        self._poller.call_at(self._due_s, self._service, self._beat)

    def _beat(self) -> None:
        now_s = time.monotonic()
        self._lags_s.append((now_s, max(0.0, now_s - self._due_s)))
        while self._lags_s[0][0] < now_s - RECENT_S:
            self._lags_s.popleft()
        self._arm()  # first: whatever becomes of this beat, there is a next one
        self._service.reaper.sweep()
        if self._service.registry.state == "stopping":
            return
        self._look_at_socket()
        self._service.journal.notice_hang()
        self._beats += 1
        if self._beats % _LOOK_AT_JOURNAL_EVERY == 0:
            self._service.journal.look()

    def _look_at_socket(self) -> None:
        try:
            bound = self._listener.bind_again_if_gone()
        except SocketError as error:
            if self.socket_trouble != str(error):
                self.socket_trouble = str(error)
                self._log.warning("socket_unreachable", reason=self.socket_trouble)
            return
        if bound is not None:
            self._on_bound(bound)
            self._bound_again_s = time.monotonic()
            self._counters.socket_rebinds += 1
            self._log.warning(
                "socket_bound_again",
                socket=self._listener.path,
                total=self._counters.socket_rebinds,
            )
        elif self.socket_trouble is not None:
            self._log.info("socket_reachable_again", socket=self._listener.path)
        self.socket_trouble = None
