"""Container after container, with clients that are killed: nothing is ever left."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.containers.container import AS_AGENT, AS_ROOT
from tests.containers.test_ending import is_expected
from tests.harness import REPOSITORY, descendants, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.containers.container import Container
    from tests.containers.engine import Engine

    Start = Callable[..., Container]

IS_FULL: Final = bool(os.environ.get("RUNNERD_CASES_FULL"))
CONTAINERS: Final = 50 if IS_FULL else 6
EXECS: Final = 20
SEED: Final = 6

CLIENT: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from runnerd.client.blocking import connect, connect_command
first, *words = sys.argv[2:]
client = connect_command(words) if words else connect(first)
while line := sys.stdin.readline():
    print("up", flush=True)
    done = client.run(["sh", "-c", line])
    print(done.exit.code, flush=True)
"""
"""Runs what it is told, one line after the other, and may be killed at any point of it."""

TREE: Final = (
    "(setsid sleep 900 &); sleep 901 & (sleep 0.01 &); head -c 100000 /dev/zero; exit 3\n",
    "echo x; exit 3\n",
    "sleep 0.05 & exit 3\n",
)


class Caller:
    """One client in a process of its own."""

    def __init__(self, sandbox: Container, by_bridge: bool) -> None:
        words = sandbox.bridge_words() if by_bridge else []
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(REPOSITORY), sandbox.socket_path, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, line: str) -> None:
        """Run one to its end."""
        self.begin(line)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"3\n"

    def begin(self, line: str) -> None:
        """Ask for one, and do not wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode())
        assert self._process.stdout.readline() == b"up\n"

    def kill(self) -> None:
        """Kill it wherever it is."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@pytest.mark.timeout(900)
def test_fifty_containers_of_twenty_execs_leave_nothing(container: Start, engine: Engine) -> None:
    """Six of them unless RUNNERD_CASES_FULL is set."""
    chance = random.Random(SEED)
    before = footprint(engine)
    began_s = time.monotonic()
    kills = 0
    for number in range(CONTAINERS):
        sandbox = container(**(AS_ROOT if number % 2 else AS_AGENT))
        kills += use(sandbox, chance)
        check_nothing_runs(sandbox)
        check_end(sandbox)
        wait_for(lambda: footprint(engine) == before)
    took_s = time.monotonic() - began_s
    print(f"{CONTAINERS} containers, {CONTAINERS * EXECS} execs, {kills} kills: {took_s:.0f} s")
    assert engine.docker("ps", "--all", "--quiet") == ""


def use(sandbox: Container, chance: random.Random) -> int:
    """Run the execs, by either way in; returns how many clients were killed in it."""
    kills = 0
    caller = Caller(sandbox, by_bridge=chance.random() < 0.3)
    for _ in range(EXECS):
        line = chance.choice(TREE)
        if chance.random() < 0.15:
            caller.begin(line)
            time.sleep(chance.random() * 0.03)  # anywhere between its start and its exit
            caller.kill()
            kills += 1
            caller = Caller(sandbox, by_bridge=chance.random() < 0.3)
        else:
            caller.run(line)
    caller.kill()
    return kills + 1


def check_nothing_runs(sandbox: Container) -> None:
    """Once its commands are ended it holds what it held at first: no zombie, no bridge."""
    with sandbox.connect() as client:
        wait_for(lambda: client.info().connections == 1, 20)
        for each in client.list_execs():
            if each.state != "closed":
                client.cancel(each.exec_id, grace_s=0)
        wait_for(lambda: not [pid for pid in sandbox.processes() if not is_expected(pid)])
        assert client.info().stray_failures == 0


def check_end(sandbox: Container) -> None:
    """Nothing of it is left once it was stopped."""
    inside = descendants(sandbox.pid())
    assert inside
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0
    wait_for(lambda: not [pid for pid in inside if Path(f"/proc/{pid}").exists()])
    sandbox.remove()


def footprint(engine: Engine) -> tuple[int, int, int]:
    """Count the engine's cgroups, mounts and processes."""
    shims = [
        pid
        for pid in descendants(os.getpid())
        if b"containerd-shim" in Path(f"/proc/{pid}/comm").read_bytes()
    ]
    return len(engine.groups()), len(engine.mounts()), len(shims)
