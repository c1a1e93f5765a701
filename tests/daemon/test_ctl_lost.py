"""runnerctl run where its output cannot be had, or its input not be read. Real daemon."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.harness import REPOSITORY, wait_for
from tests.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.harness import RunnerdProcess


@pytest.mark.parametrize("why", ["no room", "forgotten"])
def test_a_start_told_again_without_its_output_still_has_its_exit(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path, why: str
) -> None:
    """It was waited for output that never came, and for an exit told behind it."""
    daemon = start_daemon("--subscriptions-max", "1")
    up, go = tmp_path / "up", tmp_path / "go"
    script = 'touch "$1"; until [ -e "$2" ]; do sleep 0.02; done; exit 7'
    words = ("run", "--id", "x", "--", "sh", "-c", script, "sh", str(up), str(go))
    with Proxy(tmp_path / "proxy.sock", daemon.socket_path) as proxy, daemon.connect() as client:
        proxy.swallows_after_hello = True
        with through(proxy, daemon, *words) as process:
            wait_for(up.exists)
            proxy.is_down = True
            proxy.cut()
            wait_for(lambda: client.inspect("x").subscriptions == 0)
            if why == "no room":
                client.start(["sleep", "60"])
            else:
                go.touch()
                client.wait("x", until="closed")
                client.forget("x")
            proxy.swallows_after_hello = proxy.is_down = False
            wait_for(lambda: proxy.connections == 2)
            go.touch()
            _, said = process.communicate(timeout=30)
    assert process.returncode == 7
    assert said.startswith(
        b"runnerctl: connection lost; reconnecting\nrunnerctl: no more of the output "
    )
    assert b"runnerctl logs x" in said


@contextlib.contextmanager
def through(proxy: Proxy, daemon: RunnerdProcess, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start runnerctl through a proxy; at the end it is killed, if need be."""
    line = [proxy.path if word == daemon.socket_path else word for word in daemon.ctl_words(*words)]
    process = subprocess.Popen(line, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def broken_in_the_middle() -> int:
    """Return an end of a socket that gives four bytes, and an error then."""
    there, here = socket.socketpair()
    with there, here:
        here.send(b"unread")
        there.send(b"half")
        there.close()
        return os.dup(here.fileno())


@pytest.mark.parametrize(
    ("open_input", "reason"),
    [
        (lambda: os.open("/proc/self/mem", os.O_RDONLY), b"input/output error"),
        (broken_in_the_middle, b"connection reset by peer"),
    ],
    ids=["at once", "in the middle"],
)
def test_an_input_that_cannot_be_read_is_no_end_of_input(
    runnerd_daemon: RunnerdProcess, open_input: Callable[[], int], reason: bytes
) -> None:
    """`cat >backup` must not take half of it for all of it, and end with 0."""
    descriptor = open_input()
    try:
        done = runnerd_daemon.ctl("run", "-i", "--", "wc", "-c", stdin=descriptor)
    finally:
        os.close(descriptor)
    said = b"runnerctl: cannot read standard input: %s\n" % reason
    said += b"runnerctl: ended by a cancel (signal 15)\n"
    assert (done.returncode, done.stdout, done.stderr) == (125, b"", said)


def test_an_input_not_open_to_be_read_is_an_empty_one(runnerd_daemon: RunnerdProcess) -> None:
    """As a closed one is."""
    descriptor = os.open("/dev/null", os.O_WRONLY)
    try:
        done = runnerd_daemon.ctl("run", "-i", "--", "wc", "-c", stdin=descriptor)
    finally:
        os.close(descriptor)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"0\n", b"")
