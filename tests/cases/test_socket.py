"""Cases of the group `socket`: where the daemon listens, who gets in, and what noise does.

Where the cases and the design differ, the design holds: a missing directory is made (C129).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.client.blocking import connect
from runnerd.daemon.listening import Listener, SocketError
from tests import needs
from tests.cases.field import ROOM, rss_bytes, timed
from tests.harness import REPOSITORY, RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Daemons = Callable[..., RunnerdProcess]

EX_CANTCREAT = 73


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path is short enough for any socket."""
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    yield folder
    shutil.rmtree(folder)


def _serve(path: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Start a daemon that must refuse to; returns how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "runnerd.daemon.main", "serve", "--socket", path],
        cwd=cwd or REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_c128_a_second_daemon_leaves_the_first_alone(runnerd_daemon: RunnerdProcess) -> None:
    """Five more on the same path, at once: all end with 73, socket and lock stay the first's."""
    path = runnerd_daemon.socket_path
    files = [Path(path), Path(f"{path}.lock")]
    before = [(each.stat().st_ino, each.stat().st_ctime_ns) for each in files]
    ended: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: ended.append(_serve(path))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.returncode for each in ended] == [EX_CANTCREAT] * 5
    assert all(path in each.stderr for each in ended)
    assert [(each.stat().st_ino, each.stat().st_ctime_ns) for each in files] == before
    with runnerd_daemon.connect() as client:
        assert client.info().pid == runnerd_daemon.pid


def test_c128_of_many_that_start_at_once_one_serves(tmp_path: Path) -> None:
    """Six at once on a fresh path: one serves, five end with 73."""
    path = tmp_path / "runnerd.sock"
    words = ["-m", "runnerd.daemon.main", "serve", "--socket", str(path)]
    started = [
        subprocess.Popen([sys.executable, *words], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        for _ in range(6)
    ]
    try:
        wait_for(lambda: sum(each.poll() is None for each in started) == 1, 20)
        (winner,) = (each for each in started if each.poll() is None)

        def served_by() -> int | None:
            with contextlib.suppress(OSError), RawClient(str(path)) as client:
                return int(client.call("daemon.info")["pid"])
            return None

        assert wait_for(served_by) == winner.pid
        assert {each.poll() for each in started} == {None, EX_CANTCREAT}
    finally:
        for each in started:
            each.terminate()
            each.wait(10)


def test_c129_a_stale_socket_is_replaced(start_daemon: Daemons) -> None:
    """After kill -9 the next daemon serves the same path within a second."""
    fresh_s, first = timed(start_daemon)
    path = Path(first.socket_path)
    first.kill()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    took_s, second = timed(lambda: RunnerdProcess(path.parent))
    try:
        assert took_s < fresh_s + 1.0 * ROOM  # a start's own time apart
        with second.connect() as client:
            assert client.run(["true"]).exit.code == 0
    finally:
        assert second.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "dangling"])
def test_c129_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    """A file, a directory, a symlink at the path: 73, a message that names it, nothing changed."""
    path, other = tmp_path / "runnerd.sock", tmp_path / "other"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
        (path / "inside").write_text("precious")
    else:
        if kind == "symlink":
            other.write_text("precious")
        path.symlink_to(other)
    before = path.lstat()
    done = _serve(str(path))
    assert done.returncode == EX_CANTCREAT
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    after = path.lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    if kind == "symlink":
        assert other.read_text() == "precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        {"runnerd.sock", *(["other"] if kind == "symlink" else [])}
    )


def test_c129_a_missing_directory_is_made_and_a_missing_parent_is_not(
    short_path: Path, tmp_path: Path
) -> None:
    """One level is made, 0700; more, or where nothing can be made, is a clear error."""
    daemon = RunnerdProcess(tmp_path, "--socket", str(short_path / "new" / "runnerd.sock"))
    try:
        assert stat.S_IMODE((short_path / "new").stat().st_mode) == 0o700
    finally:
        assert daemon.stop() == 0
    for path in (short_path / "none" / "deeper" / "runnerd.sock", Path("/proc/runnerd.sock")):
        done = _serve(str(path))
        assert done.returncode == EX_CANTCREAT
        assert str(path.parent) in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("size", "fits"), [(107, True), (108, False), (200, False)])
def test_c130_the_longest_path_works_and_a_longer_one_is_refused(
    short_path: Path, tmp_path: Path, size: int, *, fits: bool
) -> None:
    """107 bytes are what the kernel takes: never more, and never a path cut short."""
    path = f"{short_path}/".ljust(size, "s")
    assert len(path) == size
    if not fits:
        done = _serve(path)
        assert done.returncode == EX_CANTCREAT
        assert f"{size} bytes" in done.stderr
        assert "107" in done.stderr
        assert [*short_path.iterdir()] == []
        return
    daemon = RunnerdProcess(tmp_path, "--socket", path)
    try:
        with RawClient(path) as client:
            assert client.call("daemon.info")["socket"] == path
    finally:
        assert daemon.stop() == 0


def test_c130_bytes_count_and_not_characters(short_path: Path) -> None:
    """100 characters of two bytes each are too long."""
    path = f"{short_path}/" + "é" * (100 - len(f"{short_path}/"))
    assert len(path) == 100
    done = _serve(path)
    assert done.returncode == EX_CANTCREAT
    assert f"{len(os.fsencode(path))} bytes" in done.stderr


def test_c130_a_relative_path_is_the_start_directorys(short_path: Path) -> None:
    """A relative path works, although the daemon itself does not stay where it was started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runnerd.daemon.main", "serve", "--socket", "runnerd.sock"],
        cwd=short_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )
    try:
        path = short_path / "runnerd.sock"
        wait_for(path.exists)
        with RawClient(str(path)) as client:
            assert client.call("daemon.info")["socket"] == os.path.realpath(path)
    finally:
        process.terminate()
        assert process.wait(10) == 0
    assert [*short_path.iterdir()] == []


@pytest.mark.parametrize("path", ["@abstract", "\0abstract", "/tmp/a\0b", ""])
def test_c130_a_name_without_an_owner_is_refused(path: str) -> None:
    """Abstract names and NUL bytes are no paths; where argv can carry them, the exit is 73."""
    with pytest.raises(SocketError):
        Listener(path)
    if path and "\0" not in path:
        done = _serve(path)
        assert done.returncode == EX_CANTCREAT
        assert "abstract" in done.stderr


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    """/run/runnerd is out of reach of a plain user, who then learns of --socket."""
    folder = tmp_path / "missing" / "folder"
    done = _serve(str(folder / "s"))
    assert done.returncode == EX_CANTCREAT
    assert f"'{folder}'" in done.stderr
    assert "--socket" in done.stderr


HEAD = b'{"jsonrpc":"2.0","id":1,"method":"hello","params":'
NOISE = {
    "no frame end": b"{" + b"x" * (8 << 20),
    "length of 4 GiB": b"\0" + b"\xff\xff\xff\xff",
    "length of minus one, more": b"\0" + b"\xff\xff\xff\xff" + b"x" * (1 << 20),
    "length of 0": b"\0" + b"\0\0\0\0",
    "nested": HEAD + b'{"protocol":' + b"[" * 100_000 + b"]" * 100_000 + b"}}\n",
    "nested objects": HEAD + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}\n",
    "number": HEAD + b'{"protocol":[1e999]}}\n',
    "long string": HEAD + b'{"protocol":[1],"client":"' + b"x" * (10 << 20) + b'"}}\n',
    "duplicate keys": HEAD + b'{"protocol":[7],"protocol":[8]},"method":"nope"}\n',
    "byte order mark": b"\xef\xbb\xbf" + HEAD + b'{"protocol":[1]}}\n',
    "half a character": HEAD + b'{"protocol":[1],"client":"\xe2\x82"}}\n',
    "a list": b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]\n',
    "nested binary": b"\0" + (100_000).to_bytes(4, "big") + b"\x91" * 100_000,
}


def test_c132_noise_costs_nothing_and_disturbs_nobody(runnerd_daemon: RunnerdProcess) -> None:
    """Every kind of nonsense ends in an error or a close, while a good client runs commands.

    1 GiB without a frame end is offered; the daemon closes at its frame limit.
    """
    delays: list[float] = []
    over = threading.Event()

    def good_client() -> None:
        with runnerd_daemon.connect() as client:
            while not over.is_set():
                took_s, done = timed(lambda: client.run(["echo", "hi"], timeout_s=30))
                assert done.stdout == b"hi\n"
                delays.append(took_s)

    good = threading.Thread(target=good_client)
    good.start()
    try:
        wait_for(lambda: len(delays) > 5)
        before = rss_bytes(runnerd_daemon.pid)
        assert _offer(runnerd_daemon, b"{" + b"x" * 65536, 1 << 30) < 64 << 20
        for name, noise in NOISE.items():
            _make_noise(runnerd_daemon, name, noise)
        grown = rss_bytes(runnerd_daemon.pid) - before
        count = len(delays)
        wait_for(lambda: len(delays) > count + 5)
    finally:
        over.set()
        good.join()
    assert grown < 16 << 20
    assert max(delays) < 0.2 * ROOM
    with runnerd_daemon.connect() as client:
        assert client.info().stray_failures == 0
        wait_for(lambda: client.info().connections == 1)
    assert "Traceback" not in runnerd_daemon.log_path.read_text()


def _offer(daemon: RunnerdProcess, piece: bytes, most: int) -> int:
    """Send until the daemon closes; returns the bytes it took."""
    sent = 0
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket_path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < most:
                sent += sock.send(piece if not sent else piece[1:])
    return sent


def _make_noise(daemon: RunnerdProcess, name: str, noise: bytes) -> None:
    """Send it, and nothing more: an error comes back, and the connection ends or is usable."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket_path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(noise)
        sock.settimeout(20)
        answer = sock.recv(1 << 16)
        assert answer, name
        assert b"error" in answer, (name, answer)


def test_c134_the_socket_is_private_from_its_first_moment(
    start_daemon: Daemons, tmp_path: Path
) -> None:
    """The mode is set before the name exists: under strace, fchmod and umask come before bind."""
    strace = needs.program("strace")
    trace = tmp_path / "trace"
    calls = "trace=umask,fchmod,fchmodat,chmod,bind,listen"
    daemon = start_daemon(wrapper=[strace, "-qq", "-e", calls, "-o", str(trace)])
    status = Path(daemon.socket_path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    lines = trace.read_text().splitlines()
    (bind,) = (n for n, line in enumerate(lines) if "bind(" in line and daemon.socket_path in line)
    before = "\n".join(lines[:bind])
    assert re.search(r"fchmod\(\d+, 0600\)", before)
    assert re.findall(r"umask\((\w+)\)", before)[-1] == "0177"
    assert not any("chmod" in line and daemon.socket_path in line for line in lines[bind:])
    with daemon.connect() as client:
        client.stop()  # strace keeps a TERM to itself


def _connecting(path: str) -> str:
    return (
        f"import socket;s=socket.socket(socket.AF_UNIX);s.connect({path!r});"
        'l=b\'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\\n\';'
        "s.sendall(l);print(s.recv(65536).decode())"
    )


def test_c134_a_command_cannot_start_commands(short_path: Path, tmp_path: Path) -> None:
    """An unprivileged command gets EACCES from the kernel; one of our own user is refused."""
    needs.root()
    python = needs.program("/usr/bin/python3", "python3")  # one that nobody may run as well
    path = str(short_path / "runnerd.sock")
    short_path.chmod(0o711)  # the way there is open: it is the socket itself that refuses
    daemon = RunnerdProcess(tmp_path, "--socket", path)
    try:
        with connect(path) as client:
            done = client.run([python, "-c", _connecting(path)], user="nobody", timeout_s=20)
            assert done.exit.code == 1
            assert b"PermissionError" in done.stderr
            done = client.run([python, "-c", _connecting(path)], timeout_s=20)
            assert b"peer_refused" in done.stdout, done
            assert client.info().starts == 2
    finally:
        assert daemon.stop() == 0
