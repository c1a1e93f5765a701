"""What the daemon does to its own process, and what it says when it is up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.core.bounds import Bounds
from runnerd.daemon.memory import Cgroup, OomCounter, find_cgroup, oom_order
from runnerd.daemon.options import EX_CONFIG, EX_USAGE
from tests import needs
from tests.daemon.looking import log_lines
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]


@contextlib.contextmanager
def serving(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*RUNNERD, "serve", *words], cwd=REPOSITORY, **options)
    try:
        yield process
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def answers(path: Path | str) -> bool:
    with contextlib.suppress(OSError), RawClient(str(path)) as client:
        return client.call("ping") == {}
    return False


def test_ready_is_said_once_the_socket_answers(tmp_path: Path) -> None:
    path, (reader, writer) = tmp_path / "s", os.pipe()
    words = ("--socket", str(path), "--ready-fd", str(writer))
    with serving(*words, pass_fds=(writer,), stderr=subprocess.DEVNULL) as process:
        os.close(writer)
        assert os.read(reader, 100) == b"ready\n"
        assert answers(path)
        assert os.read(reader, 1) == b""  # closed, and no command has it either
        assert process.poll() is None
    os.close(reader)


def leaves_with(code: int, *words: str, **options: Any) -> list[str]:
    """Run a daemon that must leave by itself with this code; returns the lines it said."""
    done = subprocess.run(
        [*RUNNERD, "serve", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=30,
        check=False, **options,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    said: list[str] = done.stderr.splitlines()
    return said


@pytest.mark.parametrize("fd", [3, 4, 5, 6, 9, 987, -1])
def test_a_ready_fd_that_is_closed_is_refused(tmp_path: Path, fd: int) -> None:
    """Under some of these numbers the daemon has opened something of its own by then."""
    socket_path = tmp_path / "s"
    lines = leaves_with(EX_CONFIG, "--socket", str(socket_path), "--ready-fd", str(fd))
    assert lines == [f"runnerd: --ready-fd: descriptor {fd} is not open here"]
    assert not socket_path.exists()


def test_a_ready_fd_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with Path(os.devnull).open() as null:
        lines = leaves_with(
            EX_CONFIG, "--socket", str(tmp_path / "s"), "--ready-fd", str(null.fileno()),
            pass_fds=(null.fileno(),),
        )  # fmt: skip
        said = f"runnerd: --ready-fd: descriptor {null.fileno()} cannot be written"
    assert lines == [said]


def test_a_ready_fd_whose_reader_is_gone_costs_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ("--socket", str(tmp_path / "s"), "--ready-fd", str(writer))
    with serving(*words, stderr=subprocess.DEVNULL, pass_fds=(writer,)):
        os.close(writer)
        wait_for(lambda: answers(tmp_path / "s"))


@pytest.mark.parametrize(
    "words",
    [("--socket-mod", "0600", "extra"), ("--spool", "tape"), ("--nonsense",), ("--ready-fd", "x")],
)
def test_bad_usage_is_said_in_one_line_with_one_of_hint(words: tuple[str, ...]) -> None:
    error, hint = leaves_with(EX_USAGE, *words)
    assert error.startswith("runnerd: ")
    assert words[-1] in error
    assert hint == "hint: runnerd serve --help"


def test_a_number_that_is_none_is_called_that() -> None:
    assert leaves_with(EX_USAGE, "--ready-fd", "x")[0].endswith(
        "--ready-fd: 'x' is no whole number"
    )
    assert leaves_with(EX_USAGE, "--hello-s", "soon")[0].endswith("--hello-s: 'soon' is no number")


@pytest.mark.parametrize("what", ["absent", "folder", "file"])
def test_a_shim_that_cannot_be_executed_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch(0o600)
    (error,) = leaves_with(EX_CONFIG, "--shim", str(tmp_path / what))
    assert error == f"runnerd: --shim: '{tmp_path / what}' is no program that we may execute"


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_the_service_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        name = f"@runnerd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
        notify.bind(name.replace("@", "\0") if abstract else name)
        notify.settimeout(10)
        env = {**os.environ, "NOTIFY_SOCKET": name}
        words = ("--socket", str(tmp_path / "s"))
        with serving(*words, env=env, stderr=subprocess.DEVNULL):
            assert notify.recv(100) == b"READY=1"
            with RawClient(str(tmp_path / "s")) as client:
                client.call("exec.start", exec_id="e", argv=["env"], attach={})
                client.note("exec.closed", "e")
                assert b"NOTIFY_SOCKET" not in client.output("e")
        assert notify.recv(100) == b"STOPPING=1"


def test_a_service_manager_that_is_gone_or_full_holds_nothing_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    filler.sendto(b"x", str(tmp_path / "notify"))
        for name in (str(tmp_path / "notify"), "/nonexistent", "nonsense", "@", "/" + "x" * 200):
            env = {**os.environ, "NOTIFY_SOCKET": name}
            with serving("--socket", str(tmp_path / "s"), env=env, stderr=subprocess.DEVNULL):
                wait_for(lambda: answers(tmp_path / "s"))


def test_log_lines_are_json_with_time_level_and_event(start_daemon: Start) -> None:
    daemon = start_daemon("--log-level", "debug")
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["true"])
        client.call("exec.wait", exec_id="e", until="closed")
        with contextlib.suppress(Exception):
            client.call("exec.start", argv=["/nonexistent/\u00e9\n\x1b[31m"])
    assert daemon.stop() == 0
    lines = log_lines(daemon)
    events = [line["event"] for line in lines]
    for event in ("ready", "exec_started", "exec_exited", "exec_closed", "stopping", "stopped"):
        assert event in events
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["ts"])
        assert line["level"] in ("debug", "info", "warning", "error")
    raw = daemon.log_path.read_bytes()
    assert b"\x1b" not in raw
    assert max(map(len, raw.splitlines())) < 4096
    (ready,) = log_lines(daemon, "ready")
    assert {"socket", "pid", "version", "guard", "oom_verdict", "oom_score"} <= ready.keys()


@pytest.mark.parametrize("how", ["closed", "full", "closed later", "bad"])
def test_a_log_nobody_reads_holds_nothing_up(tmp_path: Path, how: str) -> None:
    """Neither serving nor the stop waits for a reader of stderr, and what is lost is counted."""
    reader, writer = os.pipe()
    if how == "full":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    if how == "closed":
        os.close(reader)
    target = tmp_path / "gone"
    words = ("--socket", str(tmp_path / "s"), "--log-level", "debug")
    if how == "bad":
        os.close(writer)
        writer = os.open(target, os.O_RDONLY | os.O_CREAT)  # every write fails
    with serving(*words, stderr=writer):
        os.close(writer)
        wait_for(lambda: answers(tmp_path / "s"))
        if how == "closed later":
            os.close(reader)
        with RawClient(str(tmp_path / "s")) as client:
            for number in range(60):
                client.call("exec.start", exec_id=f"e{number}", argv=["true"])
            for number in range(60):
                assert client.call("exec.wait", exec_id=f"e{number}")["code"] == 0
            text = client.call("daemon.metrics")["text"]
            found = re.search(r"^runnerd_log_lines_dropped_total (\S+)", text, re.MULTILINE)
            assert found
            assert float(found[1]) > 50
    if how in ("full", "bad"):
        os.close(reader)


def test_an_error_at_boot_with_a_full_log_does_not_hang(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    for words, code in ((["--socket", "/nonexistent/a/b"], 73), (["--user", "no-such"], 78)):
        done = subprocess.run(
            [*RUNNERD, "serve", *words], cwd=REPOSITORY, stderr=writer, timeout=10, check=False
        )
        assert done.returncode == code
    os.close(reader)
    os.close(writer)


def test_help_names_every_option_default_and_exit_code() -> None:
    text = subprocess.run(
        [*RUNNERD, "serve", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    for option in ("--socket", "--allow-uid", "--user", "--state-dir", "--ready-fd", "--cwd"):
        assert option in text
    for name in Bounds.__struct_fields__:
        assert f"--{name.replace('_', '-')} " in text
    assert "RUNNERD_SOCKET_MODE" in text
    top = subprocess.run(
        [*RUNNERD, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for code in ("0 asked to stop", "64", "70", "73", "78"):
        assert code in top


def test_every_option_is_a_variable_and_the_command_line_wins(
    start_daemon: Start, tmp_path: Path
) -> None:
    env = {
        "RUNNERD_HELLO_S": "3.5",
        "RUNNERD_CONNECTIONS_MAX": "17",
        "RUNNERD_SUBSCRIPTIONS_MAX": "19",
        "RUNNERD_CWD": str(tmp_path),
        "RUNNERD_LOG_LEVEL": "debug",
        "RUNNERD_SOMEBODY_ELSES": "x",
    }
    daemon = start_daemon("--connections-max", "18", env=env)
    with RawClient(daemon.socket_path) as client:
        limits = client.hello["limits"]
        assert limits["hello_s"] == 3.5
        assert limits["connections"] == 18
        assert limits["subscriptions"] == 19
        client.call("exec.start", exec_id="e", argv=["sh", "-c", "pwd; env"], attach={})
        client.note("exec.closed", "e")
        where, *variables = client.output("e").decode().splitlines()
        assert where == str(tmp_path)
        assert not [each for each in variables if each.startswith("RUNNERD_")]
    assert log_lines(daemon, "exec_started")


def test_relative_paths_are_from_where_it_was_started(tmp_path: Path) -> None:
    """It changes to / before it uses most of them."""
    (tmp_path / "shim").symlink_to(REPOSITORY / "runnerd" / "_native" / "runnerd-shim")
    words = ["--socket", "s", "--state-dir", "state", "--audit", "audit", "--shim", "shim"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*RUNNERD, "serve", *words], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: answers(tmp_path / "s"))
        with RawClient(str(tmp_path / "s")) as client:
            assert client.call("daemon.info")["journal"] is True
            client.call("exec.start", exec_id="e", argv=["true"])
        wait_for((tmp_path / "audit").read_text)
    finally:
        process.terminate()
        assert process.wait(10) == 0
    assert (tmp_path / "state" / "journal.sqlite").exists()


def test_pkill_of_python_does_not_hit_it(start_daemon: Start) -> None:
    daemon = start_daemon()
    proc = Path(f"/proc/{daemon.pid}")
    assert (proc / "comm").read_text() == "runnerd\n"
    assert (proc / "cmdline").read_bytes().rstrip(b"\0").startswith(b"runnerd serve")
    pkill = needs.program("pgrep", "procps")
    for words in (["-f", "python"], ["python"], ["-f", "runnerd.daemon"]):
        done = subprocess.run([pkill, *words], capture_output=True, text=True, check=False)
        assert str(daemon.pid) not in done.stdout.split()
    # The twin: this test itself is found.
    found = subprocess.run([pkill, "-f", "python"], capture_output=True, text=True, check=False)
    assert str(os.getpid()) in found.stdout.split()
    with RawClient(daemon.socket_path) as client:
        secret = "a-secret-of-the-command"
        pid = client.call("exec.start", exec_id="e", argv=["sh", "-c", f"sleep 9; : {secret}"])[
            "pid"
        ]
        hit = subprocess.run([pkill, "-f", secret], capture_output=True, text=True, check=False)
        assert hit.stdout.split() == [str(pid)]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_standard_streams_closed_at_start_are_filled(
    start_daemon: Start, closed: tuple[int, ...]
) -> None:
    def close() -> None:
        for fd in closed:
            os.close(fd)

    daemon = start_daemon(prepare=close)
    for fd in closed:
        assert Path(f"/proc/{daemon.pid}/fd/{fd}").readlink() == Path("/dev/null")
    with RawClient(daemon.socket_path) as client:
        script = "readlink /proc/self/fd/0; echo out; echo err >&2; ls /proc/self/fd | wc -l"
        client.call("exec.start", exec_id="e", argv=["sh", "-c", script], attach={})
        client.note("exec.closed", "e")
        assert client.output("e").split() == [b"/dev/null", b"out", b"4"]
        assert client.output("e", "stderr") == b"err\n"


def test_nothing_inherited_reaches_a_command(start_daemon: Start, tmp_path: Path) -> None:
    """Descriptors, umask, limits, ignored signals, directory: as if nobody had been there."""
    leak = os.open(tmp_path, os.O_RDONLY)

    def spoil() -> None:
        os.dup2(leak, 77, inheritable=True)
        os.umask(0o777)
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, resource.getrlimit(7)[1]))
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGCHLD})

    daemon = start_daemon(prepare=spoil)
    os.close(leak)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with RawClient(daemon.socket_path) as client:
        script = """umask; ulimit -Sn; ls /proc/self/fd | tr '\\n' ' '; echo; pwd
                    grep -E 'Sig(Ign|Blk)' /proc/self/status"""
        client.call("exec.start", exec_id="e", argv=["sh", "-c", script], attach={})
        client.note("exec.closed", "e")
        mask, nofile, fds, where, blocked, ignored = client.output("e").decode().splitlines()
        assert int(mask, 8) == 0o022
        assert nofile == "123"
        assert fds.split() == ["0", "1", "2", "3"]  # 3 is ls's own
        assert where == "/"
        assert (blocked.split()[1], ignored.split()[1]) == ("0" * 16, "0" * 16)
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    line = next(each for each in limits.splitlines() if each.startswith("Max open files"))
    assert line.split()[3] == str(hard)
    assert Path(f"/proc/{daemon.pid}/cwd").resolve() == Path("/")
    assert is_alive(daemon.pid)


def test_its_own_oom_score_is_lowered_and_said(start_daemon: Start) -> None:
    def raise_score() -> None:
        Path("/proc/self/oom_score_adj").write_text("500")

    kept = start_daemon("--oom-score", "keep", prepare=raise_score)
    with RawClient(kept.socket_path) as client:
        order = client.call("daemon.info")["oom_order"]
        assert (order["own_score"], order["room"], order["lowered"]) == (500, 400, False)
        answer = client.call("exec.start", exec_id="e", argv=["sleep", "9"])
        assert answer["oom_score_adj"] == 900
        score = Path(f"/proc/{answer['pid']}/oom_score_adj").read_text()
        assert score == "900\n"
    needs.root()
    lowered = start_daemon(prepare=raise_score)
    with RawClient(lowered.socket_path) as client:
        order = client.call("daemon.info")["oom_order"]
        own = int(Path(f"/proc/{lowered.pid}/oom_score_adj").read_text())
        assert order["own_score"] == own < 500
        assert (order["lowered"], order["room"]) == (True, 900 - own)
        assert log_lines(lowered, "ready")[0]["oom_score"] == own
        assert 'runnerd_oom_order_info{verdict="' in client.call("daemon.metrics")["text"]


def test_at_a_score_of_1000_it_warns(start_daemon: Start) -> None:
    daemon = start_daemon(
        "--oom-score", "keep", prepare=lambda: Path("/proc/self/oom_score_adj").write_text("1000")
    )
    with RawClient(daemon.socket_path) as client:
        order = client.call("daemon.info")["oom_order"]
        assert order["verdict"] == "equal"
        assert "oom_score_adj is 1000" in order["warnings"][0]
    assert "1000" in log_lines(daemon, "boot_warning")[0]["warning"]


# ------------------------------------------------------------------ cgroup facts, from fixtures

MIB: Final = 1 << 20


def cgroup(tmp_path: Path, own: str, files: dict[str, str]) -> Cgroup:
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return find_cgroup(tmp_path / "fs", tmp_path / "own")


V1_OWN: Final = "9:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n"
V1: Final = {
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory/memory.limit_in_bytes": f"{300 * MIB}\n",
}
V2: Final = {
    "memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n",
    "memory.max": f"{300 * MIB}\n",
    "memory.high": "max\n",
    "memory.oom.group": "0\n",
}


def test_version_1_as_a_container_sees_it(tmp_path: Path) -> None:
    """Without a cgroup namespace our path is the host's, and the mount's root is our own."""
    found = cgroup(tmp_path, V1_OWN, V1)
    assert (found.version, found.limit_bytes()) == (1, 300 * MIB)
    assert OomCounter(found).read() == 3
    order = oom_order(found, lowered=False)
    assert (order.cgroup_version, order.group_kill, order.high_bytes) == (1, None, None)


def test_version_1_as_a_host_sees_it(tmp_path: Path) -> None:
    mine = {name.replace("memory/", "memory/docker/abc/"): text for name, text in V1.items()}
    root = {"memory/memory.oom_control": "oom_kill 99\n", "memory/memory.limit_in_bytes": "1\n"}
    found = cgroup(tmp_path, V1_OWN, mine | root)
    assert (found.limit_bytes(), OomCounter(found).read()) == (300 * MIB, 3)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    found = cgroup(tmp_path, V1_OWN, V1 | {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    order = oom_order(found, lowered=False)
    assert (order.limit_bytes, order.protects_up_to_bytes) == (None, None)
    assert order.verdict in ("unlimited", "equal")


def test_version_2(tmp_path: Path) -> None:
    found = cgroup(tmp_path, "0::/\n", V2 | {"memory.high": f"{250 * MIB}\n"})
    assert (found.version, found.limit_bytes(), OomCounter(found).read()) == (2, 300 * MIB, 2)
    order = oom_order(found, lowered=True)
    assert (order.high_bytes, order.group_kill, order.lowered) == (250 * MIB, False, True)
    assert order.room is not None
    assert order.protects_up_to_bytes == 300 * MIB * order.room // 1000
    assert order.warnings == []


def test_version_2_that_kills_the_whole_group_is_warned_of(tmp_path: Path) -> None:
    order = oom_order(cgroup(tmp_path, "0::/\n", V2 | {"memory.oom.group": "1\n"}), lowered=False)
    assert (order.verdict, order.group_kill) == ("group_kill", True)
    assert "memory.oom.group is 1" in order.warnings[0]


def test_version_2_looks_at_the_cgroups_above_too(tmp_path: Path) -> None:
    """The tightest limit is what is met, and a group above is killed with all below it."""
    mine = {f"box/daemon/{name}": text for name, text in V2.items()}
    above = {"box/memory.max": f"{100 * MIB}\n", "box/memory.oom.group": "1\n"}
    order = oom_order(cgroup(tmp_path, "0::/box/daemon\n", mine | above), lowered=False)
    assert (order.limit_bytes, order.verdict, order.group_kill) == (100 * MIB, "group_kill", True)
    wider = mine | {"box/memory.max": "max\n", "box/memory.oom.group": "0\n"}
    order = oom_order(cgroup(tmp_path / "wider", "0::/box/daemon\n", wider), lowered=False)
    assert (order.limit_bytes, order.group_kill) == (300 * MIB, False)


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    order = oom_order(cgroup(tmp_path, "0::/\n", V2 | {"memory.max": "max\n"}), lowered=False)
    assert order.limit_bytes is None


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    found = cgroup(tmp_path, "", {"x": ""})
    assert (found.version, OomCounter(found).read()) == (None, None)
    assert oom_order(found, lowered=False).cgroup_version is None


@pytest.mark.parametrize("text", ["", "x", "oom_kill\n", "oom_kill x\n", "\0"])
def test_a_counter_that_cannot_be_understood_is_unknown_and_no_error(
    tmp_path: Path, text: str
) -> None:
    files = V2 | {"memory.events": text, "memory.max": text, "memory.high": text}
    found = cgroup(tmp_path, "0::/\n", files)
    assert OomCounter(found).read() is None
    assert found.limit_bytes() is None
    assert oom_order(found, lowered=False).high_bytes is None


def test_a_last_word_that_cannot_be_written_is_a_warning(start_daemon: Start) -> None:
    daemon = start_daemon("--state-dir", "/proc/1/nonexistent")
    with RawClient(daemon.socket_path) as client:
        assert client.call("ping") == {}
    assert log_lines(daemon, "state_directory")


def test_a_state_directory_with_nonsense_in_it_is_no_error(
    start_daemon: Start, tmp_path: Path
) -> None:
    for number, text in enumerate((b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 100_000)):
        place = tmp_path / f"n{number}"
        (place / "state").mkdir(parents=True)
        (place / "state" / "last-words.json").write_bytes(text)
        daemon = start_daemon(place=place)
        words = json.loads((place / "state" / "last-words.json").read_text())
        assert words["pid"] == daemon.pid
        assert words["schema"] == 1
        assert daemon.stop() == 0


def test_files_it_makes_are_closed_on_exec(start_daemon: Start) -> None:
    daemon = start_daemon()
    looked_at = 0
    for entry in Path(f"/proc/{daemon.pid}/fdinfo").iterdir():
        try:
            text = entry.read_text()
        except FileNotFoundError:
            continue  # closed meanwhile
        flags = re.search(r"^flags:\s*(\d+)", text, re.MULTILINE)
        assert flags
        if int(entry.name) > 2:
            assert int(flags[1], 8) & os.O_CLOEXEC, entry
            looked_at += 1
    assert looked_at > 5
