"""What a container with runnerd in it is: who is PID 1, who may do what, in which image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.containers.container import AS_AGENT, AS_ROOT
from tests.containers.images import AGENT, HOSTILE
from tests.harness import children, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.containers.container import Container

    Start = Callable[..., Container]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def status(text: str) -> dict[str, str]:
    """Read a /proc/PID/status."""
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


@pytest.mark.parametrize("how", [AS_ROOT, AS_AGENT], ids=["root", "agent"])
def test_tini_is_pid_1_and_runnerd_its_child(container: Start, how: dict[str, Any]) -> None:
    """As PID 1 says itself, from inside; and commands have nothing that they do not need."""
    sandbox = container(**how)
    pid, daemon = sandbox.pid(), sandbox.daemon_pid()
    assert (name_of(pid), name_of(daemon)) == ("tini", "runnerd")
    wait_for(lambda: {name_of(each) for each in children(daemon)} == {"runnerd-shim"})
    with sandbox.connect() as client:
        assert client.info().state == "serving"
        inside = client.run(["cat", "/proc/1/comm", "/proc/self/status"])
        assert inside.stdout.startswith(b"tini\n")
        theirs = status(inside.stdout.decode())
        ours = status(Path(f"/proc/{daemon}/status").read_text())
        assert theirs["Uid"].split() == [str(AGENT)] * 4
        assert int(theirs["CapEff"], 16) == int(theirs["CapPrm"], 16) == 0
        assert theirs["NoNewPrivs"] == ours["NoNewPrivs"] == "1"
        assert ours["Seccomp"] == "2"
        # CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID: 0, 5, 6, 7, capabilities(7).
        expected = 0b11100001 if how is AS_ROOT else 0
        assert int(ours["CapEff"], 16) == int(ours["CapBnd"], 16) == expected
        denied = client.run(["sh", "-c", "echo x > /etc/x; echo y > /opt/runnerd/bin/y"])
        assert denied.exit.code != 0
        assert client.run(["sh", "-c", "echo x > /tmp/x && cat /tmp/x"]).stdout == b"x\n"
        assert client.info().journal
    took_s = sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0
    print(f"docker stop took {took_s:.2f} s")


def test_runnerd_may_be_pid_1(container: Start) -> None:
    sandbox = container(**AS_ROOT, tini=False)
    with sandbox.connect() as client:
        assert client.run(["cat", "/proc/1/comm"]).stdout == b"runnerd\n"
        # Orphans come to it, and are reaped.
        client.run(["sh", "-c", "setsid sh -c 'sleep 0.1' & exit 0"])
        wait_for(lambda: {name_of(each) for each in children(sandbox.pid())} == {"runnerd-shim"})
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0


@pytest.mark.parametrize("image", ["rd-bare", "rd-python", "rd-broken", "rd-hostile"])
def test_every_image_has_it_and_keeps_its_own(container: Start, image: str) -> None:
    """The daemon needs nothing of the image; a command sees all of the image's environment."""
    sandbox = container(image, **AS_ROOT)
    with sandbox.connect() as client:
        env = client.run(["env"]).stdout.decode().splitlines()
        expected = HOSTILE if image == "rd-hostile" else ()
        assert set(expected) <= set(env)
        assert not [line for line in env if "/opt/runnerd" in line or line.startswith("RUNNERD_")]
        if image == "rd-bare":
            assert client.run(["sh", "-c", "command -v python3"]).exit.code == 127
        if image == "rd-python":
            done = client.run(["python3", "-c", "import sys; print(sys.prefix)"])
            assert done.stdout == b"/usr\n"
        if image == "rd-broken":
            done = client.run(["python3", "-c", "pass"])
            assert (done.exit.code, done.stderr) == (1, b"this Python is broken\n")
        assert client.info().stray_failures == 0
    ran = sandbox.exec("/opt/runnerd/bin/runnerctl", "run", "--", "echo", "by the engine")
    assert (ran.returncode, ran.stdout) == (0, b"by the engine\n"), ran.stderr
    sandbox.stop()
    assert sandbox.state()["ExitCode"] == 0
