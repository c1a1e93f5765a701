"""How a container ends, and what its state then tells: stop, crash, deadline; and its zombies."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.client.errors import ClientError
from runnerd.protocol.daemon_requests import DaemonUndrain
from tests.containers.container import AS_AGENT, AS_ROOT
from tests.containers.planting import planted
from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Client
    from tests.containers.container import Container

    Start = Callable[..., Container]

STUBBORN: Final = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 9; done"]
ON_UNDRAIN: Final = """
from runnerd.daemon import methods
def planted(call, params):
    {how}
methods.HANDLERS["daemon.undrain"] = planted
"""
ON_ACCEPT: Final = """
import os
from runnerd.daemon import server
original = server.Server._admit
def planted(self, sock, nursery):
    if os.path.exists("/run/runnerd/fail"):
        raise ValueError("planted")
    original(self, sock, nursery)
server.Server._admit = planted
"""
"""A core task's own failure, once a file is there."""
SCHEDULING_S: Final = 1.5  # the engine's own part of a stop, on a machine that others use too


def asked_to_undrain(client: Client) -> None:
    """Reach what is planted there; no answer comes of it."""
    with contextlib.suppress(ClientError):
        client.call("daemon.undrain", DaemonUndrain(), timeout_s=1)


def test_docker_stop_is_quick_and_ends_with_0(container: Start) -> None:
    """Idle, with commands that end when asked, and with one that does not."""
    took: list[float] = []
    for commands in ([], [["sleep", "900"]] * 10, [STUBBORN]):
        sandbox = container(**AS_ROOT)
        with sandbox.connect() as client:
            for command in commands:
                client.start(command, attach=False)
            took.append(sandbox.stop())
        state = sandbox.state()
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
        assert not sandbox.log_lines("uncaught_error")
    print("docker stop: idle, ten, a stubborn one:", *(f"{each:.2f} s" for each in took))
    assert max(took[:2]) < 0.3 + SCHEDULING_S
    assert 1.5 <= took[2] < 2.0 + SCHEDULING_S


def test_an_uncaught_error_ends_the_container_with_70(container: Start, tmp_path: Path) -> None:
    sandbox = container(
        options=(*AS_ROOT["options"], *planted(ON_ACCEPT, tmp_path)), serve=AS_ROOT["serve"]
    )
    with sandbox.connect() as client:
        client.start(["sleep", "900"], attach=False)
    (sandbox.folder / "fail").touch()
    with pytest.raises(ClientError):
        sandbox.connect(reconnect_s=0)
    assert sandbox.wait() == 70
    state = sandbox.state()
    assert (state["ExitCode"], state["OOMKilled"]) == (70, False)
    (line,) = sandbox.log_lines("uncaught_error")
    assert "planted" in line["traceback"]


def test_a_stuck_loop_is_ended_at_two_seconds_with_0(container: Start, tmp_path: Path) -> None:
    """With the GIL held, so that nothing of Python's runs any more."""
    code = ON_UNDRAIN.format(how='__import__("re").match(r"(a*)*b", "a" * 64)')
    sandbox = container(
        options=(*AS_ROOT["options"], *planted(code, tmp_path)), serve=AS_ROOT["serve"]
    )
    with sandbox.connect(reconnect_s=0) as client:
        client.start(["sleep", "900"], attach=False)
        asked_to_undrain(client)
        took_s = sandbox.stop()
    print(f"docker stop with a stuck loop: {took_s:.2f} s")
    assert sandbox.state()["ExitCode"] == 0
    assert 1.9 <= took_s < 2.0 + SCHEDULING_S


def test_a_killed_daemon_is_137_without_last_words(container: Start) -> None:
    """And nothing of its commands outlives it."""
    sandbox = container(**AS_AGENT)
    with sandbox.connect(reconnect_s=0) as client:
        client.start(["sleep", "900"], attach=False)
    sandbox.engine.docker("kill", "--signal", "KILL", sandbox.name)
    assert sandbox.wait() == 137
    assert not sandbox.state()["OOMKilled"]
    assert not sandbox.log_lines("stopping")


@pytest.mark.parametrize("tini", [True, False], ids=["tini", "pid-1"])
def test_zombies_are_reaped(container: Start, tini: bool) -> None:
    """Two hundred orphans of all kinds: each is gone soon after its end."""
    sandbox = container(**AS_ROOT, tini=tini)
    script = "for n in $(seq 20); do (setsid sh -c 'sleep 0.05 & sleep 0.02' &) ; done; echo done"
    with sandbox.connect() as client:
        for _ in range(10):
            assert client.run(["sh", "-c", script]).stdout == b"done\n"
        wait_for(lambda: not [each for each in sandbox.processes() if not is_expected(each)])
        assert client.info().live_execs == 0


def is_expected(pid: int) -> bool:
    """Whether it is tini, the daemon or a parked shim with its child, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    name = stat.partition("(")[2].rpartition(")")[0]
    is_ours = name in {"tini", "runnerd", "runnerd-shim"}
    return is_ours and stat.rpartition(")")[2].split()[0] != "Z"


def test_pause_gives_frozen_time_back(container: Start) -> None:
    """A deadline of 2 s, and a pause of 6: more than 5 s is told from a loop that was only busy."""
    sandbox = container(**AS_ROOT)
    with sandbox.connect() as client:
        began_s = time.monotonic()
        handle = client.start(["sleep", "900"], attach=False, deadline_s=2.0, grace_s=0.1)
        sandbox.engine.docker("pause", sandbox.name)
        time.sleep(6)  # what it is paused for is what is tested
        assert sandbox.state()["Status"] == "paused"
        resumed_s = time.monotonic()
        sandbox.engine.docker("unpause", sandbox.name)
        # Its deadline has passed by the clock, and it lives.
        assert client.inspect(handle.exec_id).state == "running"
        its_exit = client.wait(handle.exec_id, timeout_s=20)
        ran_s = time.monotonic() - resumed_s
        print(f"ended {ran_s:.2f} s after the pause, {time.monotonic() - began_s:.2f} s in all")
        assert its_exit.reason == "deadline"
        assert ran_s > 1.0
        assert client.run(["echo", "x"]).stdout == b"x\n"
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0
