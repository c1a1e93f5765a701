"""What the spool costs: each figure beside the floor it is compared with, in one run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import Attach, ExecAttach, ExecStart
from tests.harness import REPOSITORY, RunnerdProcess

from .test_figures import Pipeline, figure, per_call

# Three attempts, each after a wait for quiet.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

MIB: Final = 1 << 20
BYTES: Final = 2 * 1024 * MIB
REPLAYED: Final = 64 * 10**6
CLIENT: Final = """
import sys
sys.path.insert(0, {repository!r})
from tests.bench.test_spool_figures import {function}
{function}({socket!r})
"""


def as_process(function: str, daemon: RunnerdProcess) -> str:
    """Run one of the functions below in a process of its own; returns what it printed."""
    words = CLIENT.format(repository=str(REPOSITORY), function=function, socket=daemon.socket_path)
    done = subprocess.run(
        [sys.executable, "-c", words], check=True, cwd=REPOSITORY, capture_output=True, text=True
    )
    return done.stdout


def count(client: Pipeline) -> int:
    total = 0
    while (message := client.receive()).method != "exec.exited":
        if message.method == "exec.output":
            total += len(client.codec.decode(message.params, OutputNote).data)
    return total


def stream(socket_path: str) -> None:
    """Start the producer and take everything it writes."""
    argv = ["sh", "-c", f"yes | head -c {BYTES}"]  # as in the figure without a disk
    with Pipeline(socket_path) as client:
        client.send("exec.start", ExecStart(argv=argv, attach=Attach()))
        assert count(client) == BYTES


def stream_and_replay(socket_path: str) -> None:
    """Print the seconds a stream took live, and again from its transcript."""
    argv = ["head", "-c", str(REPLAYED), "/dev/zero"]
    with Pipeline(socket_path) as client:
        began_s = time.perf_counter()
        start = ExecStart(exec_id=f"x{began_s}", argv=argv, attach=Attach())
        client.send("exec.start", start)
        assert count(client) == REPLAYED
        live_s = time.perf_counter() - began_s
        client.until("exec.closed")
        began_s = time.perf_counter()
        client.send("exec.attach", ExecAttach(exec_id=str(start.exec_id)))
        assert count(client) == REPLAYED
        print(live_s, time.perf_counter() - began_s)


def test_streaming_onto_the_disk_is_at_least_0_3_of_a_pipe(
    runnerd_daemon: RunnerdProcess,
) -> None:
    def through_a_pipe() -> None:
        producer = f"yes | head -c {BYTES} | cat > /dev/null"
        subprocess.run(["sh", "-c", producer], check=True, stderr=subprocess.DEVNULL)

    def measure() -> float:
        return statistics.median(
            per_call(through_a_pipe, 1) / per_call(lambda: as_process("stream", runnerd_daemon), 1)
            for _ in range(5)
        )

    figure(
        "2 GiB through runnerd, spooled / through cat, speed", measure, lambda value: value >= 0.3
    )
    with runnerd_daemon.connect() as client:
        assert client.list_execs()[-1].spool == "on"


def test_a_replay_is_at_least_0_3_as_fast_as_the_live_stream(
    runnerd_daemon: RunnerdProcess,
) -> None:
    def measure() -> float:
        ratios = []
        for _ in range(7):
            live_s, replay_s = map(float, as_process("stream_and_replay", runnerd_daemon).split())
            ratios.append(live_s / replay_s)
        return statistics.median(ratios)

    figure("a transcript of 64 MB, replayed / live, speed", measure, lambda value: value >= 0.3)


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_yes_without_a_reader_costs_its_budget(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.run(["true"])
        before = peak_bytes(runnerd_daemon.pid)
        handle = client.start(["yes"], attach=False)
        time.sleep(20)  # the length is what is promised
        growth = peak_bytes(runnerd_daemon.pid) - before
        info = client.inspect(handle.exec_id)
        handle.cancel(grace_s=0)
    print(
        f"\n20 s of yes, {info.last_seq} records, spool {info.spool}: {growth / MIB:.1f} MiB more"
    )
    assert growth <= (32 + 16) * MIB
