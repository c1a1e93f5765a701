"""A flood of output costs its own exec: memory is bounded, nobody else waits for it.

`yes` with no reader, with one that stands still, and with 50 of which 25 do. Beside it `true` is
started again and again, in turns with the flood stopped and running, so that both sides of the
comparison have the same neighbours. 60 s each with RUNNERD_CASES_FULL=1, a few otherwise.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.protocol.framing import Encoding
from tests.bench.test_figures import TRUE, Pipeline, figure
from tests.cases.field import rounds
from tests.cases.looking import peak_rss_bytes
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import RunnerdProcess

# Three attempts, each after a wait for quiet.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

TURN_S: Final = 1.0
OUTPUT_BUDGET_BYTES: Final = 32 << 20
ROOM_BYTES: Final = 16 << 20
PAUSE_MAX_S: Final = 1.0
SLOWER_MAX: Final = 2.0


class Crowd(threading.Thread):
    """Readers of one exec that only read, and note their longest pause while it writes."""

    def __init__(self, daemon: RunnerdProcess, exec_id: str, count: int) -> None:
        super().__init__()
        self.longest_s = 0.0
        self.bytes = 0
        self.is_counting = False
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._clients = attach(daemon, exec_id, count)
        for client in self._clients:
            self._selector.register(client.sock, selectors.EVENT_READ, client)

    def run(self) -> None:
        buffer = bytearray(1 << 18)
        last_s: dict[object, float] = {}
        while not self._over:
            ready = self._selector.select(0.1)
            now_s = time.monotonic()
            if not self.is_counting:
                last_s.clear()
            for key, _ in ready:
                self.bytes += socket.socket.recv_into(key.data.sock, buffer)
                if self.is_counting:
                    pause_s = now_s - last_s.get(key.data, now_s)
                    self.longest_s = max(self.longest_s, pause_s)
                    last_s[key.data] = now_s

    def finish(self) -> None:
        self._over = True
        if self.is_alive():
            self.join()
        for client in self._clients:
            client.sock.close()


def attach(daemon: RunnerdProcess, exec_id: str, count: int) -> list[RawClient]:
    clients = [RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) for _ in range(count)]
    for client in clients:
        client.call("exec.attach", exec_id=exec_id)
    return clients


@contextlib.contextmanager
def crowd(daemon: RunnerdProcess, exec_id: str, count: int) -> Iterator[Crowd]:
    readers = Crowd(daemon, exec_id, count)
    if count:
        readers.start()
    try:
        yield readers
    finally:
        readers.finish()


def latencies_s(client: Pipeline, time_s: float) -> list[float]:
    """Return the times from start to exit of `true`, one after the other."""
    found: list[float] = []
    until_s = time.perf_counter() + time_s
    while (began_s := time.perf_counter()) < until_s:
        client.run(TRUE)
        found.append(time.perf_counter() - began_s)
    return found


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


@pytest.mark.parametrize(("healthy", "stalled"), [(0, 0), (0, 1), (25, 25)])
def test_a_flood_costs_nobody_else(
    runnerd_daemon: RunnerdProcess, healthy: int, stalled: int
) -> None:
    daemon, turns = runnerd_daemon, rounds(30, 4)
    with Pipeline(daemon.socket_path) as client, RawClient(daemon.socket_path) as control:
        latencies_s(client, 0.3)
        Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")  # the peak begins anew, proc(5)
        before_bytes = peak_rss_bytes(daemon.pid)
        command = control.call("exec.start", exec_id="flood", argv=["yes"], grace_s=0)["pid"]
        with (
            crowd(daemon, "flood", healthy) as readers,
            contextlib.ExitStack() as still,
        ):
            for each in attach(daemon, "flood", stalled):
                still.enter_context(each)

            def measure() -> float:
                alone, beside = [], []
                for _ in range(turns):
                    readers.is_counting = False
                    os.kill(command, signal.SIGSTOP)
                    time.sleep(0.05)
                    alone += latencies_s(client, TURN_S)
                    os.kill(command, signal.SIGCONT)
                    time.sleep(0.05)
                    readers.is_counting = True
                    beside += latencies_s(client, TURN_S)
                print(
                    f"\n{healthy} readers and {stalled} that stand still: `true` takes"
                    f" {statistics.median(alone) * 1e3:.2f} and {p99(alone) * 1e3:.2f} ms alone,"
                    f" {statistics.median(beside) * 1e3:.2f} and {p99(beside) * 1e3:.2f} beside"
                    f" (median, p99); longest pause {readers.longest_s:.3f} s,"
                    f" {readers.bytes >> 20} MiB read",
                    file=sys.stderr,
                )
                return p99(beside) / p99(alone)

            figure("p99 beside a flood / alone", measure, lambda value: value <= SLOWER_MAX)
            assert readers.longest_s <= PAUSE_MAX_S
        grown_bytes = peak_rss_bytes(daemon.pid) - before_bytes
        print(f"grown by {grown_bytes / 1e6:.1f} MB")
        assert grown_bytes <= OUTPUT_BUDGET_BYTES + ROOM_BYTES
        control.call("exec.cancel", exec_id="flood")
