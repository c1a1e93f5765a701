"""Cases of the group `resources`: nothing is used up, and at a limit the daemon still answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.client.errors import ClientTimeout, RemoteError
from runnerd.protocol.requests import Pty
from tests.cases.field import ROOM, cgroup, cpu_s, entering, mark, marked, open_fds, rounds, timed
from tests.daemon.looking import log_lines
from tests.harness import children, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Client
    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]


def _threads(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


def test_c121_thousands_of_execs_leave_nothing_open(runnerd_daemon: RunnerdProcess) -> None:
    """Execs of every kind, one after another: descriptors and threads end as they began."""
    pid = runnerd_daemon.pid
    peak = 0
    with runnerd_daemon.connect() as client:
        client.run(["true"])
        wait_for(lambda: client.info().parked_shims == 3)
        fds, threads = open_fds(pid), _threads(pid)
        for _ in range(rounds(5000, 1000) // 10):
            _one_of_each_kind(runnerd_daemon, client)
            peak = max(peak, open_fds(pid))
        wait_for(lambda: open_fds(pid) <= fds + 5, 2 * ROOM)
        wait_for(lambda: _threads(pid) <= threads, 2 * ROOM)

        def is_idle() -> bool:
            info = client.info()
            return (info.live_execs, info.connections, info.subscriptions) == (0, 1, 0)

        wait_for(is_idle, 2 * ROOM)
        wait_for(lambda: len(children(pid)) == client.info().parked_shims)
    assert peak < 64


def _one_of_each_kind(daemon: RunnerdProcess, client: Client) -> None:
    assert client.run(["true"]).exit.code == 0
    assert client.run(["cat"], input=b"x").stdout == b"x"
    assert client.run(["cat"], input=b"x\n", pty=Pty()).stdout == b"x\r\nx\r\n"
    with pytest.raises(RemoteError):
        client.start(["no-such-program-anywhere"], pty=Pty())
    with RawClient(daemon.socket_path) as vanishing:
        vanishing.send("exec.start", argv=["echo", "hi"], attach={}, pty={})
    with pytest.raises(RemoteError):
        client.start(["no-such-program-anywhere"], stdin="pipe")
    handle = client.start(["sleep", "60"], attach=False)
    assert handle.cancel(0).outcome == "ended"
    assert client.run(["sleep", "60"], deadline_s=0.01).exit.reason == "deadline"
    with RawClient(daemon.socket_path) as vanishing:
        vanishing.call("exec.start", argv=["echo", "hi"], attach={})
    with RawClient(daemon.socket_path) as vanishing:
        vanishing.send("exec.start", argv=["echo", "hi"], attach={}, stdin="pipe")


def test_c122_without_descriptors_the_daemon_still_serves(start_daemon: Daemons) -> None:
    """128 descriptors and 200 connections: refusals, no spin, and all is well once they close."""
    daemon = start_daemon(wrapper=["sh", "-c", 'ulimit -n 128; exec "$@"', "sh"])
    held = []
    with daemon.connect() as client:
        victim = client.start(["sleep", "60"], attach=False)
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(daemon.socket_path)
            held.append(sock)
        log_before, cpu_before = len(log_lines(daemon)), cpu_s(daemon.pid)
        began_s = time.monotonic()
        kinds = [_start_at_the_limit(client) for _ in range(30)]
        assert set(kinds) <= {"", "start_failed", "busy"}
        client.ping()
        wait_for(lambda: time.monotonic() - began_s > 2)  # long enough to see a spin
        took_s = time.monotonic() - began_s
        assert cpu_s(daemon.pid) - cpu_before < 0.2 * took_s + 0.2  # the starts' own work
        kinds_logged = Counter(line["event"] for line in log_lines(daemon)[log_before:])
        # Of the shortage itself there may be no line here: it is said once in 5 s.
        assert max(kinds_logged.values(), default=0) <= 11 + took_s, kinds_logged
        assert kinds_logged.total() < 10 * took_s, kinds_logged
        assert victim.signal(15).signalled == 1
        assert victim.wait(5).signal == 15
        for sock in held:
            sock.close()
        wait_for(lambda: _answers(daemon), 1 * ROOM)
        assert client.run(["true"], timeout_s=10).exit.code == 0
        wait_for(lambda: client.info().live_execs == 0)
    assert daemon.stop() == 0


def _start_at_the_limit(client: Client, seconds: str = "1") -> str:
    try:
        client.start(["sleep", seconds], attach=False)
    except RemoteError as error:
        return error.kind
    return ""


def _answers(daemon: RunnerdProcess) -> bool:
    try:
        with RawClient(daemon.socket_path) as client:
            return bool(client.call("ping") == {})
    except (RawError, ClosedError, OSError):
        return False


def test_c122_the_stop_works_at_the_limit(start_daemon: Daemons) -> None:
    """With every descriptor taken, SIGTERM still ends the daemon in time and with 0."""
    word = mark(1013)
    daemon = start_daemon(
        "--connections-max", "500", wrapper=["sh", "-c", 'ulimit -n 128; exec "$@"', "sh"]
    )
    held = []
    with daemon.connect() as client:
        for _ in range(5):
            client.start(["sleep", word], attach=False)
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(daemon.socket_path)
            held.append(sock)
        wait_for(lambda: "accept_failed" in daemon.log_path.read_text())
        kinds = {_start_at_the_limit(client, word) for _ in range(30)}
        assert kinds <= {"", "start_failed", "busy"}
        assert kinds - {""}
        took_s, code = timed(daemon.stop)
    assert code == 0
    assert took_s < 1.0 * ROOM
    assert not marked(word)
    for sock in held:
        sock.close()


def test_c123_without_pids_all_but_a_start_works(start_daemon: Daemons) -> None:
    """At the pids limit three starts find a parked shim, more say EAGAIN, all else answers.

    The case expects EAGAIN at once; the parked shims are the design's rescue lane.
    """
    word = mark(30)
    script = f"for i in $(seq 1 80); do sleep {word} & done; wait"
    with cgroup("pids", "c123") as folder:
        (folder / "pids.max").write_text("64")
        daemon = start_daemon(wrapper=entering(folder))
        with daemon.connect() as client:
            wait_for(lambda: client.info().parked_shims == 3)
            bomb = client.start(["sh", "-c", script], exec_id="bomb", attach=False)
            # Its shell gives up once it cannot fork; what it started stays, and is the exec's.
            current = folder / "pids.current"
            wait_for(lambda: int(current.read_text()) >= 62)
            with contextlib.suppress(ClientTimeout):
                bomb.wait(1)
            outcomes = [_start_at_the_limit(client, "60") for _ in range(10)]
            assert outcomes[:2] == ["", ""]
            assert outcomes[-1] == "start_failed"
            with pytest.raises(RemoteError) as refused:
                client.start(["sleep", "60"], attach=False)
            assert refused.value.kind == "start_failed"
            assert refused.value.data.errno_name == "EAGAIN"
            assert refused.value.data.retryable
            with pytest.raises(RemoteError) as refused:
                client.start(["sleep", "60"], attach=False, pty=Pty())
            assert refused.value.kind == "start_failed"
            assert refused.value.data.errno_name == "EAGAIN"
            assert "bomb" in {each.exec_id for each in client.list_execs(usage=True)}
            assert "runnerd_execs" in client.metrics().text
            with daemon.connect() as other:
                other.ping()
                assert other.signal("bomb", "CONT", to="tree").signalled > 0
            assert bomb.cancel(0).outcome == "ended"
            assert not marked(word)
            took_s, code = timed(lambda: wait_for(lambda: _runs_true(client), 5))
            assert code == 1
            assert took_s < 1.0 * ROOM
        assert daemon.stop() == 0


def _runs_true(client: Client) -> int:
    try:
        return int(client.run(["true"], timeout_s=10).exit.code == 0)
    except RemoteError:
        return 0
