"""A proxy between client and daemon that cuts, delays, splits and swallows, on demand or by seed.

What crosses it is what a real connection would carry: whole bytes in order up to a cut, then
nothing. Threads, one for each direction of a connection, so that neither can hold up the other.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

_READ_BYTES: Final = 65536


class Weather:
    """How bad the connections are; the same seed makes the same decisions.

    Args:
        seed: Of all decisions.
        cut_bytes: A connection is cut after 0 to this many bytes of one direction; about half
            within its first thousand, in the hello or in an answer.
        cut_s: All connections are cut together about this often, in seconds.
        delay_s: A piece may be held back for up to this long.
    """

    def __init__(
        self, seed: int, *, cut_bytes: int, cut_s: float = 0.1, delay_s: float = 0.002
    ) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._cut_bytes = cut_bytes
        self._cut_s = cut_s
        self._delay_s = delay_s

    def next_cut_s(self) -> float:
        """Draw how long until all connections are cut together."""
        with self._lock:
            return self._random.expovariate(1 / self._cut_s)

    def cut_after_bytes(self) -> int:
        """Draw when a direction of a new connection is cut."""
        with self._lock:
            is_early = self._random.random() < 1 / 4
            return int(self._random.random() * (1000 if is_early else self._cut_bytes))

    def pieces(self, data: bytes) -> list[tuple[float, bytes]]:
        """Split what was read into pieces, each with the time it is held back."""
        with self._lock:
            cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(2))
            held = [self._random.random() * self._delay_s * (each % 7 == 0) for each in cuts]
        bounds = [0, *cuts, len(data)]
        parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
        return [(delay, part) for delay, part in zip([*held, 0.0], parts, strict=True) if part]


class _Connection:
    """One connection through the proxy."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far
        self.is_frozen = False

    def cut(self) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Relays connections from its own socket to a daemon's, until the end of its `with` block.

    Args:
        path: Where it listens.
        target: The daemon's socket.
        weather: What happens by itself; nothing if None.

    Attributes:
        swallows_answers: Whether what the daemon says is thrown away from now on.
        swallows_after_hello: Whether all it says on a new connection but the first is.
        is_down: Whether a new connection is closed at once.
        connections: How many there have been.
        cuts: How many were cut by the weather or by cut().
    """

    def __init__(self, path: Path, target: str, weather: Weather | None = None) -> None:
        self.path = str(path)
        self.swallows_answers = False
        self.swallows_after_hello = False
        self.is_down = False
        self.connections = 0
        self.cuts = 0
        self._target = target
        self._weather = weather
        self._live: set[_Connection] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)

    def __enter__(self) -> Self:
        self._thread(self._accept)
        if self._weather is not None:
            self._thread(self._storm, self._weather)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def close(self) -> None:
        """Listen no more, and cut what there is."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._closed.set()
        self.cut()

    def cut(self) -> None:
        """Cut every connection now."""
        with self._lock:
            live = [*self._live]
        for connection in live:
            self.cuts += 1
            connection.cut()

    def freeze(self) -> None:
        """Throw away whatever comes over the connections there are, and keep them open."""
        with self._lock:
            for connection in self._live:
                connection.is_frozen = True

    def _storm(self, weather: Weather) -> None:
        while not self._closed.wait(weather.next_cut_s()):
            self.cut()

    def _thread(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_down:
                near.close()
                continue
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                far.close()
                continue
            self.connections += 1
            connection = _Connection(near, far)
            with self._lock:
                self._live.add(connection)
            self._thread(self._relay, connection)

    def _relay(self, connection: _Connection) -> None:
        answers = threading.Thread(target=self._copy, args=(connection, "answers"))
        answers.start()
        self._copy(connection, "requests")
        answers.join()
        with self._lock:
            self._live.discard(connection)
        connection.near.close()
        connection.far.close()

    def _copy(self, connection: _Connection, what: str) -> None:
        source, sink = connection.near, connection.far
        if what == "answers":
            source, sink = sink, source
        left_bytes = None if self._weather is None else self._weather.cut_after_bytes()
        for turn in itertools.count():
            try:
                data = source.recv(_READ_BYTES)
                if not data:
                    break
                swallows = self.swallows_answers or (self.swallows_after_hello and turn > 0)
                if connection.is_frozen or (what == "answers" and swallows):
                    continue
                if left_bytes is not None and len(data) >= left_bytes:
                    sink.sendall(data[:left_bytes])
                    self.cuts += 1
                    break
                self._send(sink, data)
            except OSError:
                break
            if left_bytes is not None:
                left_bytes -= len(data)
        # Both directions at once, as when a process in between dies.
        connection.cut()

    def _send(self, sink: socket.socket, data: bytes) -> None:
        if self._weather is None:
            sink.sendall(data)
            return
        for delay_s, piece in self._weather.pieces(data):
            if delay_s:
                time.sleep(delay_s)
            sink.sendall(piece)
