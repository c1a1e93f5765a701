"""Frames at random against a real daemon, fast: `python -m tests.chaos.fuzzing --frames 5000000`.

Several conversations at once, in both encodings; each is frames right and wrong, cut anywhere into
writes, and ends in one of several ways. What comes back is checked while it comes: a request gets
at most one answer, one that ends with a `ping` that is answered has had all of them, and each
error is of a known kind with its four facts, and never `internal`. The seed is printed, and the
same seed sends the same frames.
"""

from __future__ import annotations

import argparse
import collections
import select
import socket
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from runnerd.protocol.errors import KINDS
from runnerd.protocol.framing import Encoding, FrameSplitter, frame
from tests.chaos.checking import Log, Resources, end_everything
from tests.chaos.generating import encoded, request
from tests.harness import RunnerdProcess, daemons
from tests.raw import RawClient

AT_ONCE: Final = 16
ENDS: Final = {
    "read all": 12, "half-close": 4, "leave": 2, "mid-frame": 2, "garbage": 2, "too large": 1,
}  # fmt: skip
"""How a conversation ends, and how often."""
_SEND_BYTES: Final = 1 << 16
_ROUND_FRAMES: Final = 20_000  # between two looks at what the daemon holds
_SILENCE_S: Final = 60.0
_LAST: Final = "the last one"


class ViolationError(AssertionError):
    """The daemon said what it must not."""


class _Said(msgspec.Struct):
    """A message of the daemon, as far as it is checked."""

    jsonrpc: str
    id: int | str | None = None
    method: str | None = None
    error: dict[str, Any] | None = None


class Conversation:
    """One connection: what it sends is fixed by its chance, what it hears is checked.

    Args:
        path: The daemon's socket.
        chance: What decides.
        frames: How many frames it sends, about.
    """

    def __init__(self, path: str, chance: Random, frames: int) -> None:
        self.frames = frames
        self.kinds: collections.Counter[str] = collections.Counter()
        self.is_over = False
        self.heard_s = time.monotonic()
        self._chance = chance
        self._encoding = chance.choice(tuple(Encoding))
        self._end = chance.choices([*ENDS], [*ENDS.values()])[0]
        self._tiny_bytes = 5000 if chance.random() < 0.1 else 0
        self._splitter = FrameSplitter(64 << 20, self._encoding)
        self._read: Any = (
            msgspec.json.Decoder(_Said) if self._encoding is Encoding.JSON
            else msgspec.msgpack.Decoder(_Said)
        )  # fmt: skip
        self._expected: collections.Counter[object] = collections.Counter()
        self._is_read_to_end = self._end in ("read all", "half-close")
        self._data = memoryview(self._all_bytes())
        self._has_said_last = False
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.sock.setblocking(False)

    def _all_bytes(self) -> bytes:
        chance, encoding = self._chance, self._encoding
        hello = {"protocol": [1], "fence": "current"}
        parts = []
        if chance.random() < 0.97:
            parts.append(self._message("hello", hello, "h"))
        spoilt = chance.choice((0.0, 0.2, 0.5, 1.0))
        self._ids_hold = chance.random() < 0.5
        names = f"{chance.getrandbits(40):x}-"
        for number in range(self.frames):
            # An id now and then comes twice, while it is unanswered or later.
            its_id = number if chance.random() < 0.98 else max(0, number - chance.randrange(3))
            self._expected[its_id] += 1
            parts.append(
                request(
                    chance, encoding, its_id,
                    names=names, spoilt=spoilt, bytes_too=not self._ids_hold,
                )
            )  # fmt: skip
        for made in ("x" * 300, "", 2**63 - 1, True):
            self._expected[made] += self.frames  # ids that generating.py puts into envelopes
        match self._end:
            case "mid-frame":
                last = self._message("ping", {}, 1)
                parts.append(last[: chance.randrange(1, len(last))])
            case "garbage":
                parts.append(chance.randbytes(chance.randrange(1, 3000)))
                self._is_read_to_end = False
            case "too large" if encoding is Encoding.MSGPACK:
                parts.append(b"\x7f\xff\xff\xff" + bytes(100))
            case "too large":
                parts.append(b'{"' + b"x" * (5 << 20))
            case "read all":
                parts.append(self._message("ping", {}, _LAST))
            case _:
                pass
        return b"".join(parts)

    def _message(self, name: str, params: object, request_id: object) -> bytes:
        self._expected[request_id] += 1
        message = {"jsonrpc": "2.0", "id": request_id, "method": name, "params": params}
        return frame(encoded(self._encoding, message), self._encoding)

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (select.POLLOUT if self._data else 0)

    def go_on(self, events: int) -> None:
        """Send and take what can be."""
        self.heard_s = time.monotonic()
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._take()
        if events & select.POLLOUT and self._data and not self.is_over:
            self._send()

    def _send(self) -> None:
        most = self._chance.randrange(1, 8) if self._tiny_bytes > 0 else _SEND_BYTES
        self._tiny_bytes -= most
        if self._chance.random() < 0.3:
            most = self._chance.randrange(1, most + 1)
        try:
            sent = self.sock.send(self._data[:most])
        except BlockingIOError:
            return
        except OSError:
            self._data = self._data[:0]  # closed for what came before; its answers may be there
            return
        self._data = self._data[sent:]
        if not self._data:
            self._sent_all()

    def _sent_all(self) -> None:
        if self._end == "half-close":
            self.sock.shutdown(socket.SHUT_WR)
        elif self._end in ("leave", "mid-frame", "garbage"):
            self._over()

    def _take(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._over()
            return
        self._splitter.feed(data)
        while not self.is_over and (payload := self._splitter.next_frame()) is not None:
            self._check(self._read.decode(payload))

    def _check(self, said: _Said) -> None:
        if said.method is not None:
            self.kinds["note " + said.method] += 1
            return
        if said.error is not None:
            self._check_error(said.error)
        else:
            self.kinds["result"] += 1
        if said.id is None:
            return
        if self._ids_hold and self._expected[said.id] <= 0:
            raise ViolationError(f"id {said.id!r} was answered more often than it was sent")
        self._expected[said.id] -= 1
        if said.id == _LAST:
            self._has_said_last = True
            self._over()

    def _check_error(self, error: dict[str, Any]) -> None:
        data = error.get("data") or {}
        kind = data.get("kind")
        self.kinds[str(kind)] += 1
        if kind not in KINDS or kind == "internal" or error["code"] != KINDS[kind].code:
            raise ViolationError(f"no typed refusal: {error}")
        if not {"layer", "preserved", "hint", "retryable"} <= data.keys():
            raise ViolationError(f"facts are missing: {error}")

    def _over(self) -> None:
        self.is_over = True
        self.sock.close()


class Fuzz:
    """Conversations until enough frames were sent.

    Args:
        daemon: The daemon.
        seed: Of everything that is sent.
    """

    def __init__(self, daemon: RunnerdProcess, seed: int) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.frames = 0
        self._chance = Random(seed)
        self._daemon = daemon
        self._control = RawClient(daemon.socket_path, hello=False)
        self._control.call("hello", protocol=[1], fence="current")
        self._log = Log(daemon.log_path)
        self._resources = Resources(daemon, self._control)
        self.rss_bytes: list[int] = []

    def run(self, frames: int) -> None:
        """Go on until so many frames were sent; check the daemon every so often and at the end."""
        while self.frames < frames:
            self._round(min(_ROUND_FRAMES, frames - self.frames))
            self._control.call("hello", protocol=[1], fence="current")  # another may be in force
            self._control.call("daemon.undrain")
            end_everything(self._control)
            failures = self._log.failures()
            assert not failures, failures[:3]
            self._resources.check()
            self.rss_bytes.append(self._resources.rss())

    def close(self) -> None:
        """Let go of the connection and the log."""
        self._control.sock.close()
        self._log.close()

    def _round(self, frames: int) -> None:
        talking: dict[int, Conversation] = {}
        poll = select.poll()
        left = frames
        while left > 0 or talking:
            while left > 0 and len(talking) < AT_ONCE:
                count = min(left, self._chance.choice((1, 5, 50, 200, 250, 600)))
                new = Conversation(self._daemon.socket_path, self._fork(), count)
                talking[new.sock.fileno()] = new
                poll.register(new.sock.fileno(), new.events)
                left -= count
                self.frames += count
            for fd, events in poll.poll(1000):
                each = talking[fd]
                each.go_on(events)
                if each.is_over:
                    poll.unregister(fd)
                    del talking[fd]
                    self.kinds += each.kinds
                else:
                    poll.modify(fd, each.events)
            for each in talking.values():
                assert each.heard_s > time.monotonic() - _SILENCE_S, "a conversation hangs"

    def _fork(self) -> Random:
        return Random(self._chance.getrandbits(64))


def main() -> None:
    """Fuzz by hand, for as long as one likes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, daemons(Path(folder)) as start:
        fuzz = Fuzz(start(), given.seed)
        while fuzz.frames < given.frames:
            fuzz.run(min(given.frames, fuzz.frames + 200_000))
            took_s = time.monotonic() - began_s
            print(
                f"{fuzz.frames} frames, {took_s:.0f} s, {fuzz.rss_bytes[-1] >> 10} KiB", flush=True
            )
        fuzz.close()
    for kind, count in fuzz.kinds.most_common():
        print(f"{count:>10} {kind}")


if __name__ == "__main__":
    main()
