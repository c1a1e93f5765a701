"""Whether the daemon is well: what it says of itself, and that others can still find it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.client.blocking import connect
from runnerd.client.errors import ConnectFailed
from runnerd.daemon.listening import Listener
from tests.cases.field import metric
from tests.daemon.looking import log_lines, planted
from tests.harness import RunnerdProcess, wait_for
from tests.proxy import Proxy, Weather
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runnerd.client.blocking import Client

    Start = Callable[..., RunnerdProcess]

NOTICED_S = 5.0
FAST = "from runnerd.daemon import pulse\npulse.PULSE_S = pulse.IDLE_PULSE_S = 0.1\n"
"""A pulse that needs no second; one test has the real one."""

LATE_S = 1.2


class Late(Weather):
    """Everything is late by as much, both ways, and nothing is cut."""

    def __init__(self) -> None:
        super().__init__(0, cut_bytes=0)

    def next_cut_s(self) -> float:
        return 3600.0

    def cut_after_bytes(self) -> int:
        return 1 << 40

    def pieces(self, data: bytes) -> list[tuple[float, bytes]]:
        return [(LATE_S, data)]


def degraded(client: Client) -> set[str]:
    """Return the kinds of trouble, but for a loop that a busy machine has made late."""
    return {str(each.kind) for each in client.health().degraded} - {"loop_lag"}


def reachable(daemon: RunnerdProcess) -> bool:
    try:
        daemon.connect(reconnect_s=0).close()
    except ConnectFailed:
        return False
    return True


# ------------------------------------------------------------------ the socket's file


def test_a_socket_file_that_is_removed_is_bound_again(start_daemon: Start) -> None:
    """Within 5 s, with its mode and lock; who was connected stays so; it is logged and counted."""
    daemon = start_daemon("--socket-mode", "0620")
    path = Path(daemon.socket_path)
    lock_before = Path(f"{path}.lock").stat().st_ino
    with daemon.connect() as before:
        handle = before.start(["cat"], stdin="pipe")
        path.unlink()
        began_s = time.monotonic()
        wait_for(lambda: reachable(daemon), 10)
        assert time.monotonic() - began_s < NOTICED_S
        status = path.lstat()
        assert stat.S_ISSOCK(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o620, os.geteuid())
        assert Path(f"{path}.lock").stat().st_ino == lock_before
        handle.write(b"still here\n", eof=True)
        assert handle.wait(10).code == 0
        assert degraded(before) == {"socket_bound_again"}
        assert metric(before.metrics().text, "runnerd_socket_rebinds_total") == 1
    (line,) = log_lines(daemon, "socket_bound_again")
    assert line["total"] == 1
    assert daemon.stop() == 0
    assert not path.exists()
    assert not Path(f"{path}.lock").exists()


def test_who_had_connected_to_the_removed_socket_is_let_in(start_daemon: Start) -> None:
    """Connections wait at the old socket while the daemon stands still: none of them is lost."""
    daemon = start_daemon(**planted(FAST))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for each in waiting:
            each.connect(daemon.socket_path)
            each.sendall(b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\n')
        Path(daemon.socket_path).unlink()
        time.sleep(0.2)  # so that the beat is due in the same turn as they are
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    for each in waiting:
        each.settimeout(10)
        assert b'"incarnation"' in each.recv(65536)
        each.close()
    wait_for(lambda: reachable(daemon))


@pytest.mark.parametrize("kind", ["file", "socket", "link", "directory"])
def test_what_others_put_there_is_left_alone(start_daemon: Start, kind: str) -> None:
    """It is said, and once it is gone the socket is bound again."""
    daemon = start_daemon(**planted(FAST))
    path, other = Path(daemon.socket_path), Path(daemon.socket_path + ".other")
    with daemon.connect() as client, socket.socket(socket.AF_UNIX) as theirs:
        match kind:
            case "file":
                other.write_text("theirs")
            case "socket":
                theirs.bind(str(other))
            case "link":
                other.symlink_to("/etc/passwd")
            case _:
                path.unlink()
                other.mkdir()
        before = other.lstat().st_ino
        other.rename(path)
        wait_for(lambda: "socket_unreachable" in degraded(client), NOTICED_S)
        time.sleep(0.3)  # some more looks
        assert path.lstat().st_ino == before
        assert client.health().ready
        assert daemon.ctl("health").returncode == 1
        (line,) = log_lines(daemon, "socket_unreachable")
        assert "left alone" in line["reason"]
        path.rmdir() if kind == "directory" else path.unlink()
        wait_for(lambda: reachable(daemon), NOTICED_S)
        assert degraded(client) == {"socket_bound_again"}


def test_a_stop_leaves_alone_what_others_put_there(start_daemon: Start) -> None:
    daemon = start_daemon()
    path = Path(daemon.socket_path)
    path.unlink()
    path.write_text("theirs")
    assert daemon.stop() == 0
    assert path.read_text() == "theirs"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def listener(place: Path) -> Listener:
    return Listener(str(place / "s"))


def trouble(listener: Listener) -> str:
    with pytest.raises(Exception, match=r".") as raised:
        listener.bind_again_if_gone()
    assert type(raised.value).__name__ == "SocketError"
    return str(raised.value)


def rebound(listener: Listener) -> bool:
    before = listener.socket
    found = listener.bind_again_if_gone()
    if found is None:
        return False
    assert found is listener.socket is not before
    before.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.path)
    return True


def test_a_directory_that_is_removed_is_made_again(listener: Listener, place: Path) -> None:
    assert not rebound(listener)
    shutil.rmtree(place)
    assert rebound(listener)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert sorted(each.name for each in place.iterdir()) == ["s", "s.lock"]
    listener.close()
    assert list(place.iterdir()) == []


@pytest.fixture
def long_path() -> Iterator[Path]:
    """A path of 107 bytes, most of them the socket's name: longer through a descriptor."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(f"{folder}/".ljust(107, "s"))


def test_the_longest_name_is_bound_again_too(long_path: Path) -> None:
    listener = Listener(str(long_path), mode=0o620)
    names = sorted(long_path.parent.iterdir())
    for _ in range(3):
        long_path.unlink()
        assert rebound(listener)
        assert stat.S_IMODE(long_path.stat().st_mode) == 0o620
        assert sorted(long_path.parent.iterdir()) == names
    listener.close()
    assert not [*long_path.parent.iterdir()]


def test_the_longest_name_replaces_nothing(
    long_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(str(long_path))
    long_path.unlink()
    link = os.link

    def late(*paths: str) -> None:
        long_path.write_text("another's")
        link(*paths)

    monkeypatch.setattr(os, "link", late)
    assert "File exists" in trouble(listener)
    assert long_path.read_text() == "another's"
    assert len([*long_path.parent.iterdir()]) == 2
    listener.close()


def test_a_new_empty_directory_will_do(listener: Listener, place: Path) -> None:
    place.rename(f"{place}-before")
    place.mkdir(mode=0o755)
    assert rebound(listener)
    listener.close()


def test_a_link_to_itself_in_its_place_is_said(listener: Listener, place: Path) -> None:
    place.rename(f"{place}-before")
    place.symlink_to(place)
    assert "symbolic links" in trouble(listener)
    place.unlink()
    assert rebound(listener)
    listener.close()


@pytest.mark.parametrize("free", [0, 1])
def test_without_descriptors_it_is_said_and_nothing_leaks(listener: Listener, free: int) -> None:
    """It takes one for a directory, and one more for the socket."""
    Path(listener.path).unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(held.pop())
        for _ in range(3):
            assert "Too many open files" in trouble(listener)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert rebound(listener)
    listener.close()


@pytest.mark.parametrize("swap", ["link", "directory"])
def test_a_swapped_directory_is_not_written_to(listener: Listener, place: Path, swap: str) -> None:
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (elsewhere / "s.lock").write_text("somebody's")
    place.rename(f"{place}-before")
    place.symlink_to(elsewhere) if swap == "link" else elsewhere.rename(place)
    assert str(place) in trouble(listener)
    listener.close()
    assert [each.name for each in place.iterdir()] == ["s.lock"]
    assert (place / "s.lock").read_text() == "somebody's"


def test_a_link_to_an_empty_directory_is_not_followed(listener: Listener, place: Path) -> None:
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    place.rename(f"{place}-before")
    place.symlink_to(elsewhere)
    assert str(place) in trouble(listener)
    listener.close()
    assert list(elsewhere.iterdir()) == []


def test_a_link_above_the_directory_leads_nowhere(tmp_path: Path) -> None:
    above, elsewhere = tmp_path / "above", tmp_path / "elsewhere"
    above.mkdir()
    elsewhere.mkdir()
    listener = Listener(str(above / "run" / "s"))
    above.rename(tmp_path / "before")
    above.symlink_to(elsewhere)
    assert "above it" in trouble(listener)
    assert list(elsewhere.iterdir()) == []
    listener.close()


def test_a_directory_that_others_may_write_is_not_used_again(
    listener: Listener, place: Path
) -> None:
    (place / "s").unlink()
    place.chmod(0o777)
    assert "can be written by others" in trouble(listener)
    place.chmod(0o700)
    assert rebound(listener)
    listener.close()


def test_a_daemon_that_took_the_place_keeps_it(listener: Listener, place: Path) -> None:
    """Everything of ours was removed, and another serves there now: it is not disturbed."""
    for each in place.iterdir():
        each.unlink()
    with_lock = Listener(str(place / "s"))
    assert "replaced" in trouble(listener)
    (place / "s").unlink()
    assert "another runnerd serves" in trouble(listener)
    listener.close()
    assert (place / "s.lock").exists()
    assert rebound(with_lock)
    with_lock.close()
    assert list(place.iterdir()) == []


# ------------------------------------------------------------------ what else is told


def test_a_healthy_daemon_is_ready_and_nothing_else(start_daemon: Start) -> None:
    patient = "from runnerd.daemon import health\nhealth.LAG_S = 60.0\n"
    daemon = start_daemon(**planted(patient))
    with daemon.connect() as client:
        health = client.health()
    assert (health.live, health.ready, health.state) == (True, True, "serving")
    assert health.degraded == []
    done = daemon.ctl("health")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ready\n", b"")


def test_a_state_directory_that_cannot_be_had_is_said(start_daemon: Start, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    daemon = start_daemon("--state-dir", str(taken))
    with daemon.connect() as client:
        assert degraded(client) == {"state_lost"}
    done = daemon.ctl("health")
    assert done.returncode == 0
    assert done.stdout.startswith(b"ready, degraded: no state directory: ")
    assert done.stdout.count(b"\n") == 1


def test_a_state_directory_that_is_taken_away_is_noticed(start_daemon: Start) -> None:
    """Also where nothing is written: the journal's thread looks, never the loop."""
    daemon = start_daemon(**planted(FAST))
    with daemon.connect() as client:
        shutil.rmtree(Path(daemon.socket_path).parent / "state")
        wait_for(lambda: degraded(client) == {"state_lost"})
        assert client.run(["true"]).exit.code == 0


def test_a_disk_that_fails_is_said(start_daemon: Start) -> None:
    """The journal and the spool cannot be written: two troubles, and commands run."""
    broken = """
from runnerd.daemon import journal_file, spool_file
def fail(*args, **more):
    raise OSError(5, 'Input/output error')
journal_file.JournalFile.write = fail
spool_file.SpoolFile.write = fail
"""
    daemon = start_daemon("--spool", "any", **planted(broken))
    with daemon.connect() as client:
        assert degraded(client) == set()
        done = client.run(["head", "-c", "3000000", "/dev/zero"])
        assert len(done.stdout) == 3_000_000
        wait_for(lambda: degraded(client) == {"journal_off", "spool_off"})
        assert client.health().ready


def test_a_loop_that_was_late_is_said(start_daemon: Start) -> None:
    """And measured: a loop that stood still was late by that, less a beat at most."""
    daemon = start_daemon(**planted(FAST))
    with daemon.connect() as client:
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(1.3)
        os.kill(daemon.pid, signal.SIGCONT)
        wait_for(lambda: "loop_lag" in {each.kind for each in client.health().degraded})
        assert 1.1 < metric(client.metrics().text, "runnerd_event_loop_lag_seconds") < 10


def test_draining_is_live_and_not_ready(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.drain()
        health = client.health()
        assert (health.live, health.ready, health.state) == (True, False, "draining")
        assert runnerd_daemon.ctl("health").returncode == 0
        assert runnerd_daemon.ctl("health").stdout == b"draining\n"
        assert runnerd_daemon.ctl("health", "--ready").returncode == 1
        waiting = runnerd_daemon.start_ctl("health", "--wait", "20")
        client.undrain()
        assert waiting.communicate(timeout=30)[0] == b"ready\n"
        assert waiting.returncode == 0


def test_stopping_is_unhealthy(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        script = "trap '' TERM; echo; while :; do sleep 0.1; done"
        client.call("exec.start", argv=["sh", "-c", script], stderr="null", attach={})
        wait_for(lambda: client.receive().get("method") == "exec.output")
        client.call("daemon.stop")
        assert client.call("daemon.health")["state"] == "stopping"


def test_liveness_needs_no_free_connection(start_daemon: Start) -> None:
    """All connections are taken: it answers, so it lives, and is not ready for more."""
    daemon = start_daemon("--connections-max", "1")
    with daemon.connect():
        done = daemon.ctl("health")
        assert (done.returncode, done.stdout[:5]) == (0, b"busy:")
        told = json.loads(daemon.ctl("health", "--json").stdout)
        assert (told["live"], told["ready"]) == (True, False)
        assert daemon.ctl("health", "--ready").returncode == 1


def test_who_does_not_answer_is_unhealthy(runnerd_daemon: RunnerdProcess, tmp_path: Path) -> None:
    """No daemon, and one that stands still: exit code 1, one line, a few seconds at most."""
    done = runnerd_daemon.ctl("health", "--socket", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert (done.stdout[:12], done.stdout.count(b"\n")) == (b"unreachable:", 1)
    done = runnerd_daemon.ctl("health", "--socket", str(tmp_path / "nothing"), "--wait", "0.3")
    assert done.returncode == 1
    os.kill(runnerd_daemon.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        done = runnerd_daemon.ctl("health", "--json")
        assert time.monotonic() - began_s < 10
    finally:
        os.kill(runnerd_daemon.pid, signal.SIGCONT)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["live"], told["ready"], told["state"]) == (False, False, None)


def test_a_slow_daemon_gets_three_seconds_in_all(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Not three for its hello and three more for its answer: Kubernetes waits four."""
    with Proxy(tmp_path / "late.sock", runnerd_daemon.socket_path, Late()) as proxy:
        began_s = time.monotonic()
        done = runnerd_daemon.ctl("health", "--socket", proxy.path)
        took_s = time.monotonic() - began_s
    assert done.returncode == 1, done
    assert done.stdout.startswith(b"unreachable:")
    assert 3 <= took_s < 4 * LATE_S


def test_health_waits_for_a_daemon_that_is_still_starting(
    start_daemon: Start, tmp_path: Path
) -> None:
    place = tmp_path / "later"
    place.mkdir()
    other = start_daemon()
    waiting = other.start_ctl("health", "--socket", str(place / "runnerd.sock"), "--wait", "30")
    start_daemon(place=place)
    assert waiting.communicate(timeout=40)[0] == b"ready\n"
    assert waiting.returncode == 0


def test_an_owner_is_not_needed_to_ask(runnerd_daemon: RunnerdProcess) -> None:
    with connect(runnerd_daemon.socket_path, fence=5), runnerd_daemon.connect() as anybody:
        assert anybody.health().live
