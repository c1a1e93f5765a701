"""runnerctl bridge: a connection on standard input and output, as `docker exec -i` gives it."""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.harness import (
    REPOSITORY,
    RunnerdProcess,
    children,
    is_alive,
    wait_for,
    with_default_signals,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO: Final = b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\n'
BIG: Final = random.Random(1).randbytes(48 << 20)


class Bridge:
    """One bridge with pipes, as an engine starts it."""

    def __init__(self, socket_path: str) -> None:
        start = "from runnerd.ctl.main import script; script()"
        words = [sys.executable, "-c", start, "--socket", socket_path, "bridge"]
        self.process = subprocess.Popen(
            words,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=with_default_signals,  # noqa: PLW1509  # no threads here
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stderr = self.process.stderr

    def end(self) -> tuple[int, bytes]:
        """Wait for its end; returns its code and what it said on standard error."""
        code = self.process.wait(20)
        return code, self.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


class Peer:
    """Listens in a daemon's place and takes one connection."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(20)

    def accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(20)
        return connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path / "peer.sock")
    yield made
    made.close()


@pytest.fixture
def ends(peer: Peer) -> Iterator[tuple[Bridge, socket.socket]]:
    """A bridge, and the other end of the connection it makes."""
    bridge = Bridge(peer.path)
    connection = peer.accept()
    yield bridge, connection
    connection.close()
    bridge.close()


@pytest.fixture
def on_a_socket(peer: Peer) -> Iterator[tuple[socket.socket, socket.socket, Any]]:
    """A bridge with one socket for both streams, as connect_command gives it."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # less than one read of it
    ours.settimeout(20)
    start = "from runnerd.ctl.main import script; script()"
    words = [sys.executable, "-c", start, "--socket", peer.path, "bridge"]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdin=theirs.fileno(), stdout=theirs.fileno())
    theirs.close()
    connection = peer.accept()
    yield ours, connection, process
    connection.close()
    ours.close()
    process.kill()
    process.wait(20)


@pytest.fixture
def bridge(runnerd_daemon: RunnerdProcess) -> Iterator[Bridge]:
    made = Bridge(runnerd_daemon.socket_path)
    yield made
    made.close()


def received(connection: socket.socket, count_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < count_bytes:
        piece = connection.recv(1 << 20)
        assert piece
        data += piece
    return bytes(data)


def test_both_directions_at_once_are_as_they_were(ends: tuple[Bridge, socket.socket]) -> None:
    """48 MiB of any bytes each way, none lost, doubled or changed."""
    bridge, connection = ends

    def write() -> None:
        rest = memoryview(BIG)
        while rest:
            rest = rest[bridge.stdin.write(rest) :]
        bridge.stdin.close()

    there: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: connection.sendall(BIG)),
        threading.Thread(target=write),
        threading.Thread(target=lambda: there.append(received(connection, len(BIG)))),
    ]
    for each in threads:
        each.start()
    assert received_from(bridge, len(BIG)) == BIG
    for each in threads:
        each.join(60)
    assert there == [BIG]
    assert connection.recv(1) == b""
    connection.close()
    assert bridge.end() == (0, b"")


def test_one_direction_that_is_stuck_does_not_hold_up_the_other(
    ends: tuple[Bridge, socket.socket],
) -> None:
    """Nobody reads its output, and it holds no more than one read: the sender has to wait."""
    bridge, connection = ends
    connection.sendall(bytes(40_000))  # a pipe with room for some of the next read, not for all
    wait_for(lambda: _unread(bridge.stdout.fileno()) == 40_000)
    assert fill(connection) < 2 << 20, "so many bytes are held somewhere"
    bridge.stdin.write(b"cancel")
    assert received(connection, 6) == b"cancel"


def test_nor_where_its_streams_are_a_socket(
    on_a_socket: tuple[socket.socket, socket.socket, Any],
) -> None:
    ours, connection, _ = on_a_socket
    assert fill(connection) < 2 << 20, "so many bytes are held somewhere"
    ours.sendall(b"cancel")
    assert received(connection, 6) == b"cancel"


def test_all_that_a_client_left_behind_arrives(
    on_a_socket: tuple[socket.socket, socket.socket, Any],
) -> None:
    """More than one read of it, from a client that has closed: the bridge ends only then."""
    ours, connection, process = on_a_socket
    os.kill(process.pid, signal.SIGSTOP)
    ours.sendall(BIG[:150_000])
    ours.close()
    os.kill(process.pid, signal.SIGCONT)
    assert received(connection, 150_000) == BIG[:150_000]
    assert connection.recv(1) == b""
    assert process.wait(20) == 0


def _unread(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def fill(connection: socket.socket) -> int:
    """Send until nothing more is taken; returns the bytes."""
    connection.setblocking(False)
    sent = 0

    def is_full() -> bool:
        nonlocal sent
        try:
            sent += connection.send(bytes(1 << 16))
        except BlockingIOError:
            return not _moves(connection)
        return False

    wait_for(is_full)
    connection.settimeout(20)
    return sent


def _moves(connection: socket.socket) -> bool:
    """Whether room comes within a tenth of a second."""
    return bool(select.select([], [connection], [], 0.1)[1])


def test_the_end_of_input_is_a_half_close(ends: tuple[Bridge, socket.socket]) -> None:
    bridge, connection = ends
    bridge.stdin.write(b"last")
    bridge.stdin.close()
    assert received(connection, 4) == b"last"
    assert connection.recv(1) == b""
    connection.sendall(b"still said")
    assert bridge.stdout.read(10) == b"still said"
    assert bridge.process.poll() is None
    connection.close()
    assert bridge.stdout.read() == b""
    assert bridge.end() == (0, b"")


def test_the_daemons_end_ends_it_though_input_is_open(ends: tuple[Bridge, socket.socket]) -> None:
    bridge, connection = ends
    connection.sendall(BIG[: 1 << 16])
    connection.close()
    assert received_from(bridge, 1 << 16) == BIG[: 1 << 16]
    assert bridge.end() == (0, b"")


def received_from(bridge: Bridge, count_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < count_bytes and (piece := bridge.stdout.read(count_bytes)):
        data += piece
    return bytes(data)


@pytest.mark.parametrize("first", ["in", "out"])
def test_an_output_that_nobody_reads_any_more_ends_it(
    ends: tuple[Bridge, socket.socket], first: str
) -> None:
    """At once, though the daemon says nothing; what was asked for just before arrives."""
    bridge, connection = ends
    os.kill(bridge.process.pid, signal.SIGSTOP)
    if first == "in":
        bridge.stdin.write(b"cancel")
    bridge.stdout.close()
    if first == "out":
        bridge.stdin.write(b"cancel")
    os.kill(bridge.process.pid, signal.SIGCONT)
    assert received(connection, 6) == b"cancel"
    assert bridge.end() == (0, b"")
    assert connection.recv(1) == b""


def test_a_daemon_talks_through_it(bridge: Bridge) -> None:
    bridge.stdin.write(HELLO)
    answer = json.loads(bridge.stdout.readline())
    assert answer["result"]["incarnation"]
    start: dict[str, Any] = {"argv": ["sh", "-c", "echo out"], "attach": {}}
    asked = {"jsonrpc": "2.0", "id": 2, "method": "exec.start", "params": start}
    bridge.stdin.write(json.dumps(asked).encode() + b"\n")
    while json.loads(line := bridge.stdout.readline()).get("method") != "exec.exited":
        assert line
    bridge.stdin.close()
    assert bridge.end() == (0, b"")


def test_the_end_of_a_daemon_ends_it(bridge: Bridge, runnerd_daemon: RunnerdProcess) -> None:
    bridge.stdin.write(HELLO)
    bridge.stdout.readline()
    assert runnerd_daemon.stop() == 0
    assert b"daemon.stopping" in bridge.stdout.read()
    assert bridge.end() == (0, b"")


@pytest.mark.parametrize("what", ["nothing there", "nobody listens"])
def test_without_a_daemon_it_says_so_and_ends_with_125(tmp_path: Path, what: str) -> None:
    path = tmp_path / "none.sock"
    if what == "nobody listens":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    bridge = Bridge(str(path))
    try:
        assert bridge.stdout.read() == b""
        code, said = bridge.end()
        assert code == 125
        assert said.startswith(b"runnerctl: no runnerd ")
        assert str(path).encode() in said
        assert said.count(b"\n") == 2  # what happened, and what to do
    finally:
        bridge.close()


def test_it_makes_no_thread_and_no_process(bridge: Bridge) -> None:
    """At the pids limit there is none to be had; tests/containers has that case."""
    bridge.stdin.write(HELLO)
    bridge.stdout.readline()
    assert len(os.listdir(f"/proc/{bridge.process.pid}/task")) == 1  # noqa: PTH208
    assert children(bridge.process.pid) == set()


def test_the_flags_of_its_streams_are_left_alone(bridge: Bridge) -> None:
    """They are shared with whoever gave them: a shell, an engine."""
    bridge.stdin.write(HELLO)
    bridge.stdout.readline()
    assert os.get_blocking(bridge.stdin.fileno())
    for number in (0, 1):
        info = Path(f"/proc/{bridge.process.pid}/fdinfo/{number}").read_text()
        flags = int(info.split("flags:")[1].split()[0], 8)
        assert not flags & os.O_NONBLOCK


def test_closed_descriptors_do_not_become_the_connection(runnerd_daemon: RunnerdProcess) -> None:
    done = runnerd_daemon.ctl("bridge", preexec_fn=lambda: os.closerange(0, 2))
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_of_the_daemons_cannot_use_it(runnerd_daemon: RunnerdProcess) -> None:
    """It descends from runnerd, and so does its bridge."""
    with runnerd_daemon.connect() as client:
        done = client.run(
            runnerd_daemon.ctl_words("bridge"), input=HELLO, cwd=str(REPOSITORY), timeout_s=30
        )
    assert json.loads(done.stdout)["error"]["data"]["kind"] == "peer_refused"
    assert done.exit.code == 0


def test_it_is_small(bridge: Bridge) -> None:
    """It stands in the sandbox's memory for as long as its connection lives."""
    bridge.stdin.write(HELLO)
    bridge.stdout.readline()
    assert is_alive(bridge.process.pid)
    with open(f"/proc/{bridge.process.pid}/status") as status:  # noqa: PTH123
        rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    print(f"a bridge: {rss} kB resident")
    assert rss <= 20_000
