"""What a killed run leaves of its engine is cleared away by the next, or by .ci/run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.containers import images
from tests.harness import REPOSITORY, is_alive, wait_for

if TYPE_CHECKING:
    from tests.containers.engine import Engine

RUN: Final = """
import subprocess, sys, time
from pathlib import Path
from tests.containers.engine import Engine
engine = Engine(Path(sys.argv[1]))
subprocess.run(
    ["sh", "-c", f"tar -c -C {sys.argv[2]} eat | {engine.program} import - small"],
    env=engine.environment, check=True, stdout=subprocess.DEVNULL,
)
engine.docker("run", "--detach", "--network", "none", "small", "/eat", "1", "1")
print(engine.home, engine.process.pid, flush=True)
time.sleep(900)
"""


def test_a_killed_run_leaves_nothing_after_a_sweep(engine: Engine, tmp_path: Path) -> None:
    """Owner and engine are killed at once: the container, its mounts and cgroups are left."""
    images.compile_c(images.EAT, tmp_path / "eat", "-static")
    words = [sys.executable, "-c", RUN, str(images.KEPT / "engine"), str(tmp_path)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        home, dockerd = run.stdout.readline().decode().split()
        os.kill(int(dockerd), signal.SIGKILL)
        run.kill()
    group = Path("/sys/fs/cgroup/pids") / Path(home).name
    procs = [int(pid) for each in group.rglob("cgroup.procs") for pid in each.read_text().split()]
    assert len(procs) == 1
    assert home in Path("/proc/mounts").read_text()
    subprocess.run(
        [sys.executable, "tests/containers/engine.py", "sweep"], cwd=REPOSITORY, check=True
    )
    wait_for(lambda: not is_alive(procs[0]))
    assert home not in Path("/proc/mounts").read_text()
    assert not Path(home).exists()
    assert not [*Path("/sys/fs/cgroup").glob(f"*/{group.name}")]
    # The run's own has an owner who lives: it is left alone.
    assert engine.ask("ps").returncode == 0
