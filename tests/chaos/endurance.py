"""Execs in a row, pipelined, and what the daemon's memory makes of it.

`python -m tests.chaos.endurance --execs 100000` is the promise: what is resident after all of
them is at most 3 MB above what it was after the first fifth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Final

from runnerd.protocol.framing import Encoding
from tests.harness import RunnerdProcess, daemons
from tests.raw import RawClient

MB: Final = 1_000_000
GROWS_BYTES_MAX: Final = 3 * MB
_AT_ONCE: Final = 24


def resident_bytes(client: RawClient) -> int:
    """Return the daemon's resident memory, as it says itself."""
    return int(client.call("daemon.info")["rss_bytes"])


class Endurance:
    """Starts of `true`, so many at a time; each is heard to its end.

    Args:
        daemon: Where.
    """

    def __init__(self, daemon: RunnerdProcess) -> None:
        self.client = RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)
        self._ended = 0
        self._sent = 0

    def run(self, execs: int) -> int:
        """Run so many more; returns the daemon's resident bytes then."""
        until = self._ended + execs
        while self._ended < until:
            while self._sent < until and self._sent - self._ended < _AT_ONCE:
                self.client.send(
                    "exec.start", exec_id=f"n{self._sent}", nonce="n", argv=["/bin/true"], attach={}
                )
                self._sent += 1
            self.client.receive()
            for note in self.client.notes:
                if note["method"] == "exec.closed":
                    self._ended += 1
                elif note["method"] == "exec.exited":
                    assert note["params"]["exit"]["code"] == 0, note
            self.client.notes.clear()
            for answer in self.client.answers.values():
                assert "error" not in answer, answer
            self.client.answers.clear()
        return resident_bytes(self.client)


def main() -> None:
    """Run them by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--execs", type=int, default=100_000)
    parser.add_argument("options", nargs="*", help="of runnerd serve, behind --")
    given = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, daemons(Path(folder)) as start:
        endurance = Endurance(start(*given.options))
        said: list[int] = []
        for part in range(10):
            said.append(endurance.run(given.execs // 10))
            took_s = time.monotonic() - began_s
            done = (part + 1) * (given.execs // 10)
            print(f"{done} execs, {took_s:.0f} s, {said[-1] / MB:.2f} MB", flush=True)
        endurance.client.sock.close()
    grown = said[-1] - said[1]
    print(f"grew by {grown / MB:.2f} MB since {given.execs // 5}")


if __name__ == "__main__":
    main()
