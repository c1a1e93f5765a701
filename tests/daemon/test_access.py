"""Nobody gets in who should not: gates, the socket's place and mode, and what can be robbed."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.core.bounds import Bounds
from tests import needs
from tests.daemon.looking import (
    PLANTED,
    TREE,
    living,
    log_lines,
    planted,
    refusal,
    seconds,
    shim_of,
    shims,
    tree_of,
)
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]

NOBODY: Final = 65534
SOMEBODY: Final = 4242
EX_CANTCREAT: Final = 73

CONNECT: Final = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\\n')
print(sock.makefile().readline(), end='', flush=True)
"""
"""Connect, say hello and print the answer."""

HAND_ON: Final = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX)
if os.fork() == 0:
    sock.connect(sys.argv[1])     # recorded as the peer, and gone at once
    os._exit(0)
os.wait()
time.sleep(0.3)
sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":[1]}}\\n')
print(sock.makefile().readline(), end='', flush=True)
"""

ORPHAN: Final = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        time.sleep(0.2)           # its parent is gone by now
        exec(sys.argv[2])
    os._exit(0)
os.wait()
"""


def run_inside(client: RawClient, exec_id: str, argv: list[str]) -> str:
    """Run a command in the daemon and return all it printed, also what it left running."""
    client.call("exec.start", exec_id=exec_id, argv=argv, attach={}, stderr="stdout")
    client.note("exec.closed", exec_id)
    return client.output(exec_id).decode()


FROM_INSIDE: Final[dict[str, tuple[list[str], str]]] = {
    "itself": (["-c", CONNECT, "PATH"], "peer_refused"),
    "in its own session": (["-c", "import os; os.fork() and os._exit(0); os.setsid()\n" + CONNECT,
                            "PATH"], "peer_refused"),
    "a double-forked orphan": (["-c", ORPHAN, "PATH", CONNECT], "peer_refused"),
    # Its end and the daemon's look at it race: both ways it is refused.
    "through a child that is gone": (["-c", HAND_ON, "PATH"], "peer_"),
}  # fmt: skip


@pytest.mark.parametrize("how", FROM_INSIDE)
def test_a_command_cannot_connect(start_daemon: Start, how: str) -> None:
    words, kind = FROM_INSIDE[how]
    daemon = start_daemon()
    argv = [sys.executable, "-I", *(daemon.socket_path if w == "PATH" else w for w in words)]
    with RawClient(daemon.socket_path) as client:
        said = run_inside(client, "e", argv)
        assert f'"kind":"{kind}' in said, said
        assert '"result"' not in said
        text = client.call("daemon.metrics")["text"]
        assert f'runnerd_refusals_total{{kind="{kind}' in text
    lines = log_lines(daemon, "peer_refused")
    assert [line["kind"][: len(kind)] for line in lines] == [kind]
    # The same from outside is let in: it is the descent that decides.
    outside = subprocess.run(
        [sys.executable, "-I", "-c", CONNECT, daemon.socket_path],
        capture_output=True, timeout=20, check=True,
    )  # fmt: skip
    assert b'"result"' in outside.stdout


@pytest.mark.parametrize("how", [how for how in FROM_INSIDE if how != "itself"])
def test_the_twin_without_gate_2_lets_a_command_in(start_daemon: Start, how: str) -> None:
    daemon = start_daemon(
        **planted("from runnerd.daemon import server\nserver.check_peer = lambda *args: None")
    )
    words, _ = FROM_INSIDE[how]
    argv = [sys.executable, "-I", *(daemon.socket_path if w == "PATH" else w for w in words)]
    with RawClient(daemon.socket_path) as client:
        assert '"result"' in run_inside(client, "e", argv)


def test_gate_2_stands_without_pidfds_too(start_daemon: Start) -> None:
    """An engine's seccomp filter says EPERM to pidfd_open: outside goes in, inside does not."""
    daemon = start_daemon(
        **planted("""
            import os
            from runnerd.daemon import access
            access.SO_PEERPIDFD = 99999
            def refused(pid, flags=0):
                raise PermissionError(1, 'not permitted')
            os.pidfd_open = refused
        """)
    )
    with RawClient(daemon.socket_path) as client:
        for number, (words, kind) in enumerate(FROM_INSIDE.values()):
            argv = [sys.executable, "-I"]
            argv += [daemon.socket_path if word == "PATH" else word for word in words]
            assert f'"kind":"{kind}' in run_inside(client, f"e{number}", argv)
        # Also what it ends itself, where a shim is lost, goes without.
        pid = client.call("exec.start", exec_id="lost", argv=TREE)["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        client.call("exec.wait", exec_id="lost", until="closed", timeout_s=10)
        assert living(tree) == set()


CROWD: Final = """
import socket, sys, time
held = []
for _ in range(200):
    sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1]); held.append(sock)
print('up', flush=True); time.sleep(60)
"""
"""Hold connections without a word."""


def let_crowd_in(daemon: RunnerdProcess, client: RawClient) -> None:
    """Have a command connect more often than is allowed, and stay."""
    argv = [sys.executable, "-I", "-c", CROWD, daemon.socket_path]
    client.call("exec.start", exec_id="crowd", argv=argv, attach={})
    client.note("exec.output", "crowd")


def test_commands_that_are_refused_keep_nobody_out(start_daemon: Start) -> None:
    daemon = start_daemon("--connections-max", "16")
    with RawClient(daemon.socket_path) as client:
        let_crowd_in(daemon, client)
        others = [RawClient(daemon.socket_path) for _ in range(14)]
        assert client.call("daemon.info")["connections"] == 15
        for other in others:
            other.sock.close()
        client.call("exec.cancel", exec_id="crowd", grace_s=0)


def test_commands_that_are_refused_keep_nobody_from_being_told_busy(start_daemon: Start) -> None:
    """All who are told why they are refused were counted together: a probe met a closed socket."""
    daemon = start_daemon("--connections-max", "1", "--hello-s", "60")
    with RawClient(daemon.socket_path) as client:
        let_crowd_in(daemon, client)
        assert refusal(daemon.socket_path)["data"]["kind"] == "busy"
        assert daemon.ctl("health").returncode == 0
        # And those who are told it are bounded too.
        held = [RawClient(daemon.socket_path, hello=False) for _ in range(32)]
        with pytest.raises((IndexError, OSError)):
            refusal(daemon.socket_path)
        for each in held:
            each.sock.close()
        wait_for(lambda: is_told_busy(daemon))
        client.call("exec.cancel", exec_id="crowd", grace_s=0)


def test_who_is_refused_and_stays_silent_is_told_why_and_counted_once(start_daemon: Start) -> None:
    daemon = start_daemon("--connections-max", "1", "--hello-s", "1")
    with RawClient(daemon.socket_path) as client:
        with RawClient(daemon.socket_path, hello=False) as silent:
            silent.receive()
            with pytest.raises(ClosedError):
                silent.receive()
            (said,) = silent.errors_without_id
        assert said["error"]["data"]["kind"] == "busy"
        text = client.call("daemon.metrics")["text"]
        assert 'runnerd_refusals_total{kind="busy"} 1' in text
        assert 'kind="hello_required"' not in text


def is_told_busy(daemon: RunnerdProcess) -> bool:
    with contextlib.suppress(IndexError, OSError):
        return bool(refusal(daemon.socket_path)["data"]["kind"] == "busy")
    return False


def connect_as(uid: int, path: str) -> str:
    """Connect as a user, from outside, and return the first line of the answer or the errno."""
    become = f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
    code = f"import encodings.idna, os, socket, sys, time; {become}" + CONNECT
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, path], capture_output=True, text=True, timeout=20,
        check=False,
    )  # fmt: skip
    return done.stdout or done.stderr.splitlines()[-1]


@pytest.fixture
def open_place(tmp_path: Path) -> Iterator[Path]:
    """A directory of ours that every user can get to, which pytest's own are not."""
    needs.root()
    place = Path(f"/tmp/runnerd-test-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir(mode=0o755)
    yield place
    for each in place.rglob("*"):
        if not each.is_dir():
            each.unlink()
    for each in sorted(place.rglob("*"), reverse=True):
        each.rmdir()
    place.rmdir()


def test_another_user_meets_eacces_at_the_socket(start_daemon: Start, open_place: Path) -> None:
    daemon = start_daemon(place=open_place)
    assert "PermissionError" in connect_as(NOBODY, daemon.socket_path)
    assert '"result"' in connect_as(0, daemon.socket_path)


def test_a_user_who_reaches_an_open_socket_still_needs_to_be_allowed(
    start_daemon: Start, open_place: Path
) -> None:
    options = ("--socket-mode", "0666", "--allow-uid", str(SOMEBODY))
    daemon = start_daemon(*options, place=open_place)
    assert '"kind":"unauthorized"' in connect_as(NOBODY, daemon.socket_path)
    assert '"result"' in connect_as(SOMEBODY, daemon.socket_path)
    assert '"result"' in connect_as(0, daemon.socket_path)
    (line,) = log_lines(daemon, "peer_refused")
    assert line["uid"] == NOBODY


def test_the_twin_without_gate_1_lets_any_user_in(start_daemon: Start, open_place: Path) -> None:
    daemon = start_daemon(
        "--socket-mode", "0666", place=open_place,
        **planted("from runnerd.daemon import access\naccess._check_uid = lambda *args: None"),
    )  # fmt: skip
    assert '"result"' in connect_as(NOBODY, daemon.socket_path)


def test_allowed_uids_come_from_a_variable_too(start_daemon: Start, open_place: Path) -> None:
    daemon = start_daemon(
        "--socket-mode", "0666", env={"RUNNERD_ALLOW_UID": f"{SOMEBODY},{NOBODY}"},
        place=open_place,
    )  # fmt: skip
    assert '"result"' in connect_as(NOBODY, daemon.socket_path)
    assert '"result"' in connect_as(SOMEBODY, daemon.socket_path)
    assert '"kind":"unauthorized"' in connect_as(1, daemon.socket_path)


def test_mode_owner_and_group_are_as_asked(start_daemon: Start, open_place: Path) -> None:
    user, group = pwd.getpwuid(NOBODY).pw_name, grp.getgrgid(1).gr_name
    daemon = start_daemon(
        "--socket-mode", "0660", "--socket-owner", user, "--socket-group", group, place=open_place
    )
    status = Path(daemon.socket_path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert (status.st_uid, status.st_gid) == (NOBODY, 1)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_the_socket_is_0600_from_its_first_moment(tmp_path: Path, umask: int) -> None:
    """Seen by someone who looks all the time: never wider, whatever umask was inherited."""
    place, seen, done = tmp_path / "made", set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                seen.add(stat.S_IMODE(os.lstat(place / "s").st_mode))

    watcher = threading.Thread(target=look)
    watcher.start()
    process = subprocess.Popen(
        [*RUNNERD, "serve", "--socket", str(place / "s"), "--log-level", "error"],
        cwd=REPOSITORY, umask=umask,
    )  # fmt: skip
    try:
        wait_for(lambda: can_connect(place / "s"))
        assert stat.S_IMODE(place.stat().st_mode) == 0o700 & ~umask
    finally:
        process.terminate()
        assert process.wait(10) == 0
        done.set()
        watcher.join()
    assert seen == {0o600}


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def serve(path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected to leave by itself."""
    return subprocess.run(
        [*RUNNERD, "serve", "--socket", str(path)], cwd=REPOSITORY, capture_output=True,
        text=True, timeout=20, check=False, **options,
    )  # fmt: skip


def test_a_directory_others_can_write_is_refused_and_not_changed(tmp_path: Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    done = serve(place / "s")
    assert done.returncode == EX_CANTCREAT
    assert "can be written by others" in done.stderr
    assert stat.S_IMODE(place.stat().st_mode) == 0o777
    assert list(place.iterdir()) == []


def test_a_sticky_directory_is_good_enough(start_daemon: Start, tmp_path: Path) -> None:
    place = tmp_path / "sticky"
    place.mkdir()
    place.chmod(0o1777)
    daemon = start_daemon(place=place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o1777
    assert can_connect(Path(daemon.socket_path))


def test_a_directory_of_a_third_user_is_refused(tmp_path: Path) -> None:
    needs.root()
    place = tmp_path / "theirs"
    place.mkdir(mode=0o755)
    os.chown(place, SOMEBODY, SOMEBODY)
    done = serve(place / "s")
    assert done.returncode == EX_CANTCREAT
    assert f"belongs to uid {SOMEBODY}" in done.stderr


@pytest.mark.parametrize("what", ["file", "directory", "symlink", "other server"])
def test_what_is_there_and_no_stale_socket_is_left_alone(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s"
    server = socket.socket(socket.AF_UNIX)
    if what == "file":
        path.write_text("mine")
    elif what == "directory":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        server.bind(str(path))
        server.listen()
    before = os.lstat(path)
    done = serve(path)
    server.close()
    assert done.returncode == EX_CANTCREAT
    assert "left alone" in done.stderr
    assert os.lstat(path).st_ino == before.st_ino
    assert not (tmp_path / "s.lock").exists()


def test_a_stale_socket_is_replaced_and_a_second_daemon_refused(
    start_daemon: Start, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(place / "runnerd.sock"))
    daemon = start_daemon(place=place)
    took_s, done = seconds(lambda: serve(Path(daemon.socket_path)))
    assert done.returncode == EX_CANTCREAT
    assert "another runnerd serves" in done.stderr
    assert took_s < 10
    Path(daemon.socket_path).unlink()  # the lock decides, not the file
    assert serve(Path(daemon.socket_path)).returncode == EX_CANTCREAT
    daemon.stop()
    again = start_daemon(place=place)
    assert can_connect(Path(again.socket_path))


def test_of_many_that_start_at_once_one_serves(tmp_path: Path) -> None:
    path = tmp_path / "s"
    started = [
        subprocess.Popen(
            [*RUNNERD, "serve", "--socket", str(path), "--log-level", "error"],
            cwd=REPOSITORY, stderr=subprocess.DEVNULL,
        )
        for _ in range(6)
    ]  # fmt: skip
    wait_for(lambda: sum(each.poll() is None for each in started) == 1, 30)
    wait_for(lambda: can_connect(path))
    for each in started:
        each.terminate()
    assert sorted(each.wait(10) for each in started) == [0] + [EX_CANTCREAT] * 5
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_cannot_be_given_away_does_not_stay(tmp_path: Path) -> None:
    refused = "import os\ndef no(*a, **n): raise PermissionError(1, 'no')\nos.chown = no"
    done = subprocess.run(
        [*PLANTED, "serve", "--socket", str(tmp_path / "s"), "--socket-owner", "root"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False,
        env={**os.environ, "PLANTED": refused},
    )  # fmt: skip
    assert done.returncode == EX_CANTCREAT, done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ what can be robbed


PARKED: Final = Bounds().parked_shims
ROB: Final = """
import ctypes, os, sys

def take(pid):
    for what in ('environ', 'mem', 'fd', 'maps', 'cwd', 'exe'):
        path = f'/proc/{pid}/{what}'
        try:
            if what == 'fd':
                os.listdir(path)
            elif what in ('cwd', 'exe'):
                os.readlink(path)
            else:
                open(path, 'rb').read(1)
            print('read', what)
        except OSError as error:
            if what == 'mem' and error.errno == 5:
                print('read', what)
    libc = ctypes.CDLL(None)
    pidfd = libc.syscall(434, pid, 0)                         # pidfd_open(2)
    if pidfd < 0:
        print('is gone')
    elif any(libc.syscall(438, pidfd, fd, 0) >= 0 for fd in range(32)):
        print('took a descriptor')                            # pidfd_getfd(2)
    PTRACE_ATTACH = 16
    if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) == 0:
        print('traced')
        os.kill(pid, 18)
    print('done')

for each in sys.argv[1:]:
    take(int(each))
"""
"""What a process of the same user can take of another one."""
ROBBED: Final = [
    *(f"read {what}" for what in ("environ", "mem", "fd", "maps", "cwd", "exe")),
    "took a descriptor",
    "traced",
    "done",
]


AS_NOBODY: Final = """
import argparse, encodings.idna, os, shutil, traceback
import runnerd.daemon.run, runnerd.daemon.options, runnerd.daemon.users
import runnerd.daemon.journal_file
from runnerd.daemon import guard
from runnerd.daemon.linux import PR_SET_DUMPABLE, prctl
guard.NativeGuard.__init__.__defaults__ = (guard.Path('{place}/guard.so'),)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
prctl(PR_SET_DUMPABLE, 1)         # as after an execve, which a daemon's start by its user is
os.chdir('/')
"""
"""Become nobody when all is imported: the interpreter may stand where nobody gets to."""


@pytest.fixture
def start_as_nobody(start_daemon: Start, open_place: Path) -> Callable[[str], RunnerdProcess]:
    """Start a daemon of an unprivileged user whose commands are that user as well."""
    if not Path("/usr/bin/python3").exists():
        needs.skip_or_fail("no /usr/bin/python3")
    for name in ("guard.so", "runnerd-shim"):
        shutil.copy(REPOSITORY / "runnerd" / "_native" / name, open_place)
    os.chown(open_place, NOBODY, NOBODY)

    def start(code: str = "") -> RunnerdProcess:
        shim = str(open_place / "runnerd-shim")
        with_fault = planted(AS_NOBODY.format(place=open_place) + code)
        return start_daemon("--shim", shim, place=open_place, **with_fault)

    return start


def rob(client: RawClient, exec_id: str, *pids: int) -> list[str]:
    argv = ["/usr/bin/python3", "-I", "-c", ROB, *map(str, pids)]
    return run_inside(client, exec_id, argv).split("\n")[:-1]


def test_daemon_and_shim_cannot_be_robbed_by_a_command_of_the_same_user(
    start_as_nobody: Callable[[], RunnerdProcess],
) -> None:
    daemon = start_as_nobody()
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        assert (info["uid"], info["dumpable"]) == (NOBODY, False)
        assert info["guard"] == "native"
        assert rob(client, "daemon", daemon.pid) == ["done"]
        pid = client.call("exec.start", exec_id="other", argv=["sleep", "900"])["pid"]
        assert rob(client, "shim", shim_of(daemon, pid)) == ["done"]
        # The robber's own among them: it takes one of those that are parked until then.
        every = wait_for(lambda: found if len(found := shims(daemon)) == 1 + PARKED else None)
        assert rob(client, "parked", *every) == ["done"] * len(every)
        # The twin: a command is of the same user and can be read, so the robber can rob.
        assert rob(client, "twin", pid) == ROBBED
        client.call("exec.cancel", exec_id="other", grace_s=0)
    assert daemon.stop() == 0


def test_the_twin_that_stays_dumpable_is_robbed(
    start_as_nobody: Callable[[str], RunnerdProcess],
) -> None:
    daemon = start_as_nobody("from runnerd.daemon import boot\nboot.hide_process = lambda: None\n")
    with RawClient(daemon.socket_path) as client:
        assert client.call("daemon.info")["dumpable"] is True
        assert rob(client, "daemon", daemon.pid) == ROBBED


def test_the_error_says_what_to_do(start_daemon: Start, open_place: Path) -> None:
    daemon = start_daemon("--socket-mode", "0666", place=open_place)
    said = connect_as(NOBODY, daemon.socket_path)
    for word in ('"layer":"access"', '"hint":', '"preserved":', '"retryable":false'):
        assert word in said


def test_a_full_house_says_busy(start_daemon: Start) -> None:
    daemon = start_daemon("--connections-max", "2")
    with RawClient(daemon.socket_path), RawClient(daemon.socket_path):
        error = refusal(daemon.socket_path)
        assert error["data"]["kind"] == "busy"
        assert (error["data"]["retryable"], error["data"]["retry_after_s"]) == (True, 1.0)
    wait_for(lambda: connects(daemon))


def connects(daemon: RunnerdProcess) -> bool:
    with contextlib.suppress(RawError, Exception), RawClient(daemon.socket_path):
        return True
    return False
