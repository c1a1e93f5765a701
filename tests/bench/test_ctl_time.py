"""runnerctl's own time: at most 5 times an empty Python's.

Measured is all of `runnerctl run -- true`, so with the daemon's and the command's part in it,
in pairs with `python -I -c pass`, both from compiled modules as an installed package has them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.daemon.conftest import runnerd_daemon, start_daemon
from tests.harness import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness import RunnerdProcess

__all__ = ["runnerd_daemon", "start_daemon"]

RATIO_MAX = 5.0
PAIRS = 40


@pytest.mark.bench
def test_a_run_costs_at_most_five_empty_pythons(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def time_s(words: list[str]) -> float:
        began_s = time.perf_counter()
        subprocess.run(words, cwd=REPOSITORY, env=environment, check=True, stdin=subprocess.DEVNULL)
        return time.perf_counter() - began_s

    start = "from runnerd.ctl.main import script; script()"
    run = [sys.executable, "-c", start, "--socket", runnerd_daemon.socket_path, "run", "--", "true"]
    empty = [sys.executable, "-I", "-c", "pass"]
    time_s(run)  # compiles
    pairs = [(time_s(run), time_s(empty)) for _ in range(PAIRS)]
    run_s, empty_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = run_s / empty_s
    print(f"run {run_s * 1e3:.1f} ms, empty python {empty_s * 1e3:.1f} ms: {ratio:.2f} x")
    assert ratio <= RATIO_MAX
