"""Cases of the group `inherit`: what a command finds itself with is its own, not the daemon's."""

from __future__ import annotations

import contextlib
import os
import pwd
import site
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.field import ROOM, cgroup, entering, mark, marked, output_of, timed
from tests.harness import REPOSITORY, RunnerdProcess, children, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Completed

    Daemons = Callable[..., RunnerdProcess]


def _printed(daemon: RunnerdProcess, argv: list[str], **fields: object) -> bytes:
    """Run a command that must succeed and say nothing on stderr; returns its stdout."""
    with daemon.connect() as client:
        done: Completed = client.run(argv, timeout_s=30, **fields)  # type: ignore[arg-type]
    assert (done.exit.code, done.stderr) == (0, b""), done
    return done.stdout


def test_c31_sigpipe_kills_as_it_should(runnerd_daemon: RunnerdProcess) -> None:
    """A writer without a reader dies of SIGPIPE, in silence; nothing is ignored or blocked."""
    script = "yes | head -n1; echo ${PIPESTATUS[0]}"
    assert _printed(runnerd_daemon, ["bash", "-c", script], deadline_s=5) == b"y\n141\n"
    masks = _printed(runnerd_daemon, ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"])
    assert masks.split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


def test_c32_no_signal_is_blocked_whatever_the_daemon_is_doing(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """While a command floods the daemon with signals, others start with an empty mask."""
    flood = f"while kill -TERM {runnerd_daemon.pid}; do :; done"
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", flood], attach=False)
        wait_for(lambda: "signal_refused" in runnerd_daemon.log_path.read_text())
        for _ in range(50):
            mask = _printed(runnerd_daemon, ["grep", "SigBlk", "/proc/self/status"])
            assert mask.split() == [b"SigBlk:", b"0" * 16]
        sleeper = client.start(["sleep", "60"], attach=False)
        sleeper.signal(15)
        took_s, its_exit = timed(lambda: sleeper.wait(5))
        assert (its_exit.signal, its_exit.reason) == (15, "exited")
        assert took_s < 0.5 * ROOM
        handle.cancel(0)


def test_c34_no_descriptor_of_one_exec_is_alive_in_another(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """330 starts in a burst: every cat sees its own eof, and a new command has 0 to 2 alone."""
    with RawClient(runnerd_daemon.socket_path) as client:
        sent = [client.send("exec.start", argv=["sleep", "60"]) for _ in range(30)]
        cats = [f"cat-{number}" for number in range(300)]
        for start in range(0, 300, 100):
            sent += [
                client.send("exec.start", exec_id=cat, argv=["sh", "-c", "cat"], stdin="pipe")
                for cat in cats[start : start + 100]
            ]
            for request_id in sent:
                client.answer(request_id)
            sent = []
        for cat in cats:
            began_s = time.monotonic()
            client.call("exec.write", exec_id=cat, data="", eof=True)
            assert client.call("exec.wait", exec_id=cat)["code"] == 0
            assert time.monotonic() - began_s < 1.0 * ROOM
    listing = ["sh", "-c", "ls /proc/self/fd | sort -n | tr '\\n' ' '"]
    assert _printed(runnerd_daemon, listing) == b"0 1 2 3 "


def test_c35_nobody_but_the_daemon_holds_the_socket(start_daemon: Daemons) -> None:
    """After kill -9 a new daemon serves the same path at once; no command holds the socket."""
    needs.root()
    ss = needs.program("ss", "iproute2")
    word = mark(1000)
    fresh_s, first = timed(start_daemon)
    with first.connect() as client:
        client.run(["sh", "-c", f"setsid sleep {word} >/dev/null 2>&1 &"])
        wait_for(lambda: marked(word))
        first.kill()
    took_s, second = timed(lambda: RunnerdProcess(Path(first.socket_path).parent))
    try:
        assert took_s < fresh_s + 1.0 * ROOM  # a start's own time apart
        with second.connect() as client:
            assert client.run(["true"]).exit.code == 0
        listed = subprocess.run([ss, "-xlp"], capture_output=True, text=True, check=True).stdout
        (line,) = [line for line in listed.splitlines() if first.socket_path in line]
        assert line.count("pid=") == 1
        assert f"pid={second.pid}," in line
    finally:
        assert second.stop() == 0
    wait_for(lambda: not marked(word), 2 * ROOM)


@pytest.mark.parametrize("user", [None, "nobody"])
def test_c36_c37_streams_open_by_name(runnerd_daemon: RunnerdProcess, user: str | None) -> None:
    """/dev/stdout, /dev/stderr and /dev/stdin can be opened by the command's own user."""
    if user is not None:
        needs.root()
    with runnerd_daemon.connect() as client:
        script = "echo x > /dev/stdout; echo y > /dev/stderr"
        done = client.run(["sh", "-c", script], user=user)
        assert (done.exit.code, done.stdout, done.stderr) == (0, b"x\n", b"y\n")
        done = client.run(["sh", "-c", script], user=user, pty=Pty())
        assert (done.exit.code, done.stdout, done.stderr) == (0, b"x\r\ny\r\n", b"")
        done = client.run(["cat", "/dev/stdin"], input=b"in\n", user=user)
        assert (done.exit.code, done.stdout, done.stderr) == (0, b"in\n", b"")
        done = client.run(["stat", "-Lc", "%F", "/dev/stdout"], user=user)
        assert done.stdout == b"fifo\n"


@pytest.mark.parametrize(("spool", "state"), [("off", "running"), ("disk", "closed")])
def test_c38_a_client_that_pauses_costs_the_command_nothing(
    start_daemon: Daemons, spool: str, state: str
) -> None:
    """The command's end of a pipe blocks: it waits for a reader and sees no EAGAIN.

    With a spool it need not even wait.
    """
    daemon = start_daemon("--spool", spool)
    with daemon.connect() as client:
        handle = client.start(["seq", "1", "300000"], window_bytes=65536)
        time.sleep(2)  # the case itself: a client that reads nothing for so long
        assert client.inspect(handle.exec_id).state == state
        stdout, stderr = output_of(handle)
    assert handle.exit is not None
    assert (handle.exit.code, len(stdout), stderr) == (0, 1988895, b"")


def test_c40_the_daemons_umask_is_its_own(start_daemon: Daemons, tmp_path: Path) -> None:
    """A daemon started under 0077 gives commands 0022."""
    daemon = start_daemon(wrapper=["sh", "-c", 'umask 0077; exec "$@"', "sh"])
    made = tmp_path / "u"
    script = f"umask; touch {made}; stat -c %a {made}"
    assert _printed(daemon, ["sh", "-c", script]) == b"0022\n644\n"


@pytest.mark.parametrize("user", [None, "nobody"])
def test_c42_every_command_has_the_higher_score(start_daemon: Daemons, user: str | None) -> None:
    """A command and its children run at 900 from their first instruction; the daemon does not."""
    if user is not None:
        needs.root()
    raise_own = 'echo 500 > /proc/self/oom_score_adj; exec "$@"'
    daemon = start_daemon("--oom-score", "keep", wrapper=["sh", "-c", raise_own, "sh"])
    own = Path(f"/proc/{daemon.pid}/oom_score_adj")
    nested = ["sh", "-c", 'sh -c "cat /proc/self/oom_score_adj" & wait']
    for argv in (["cat", "/proc/self/oom_score_adj"], nested):
        assert _printed(daemon, argv, user=user) == b"900\n"
    assert own.read_text() == "500\n"
    with daemon.connect() as client:
        # The shim of the last command may be leaving just now.
        scores = [score for pid in children(daemon.pid) if (score := score_of(pid)) is not None]
        assert scores
        assert set(scores) == {"500\n"}
        assert client.info().oom_order.own_score == 500


def score_of(pid: int) -> str | None:
    """Return a process's oom_score_adj as the kernel shows it, None where it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/oom_score_adj").read_text()
    return None


def test_c42_under_memory_pressure_workers_die_and_the_daemon_lives(
    start_daemon: Daemons,
) -> None:
    """32 workers of 20 MB in 256 MiB: the kernel takes workers, and never the daemon."""
    hog = (
        "import multiprocessing as m,time\n"
        "def f(_):\n b=bytearray(b'x')*(20<<20);time.sleep(30)\n"
        "m.Pool(32).map(f,range(32))"
    )
    with cgroup("memory", "c42") as folder:
        (folder / "memory.limit_in_bytes").write_text(str(256 << 20))
        scored = "echo 500 > /proc/self/oom_score_adj;"
        daemon = start_daemon("--oom-score", "keep", wrapper=entering(folder, scored))
        with daemon.connect() as client:
            handle = client.start([sys.executable, "-c", hog], attach=False, env={"HOME": "/"})

            def killed() -> int:
                text = (folder / "memory.oom_control").read_text()
                return int(text.split("oom_kill ")[1].split()[0])

            wait_for(lambda: killed() >= 5, 30)
            assert client.info().pid == daemon.pid
            assert handle.cancel(0).outcome == "ended"
            info = client.info()
            assert (info.pid, info.oom_order.own_score) == (daemon.pid, 500)
            assert client.run(["true"]).exit.code == 0
        assert daemon.stop() == 0


def test_c44_the_environment_is_the_images_and_not_the_daemons(start_daemon: Daemons) -> None:
    """What the daemon was started with reaches commands, but for RUNNERD_*; replace means only.

    What a bundle of the interpreter sets for itself is tested with the bundle.
    """
    given = {
        "LD_LIBRARY_PATH": "/opt/x",
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *site.getsitepackages()]),
        "PYTHONUNBUFFERED": "1",
        "RUNNERD_LOG_LEVEL": "info",
        "RUNNERD_WHATEVER": "1",
    }
    daemon = start_daemon(env=given)
    seen = dict(
        line.split("=", 1)
        for line in _printed(daemon, ["env"], env={"A": "1"}).decode().splitlines()
        if "=" in line
    )
    expected = {name: value for name, value in given.items() if not name.startswith("RUNNERD_")}
    assert expected.items() <= seen.items()
    assert seen["A"] == "1"
    assert [name for name in seen if name.startswith("RUNNERD_")] == []
    assert _printed(daemon, ["/usr/bin/env"], env={"A": "1"}, env_mode="replace") == b"A=1\n"


def test_c44_a_token_in_the_environment_is_refused(tmp_path: Path) -> None:
    """RUNNERD_TOKEN would stand in an environ for others to read: exit 78, and no socket."""
    path = tmp_path / "runnerd.sock"
    done = subprocess.run(
        [sys.executable, "-m", "runnerd.daemon.main", "serve", "--socket", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "RUNNERD_TOKEN": "secret"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 78
    assert b"RUNNERD_TOKEN" in done.stderr
    assert b"secret" not in done.stderr
    assert not path.exists()


@pytest.mark.parametrize("user", [None, "nobody"])
def test_c44_no_command_reads_the_daemons_or_the_shims_environment(
    start_daemon: Daemons, user: str | None
) -> None:
    """Neither as another user nor as the same one.

    Root is the same one without the capabilities that pass over a process being non-dumpable
    (Linux 6.18 lets CAP_PERFMON do so too); a container's root has none of them.
    """
    needs.root()
    setpriv = needs.program("setpriv", "util-linux")
    daemon = start_daemon(wrapper=[setpriv, "--bounding-set=-sys_ptrace,-perfmon,-sys_admin"])
    read = "for pid in $PPID %d; do tr '\\0' '\\n' </proc/$pid/environ | head -3; done"
    with daemon.connect() as client:
        done = client.run(["sh", "-c", read % daemon.pid], user=user)
    assert done.stdout == b""
    assert done.stderr.lower().count(b"permission denied") == 2


def test_c45_home_and_names_come_from_the_user(runnerd_daemon: RunnerdProcess) -> None:
    """HOME, USER and LOGNAME are the user's; an unknown uid has /; the request always wins."""
    needs.root()
    homed = next(
        entry
        for entry in pwd.getpwall()
        if entry.pw_uid
        and Path(entry.pw_dir).is_dir()
        and entry.pw_dir != "/"
        and not entry.pw_dir.startswith("/root")
    )
    script = "echo $HOME:$USER:$LOGNAME; id -u; cd ~ && pwd"
    argv = ["sh", "-c", script]
    name, home = homed.pw_name, homed.pw_dir
    real = os.path.realpath(home)
    printed = _printed(runnerd_daemon, argv, user=name).decode().splitlines()
    assert printed[:2] == [f"{home}:{name}:{name}", str(homed.pw_uid)]
    assert os.path.realpath(printed[2]) == real
    assert _printed(runnerd_daemon, argv, user="12345") == b"/::\n12345\n/\n"
    nobody = pwd.getpwnam("nobody")
    with runnerd_daemon.connect() as client:
        done = client.run(argv, user="nobody")
        expected = f"{nobody.pw_dir}:nobody:nobody\n{nobody.pw_uid}\n"
        assert done.stdout.decode().startswith(expected)
    for user in (name, "nobody", "12345"):
        given = {"HOME": "/tmp", "USER": "u", "LOGNAME": "l"}
        lines = _printed(runnerd_daemon, argv, user=user, env=given).decode().splitlines()
        assert (lines[0], lines[2]) == ("/tmp:u:l", "/tmp")


def test_c47_a_daemon_without_standard_streams(start_daemon: Daemons) -> None:
    """Started with 0 to 2 closed it fills them, and no stream gets mixed with another."""
    daemon = start_daemon(wrapper=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"])
    ends = {str(Path(f"/proc/{daemon.pid}/fd/{fd}").readlink()) for fd in range(3)}
    assert ends == {"/dev/null"}
    script = "ls -l /proc/self/fd >&2; cat; echo out"

    def run(number: int) -> None:
        with daemon.connect() as client:
            done = client.run(["sh", "-c", script], input=b"in %d\n" % number, timeout_s=30)
        assert (done.exit.code, done.stdout) == (0, b"in %d\nout\n" % number)
        ends = [line.rpartition("-> ")[2] for line in done.stderr.decode().splitlines()[1:]]
        assert [end.partition(":")[0] for end in ends[:3]] == ["pipe"] * 3, done.stderr
        assert len(ends) == 4, done.stderr  # 0 to 2, and the directory ls reads

    run(0)
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(run, range(1, 21)))
    with daemon.connect() as client:
        assert client.info().pid == daemon.pid
