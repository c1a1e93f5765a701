"""What runnerd adds to a container's start, and an exec by its socket beside the engine's own."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.client.blocking import connect
from runnerd.client.errors import ConnectFailed
from runnerd.protocol.notes import OutputNote
from tests.bundles import built_bundle
from tests.containers.conftest import container, engine
from tests.containers.container import AS_ROOT, Container

from .test_figures import figure, per_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Client
    from tests.containers.engine import Engine

__all__ = ["container", "engine"]

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

ROUNDS: Final = 5
PATIENCE_S: Final = 20.0


def connect_soon(path: str) -> Client:
    """Connect as a spawner does: again and again until somebody listens."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return connect(path)
        except ConnectFailed:
            assert time.monotonic() < until_s
            time.sleep(0.002)


def first_byte_s(running: Engine) -> float:
    """Return the seconds from `docker run` to the first byte of the first exec."""
    began_s = time.perf_counter()
    sandbox = Container(running, **AS_ROOT)
    try:
        with connect_soon(sandbox.socket_path) as client:
            handle = client.start(["echo", "x"])
            note = next(iter(handle.output(PATIENCE_S)))
            took_s = time.perf_counter() - began_s
            assert isinstance(note, OutputNote)
            return took_s
    finally:
        sandbox.remove()


def run_true(running: Engine) -> None:
    """Run `true` in a container that is made alike."""
    tmpfs = ("--tmpfs", "/var/lib/runnerd:size=8m")
    words = ("run", "--network", "none", *tmpfs, "--volume", f"{running.home}/run:/run/runnerd")
    running.docker(*words, *AS_ROOT["options"], "--entrypoint", "/bin/true", "rd-bare")


def ready_s(bundle: Path, folder: Path) -> float:
    """Return the seconds that the bundle's daemon takes to be ready, without a container."""
    read_fd, write_fd = os.pipe()
    words = ["serve", "--socket", str(folder / "sock"), "--state-dir", str(folder / "state")]
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [bundle / "bin/runnerd", *words, "--ready-fd", str(write_fd)],
        pass_fds=[write_fd],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_fd)
    assert os.read(read_fd, 10)
    took_s = time.perf_counter() - began_s
    os.close(read_fd)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    return took_s


def test_the_first_byte_comes_within_1_5_runs_and_the_daemons_own_start(
    engine: Engine, tmp_path: Path
) -> None:
    bundle = built_bundle()
    (engine.home / "run").mkdir(exist_ok=True)

    def measure() -> float:
        ratios = []
        for number in range(ROUNDS):
            own_s = ready_s(bundle, tmp_path / str(number))
            floor_s = per_call(functools.partial(run_true, engine), 1)
            took_s = first_byte_s(engine)
            ratios.append((took_s - own_s) / floor_s)
            print(f"\nrun true {floor_s:.3f} s, ready {own_s:.3f} s, first byte {took_s:.3f} s")
            shutil.rmtree(tmp_path / str(number))
        engine.docker("container", "prune", "--force")
        return statistics.median(ratios)

    figure(
        "docker run to the first exec's first byte, less the daemon's own start / docker run true",
        measure,
        lambda value: value <= 1.5,
    )


def test_an_exec_by_the_socket_is_20_times_faster_than_the_engines(
    container: Callable[..., Container],
) -> None:
    sandbox = container(**AS_ROOT)
    with sandbox.connect() as client:

        def measure() -> float:
            ratios = []
            for _ in range(ROUNDS):
                ours_s = per_call(functools.partial(client.run, ["true"]), 40)
                ratios.append(per_call(lambda: sandbox.exec("true"), 3) / ours_s)
                print(f"\nan exec by the socket: {ours_s * 1000:.2f} ms")
            return statistics.median(ratios)

        figure("docker exec true / true by a kept connection", measure, lambda value: value >= 20)
