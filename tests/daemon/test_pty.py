"""Terminals in the daemon: what a command finds, what is read and written, how it is hung up."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import RemoteError
from runnerd.protocol.answers import TerminalSize
from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.field import cpu_s, mark, marked, open_fds, output_of, read_until
from tests.daemon.looking import planted
from tests.harness import REPOSITORY, RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]


def shown(daemon: RunnerdProcess, *argv: str, **fields: Any) -> bytes:
    """Run a command in a terminal, with exit code 0, and return what it showed."""
    with daemon.connect() as client:
        done = client.run(list(argv), **{"pty": Pty(), "timeout_s": 30, **fields})
    assert (done.exit.code, done.stderr, done.gap_bytes) == (0, b"", 0), done
    return done.stdout


# ------------------------------------------------------------------ what a command finds


def test_its_size_and_term_are_there_before_it_runs(runnerd_daemon: RunnerdProcess) -> None:
    script = "stty size; echo $TERM; tty"
    said = shown(runnerd_daemon, "sh", "-c", script, pty=Pty(rows=40, cols=120, term="screen"))
    size, term, name = said.split(b"\r\n")[:3]
    assert (size, term) == (b"40 120", b"screen")
    assert name.startswith(b"/dev/pts/")
    assert b" iutf8" in shown(runnerd_daemon, "stty", "-a")


@pytest.mark.parametrize("mode", ["extend", "replace"])
def test_the_requests_environment_has_the_last_word_on_term(start_daemon: Start, mode: str) -> None:
    daemon = start_daemon(env={"TERM": "ansi", "COLUMNS": "7", "LINES": "3"})
    script = ["sh", "-c", "echo ${TERM-none} ${COLUMNS-none} ${LINES-none}"]
    asked: list[tuple[dict[str, str | None], bytes]] = [
        ({}, b"xterm-256color none none\r\n"),
        ({"TERM": "vt100", "COLUMNS": "9"}, b"vt100 9 none\r\n"),
        ({"TERM": None}, b"none none none\r\n"),
    ]
    for env, expected in asked:
        # A shell that runs with TERM unset may set it for itself: so look from outside it.
        assert shown(daemon, *script, env=env, env_mode=mode) in (
            expected,
            expected.replace(b"none", b"dumb", 1) if env.get("TERM", "") is None else b"",
        )


@pytest.mark.parametrize("user", [None, "nobody"])
def test_every_name_of_the_terminal_opens(runnerd_daemon: RunnerdProcess, user: str | None) -> None:
    if user is not None:
        needs.root()
    script = 'for name in /dev/tty /dev/stdout /dev/stderr "$(tty)"; do echo . >$name; done; id -u'
    uid = b"65534" if user else str(os.geteuid()).encode()
    assert shown(runnerd_daemon, "sh", "-c", script, user=user) == b".\r\n" * 4 + uid + b"\r\n"


def test_without_cap_chown_the_user_still_owns_the_terminal(start_daemon: Start) -> None:
    needs.root()
    setpriv = needs.program("setpriv", "util-linux")
    few = "-all,+setuid,+setgid,+kill"
    daemon = start_daemon(wrapper=[setpriv, "--bounding-set", few, "--inh-caps", "-all", "--"])
    script = 'echo . >/dev/stdout; stat -c %U "$(tty)"'
    assert shown(daemon, "sh", "-c", script, user="nobody") == b".\r\nnobody\r\n"
    with daemon.connect() as client:
        assert not client.info().dumpable


def test_another_file_system_user_is_put_back_and_so_is_dumpable(tmp_path: Path) -> None:
    needs.root()
    script = f"""if True:
        import os
        from runnerd.daemon.linux import PR_GET_DUMPABLE, as_filesystem_user, prctl
        os.chmod({str(tmp_path)!r}, 0o777)
        for name in ("theirs", "ours"):
            if name == "ours":
                assert prctl(PR_GET_DUMPABLE) == 1
                open({str(tmp_path)!r} + "/ours", "x")
                break
            with as_filesystem_user(65534):
                os.chdir({str(tmp_path)!r})
                open(name, "x")
    """
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)
    assert [(tmp_path / name).stat().st_uid for name in ("theirs", "ours")] == [65534, 0]


def test_a_kernel_without_tiocgptpeer_is_served_by_name(start_daemon: Start) -> None:
    daemon = start_daemon(**planted("import runnerd.daemon.terminal as t; t._TIOCGPTPEER = 0x54FF"))
    assert shown(daemon, "sh", "-c", "stty size >/dev/tty") == b"24 80\r\n"


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        ("mount -t tmpfs none /dev/pts; umount -l /dev/pts; umount -l /dev/pts", None),
        ("mount --bind /dev/null /dev/ptmx", "ENOTTY"),
    ],
)
def test_where_there_are_no_terminals_a_start_says_so(
    start_daemon: Start, prepare: str, name: str | None
) -> None:
    needs.root()
    unshare = needs.program("unshare", "util-linux")
    script = f'{prepare}; umount -l /dev/pts 2>/dev/null; exec "$@"'
    daemon = start_daemon(wrapper=[unshare, "-m", "sh", "-c", script, "sh"])
    with daemon.connect() as client:
        before = open_fds(daemon.pid)
        for _ in range(20):
            with pytest.raises(RemoteError) as caught:
                client.start(["true"], exec_id="none", pty=Pty())
            data = caught.value.data
            assert data is not None
            assert (data.kind, data.stage, data.retryable) == ("start_failed", "pty", False)
            assert name is None or data.errno_name == name
            assert "devpts" in data.hint
        assert client.list_execs() == []
        assert open_fds(daemon.pid) == before
        assert client.run(["true"]).exit.code == 0


def test_a_terminal_costs_fewer_descriptors_than_pipes(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.run(["true"])

        def cost(**fields: Any) -> int:
            before = open_fds(runnerd_daemon.pid)
            execs = [client.start(["sleep", "1000"], attach=False, **fields) for _ in range(20)]
            more: int = open_fds(runnerd_daemon.pid) - before
            for each in execs:
                each.cancel(0)
            return more

        pipes, terminal = cost(stdin="pipe"), cost(pty=Pty())
        assert terminal < pipes


# ------------------------------------------------------------------ output


def test_all_that_was_written_before_the_exit_is_read(start_daemon: Start) -> None:
    """However late the daemon comes to it: FIONREAD tells 0 of a terminal nobody has read."""
    daemon = start_daemon("--tail-bytes-max", "32768")  # read in pieces of 8 KiB
    go = Path(daemon.socket_path).parent / "go"
    script = (
        "setsid sleep 1000 & until [ -e $GO ]; do sleep 0.01; done; printf '%015000d' 7; exit 3"
    )
    with daemon.connect() as client:
        handle = client.start(["bash", "-c", script], pty=Pty(), env={"GO": str(go)})
        assert handle.pid is not None
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            go.touch()
            wait_for(lambda: not is_alive(handle.pid or 0))
            time.sleep(0.7)  # the drain's own time is over before anything has been read
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        its_exit = handle.wait(10)
        assert (its_exit.code, its_exit.stdout.total_bytes) == (3, 15_000)
        handle.cancel(0)


def test_a_blocking_reader_that_is_slow_loses_nothing(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(["seq", "1", "200000"], pty=Pty(), window_bytes=4096)
        stdout, stderr = output_of(handle)
    assert stdout == b"".join(b"%d\r\n" % number for number in range(1, 200_001))
    assert stderr == b""
    assert handle.exit is not None
    assert handle.exit.stdout.total_bytes == len(stdout)
    assert handle.exit.stderr.total_bytes == 0


def test_a_command_that_closes_its_terminal_lives_on_and_may_open_it_again(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Without a process that has it open a terminal reads EIO: no end, no signal, no busy loop."""
    script = "exec </dev/null >/dev/null 2>&1; sleep 1.5; echo back >/dev/tty; sleep 0.2; exit 5"
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", script], pty=Pty())
        began_s, before_s = time.monotonic(), cpu_s(runnerd_daemon.pid)
        assert read_until(handle, b"back") == b"back\r\n"
        assert time.monotonic() - began_s > 1.4
        assert cpu_s(runnerd_daemon.pid) - before_s < 0.15
        output_of(handle)
        assert handle.exit is not None
        assert (handle.exit.code, handle.exit.reason) == (5, "exited")
        assert handle.exit.wall_s is not None
        assert handle.exit.wall_s > 1.6


def test_input_for_a_terminal_that_nobody_has_open_costs_no_cpu(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(
            ["sh", "-c", "stty raw -echo; exec </dev/null >/dev/null 2>&1; sleep 1000"], pty=Pty()
        )
        stdin = Path(f"/proc/{handle.pid}/fd/0")
        wait_for(lambda: stdin.readlink() == Path("/dev/null"))
        handle.write(bytes(300_000), timeout_s=1)
        before_s = cpu_s(runnerd_daemon.pid)
        time.sleep(1)
        assert cpu_s(runnerd_daemon.pid) - before_s < 0.1
        assert client.inspect(handle.exec_id).state == "running"
        handle.cancel(0)


# ------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"", b""),
        (b"abc\n", b"abc\r\nabc\r\n"),
        (b"abc", b"abcabc"),
        (b"abc\r", b"abc\r\nabc\r\n"),
        (b"\xc3\xa9x\x7f\x7f\n", None),
    ],
)
def test_end_of_file_is_the_terminals_own(
    runnerd_daemon: RunnerdProcess, given: bytes, expected: bytes | None
) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="cat", argv=["cat"], pty={}, attach={})
        client.call("exec.write", exec_id="cat", data=given, eof=True)
        assert client.note("exec.exited", "cat")["exit"]["code"] == 0
        if expected is not None:
            assert client.output("cat") == expected


def test_a_terminal_whose_end_of_file_key_was_changed_gets_that_one(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", "stty eof ^X -echo; echo ready; exec cat"], pty=Pty())
        read_until(handle, b"ready")
        handle.write(b"a\x04b\n", eof=True)
        assert output_of(handle)[0].endswith(b"a\x04b\r\n")
        assert handle.exit is not None
        assert handle.exit.code == 0


def test_in_raw_mode_end_of_file_is_a_key_and_none_is_sent_where_there_is_none(
    runnerd_daemon: RunnerdProcess,
) -> None:
    reads = "echo ready; head -c 2 | od -An -tx1"
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", f"stty raw -echo; {reads}"], pty=Pty())
        read_until(handle, b"ready")
        handle.write(b"a", eof=True)
        assert output_of(handle)[0].endswith(b" 61 04\n")
        handle = client.start(["sh", "-c", f"stty raw -echo eof undef; {reads}"], pty=Pty())
        read_until(handle, b"ready")
        handle.write(b"a", eof=True)
        with pytest.raises(RemoteError, match="stdin is closed"):
            handle.write(b"b")
        info = client.inspect(handle.exec_id)
        assert (info.state, info.stdin_open) == ("running", False)
        handle.cancel(0)


def test_a_program_that_does_not_read_fills_a_bounded_queue(start_daemon: Start) -> None:
    daemon = start_daemon("--stdin-queue-bytes-max", "100000")
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "stty raw -echo; echo up; sleep 2; exec head -c 150000"]
        client.call("exec.start", exec_id="x", argv=argv, pty={}, attach={})
        client.note("exec.output", "x")
        first = client.call("exec.write", exec_id="x", data=b"k" * 300_000)
        assert 100_000 <= first["accepted_bytes"] < 130_000  # the queue, and what a terminal holds
        assert first["room_bytes"] < 100_000
        rest = b"k" * (150_000 - first["accepted_bytes"])
        whole = client.call(
            "exec.write", exec_id="x", data=rest, offset=first["accepted_bytes"], wait_s=20
        )
        assert whole["accepted_bytes"] == 150_000
        assert client.note("exec.exited", "x")["exit"]["code"] == 0
        assert client.output("x") == b"up\n" + b"k" * 150_000


# ------------------------------------------------------------------ size


def test_a_resize_is_told_once_and_the_size_shown_is_the_kernels(
    runnerd_daemon: RunnerdProcess,
) -> None:
    # No shell: bash forgets a signal that comes while it runs the trap of the one before.
    script = """if True:
        import os, signal
        def told(*_):
            size = os.get_terminal_size()
            os.write(1, b"%d %d\\n" % (size.lines, size.columns))
        signal.signal(signal.SIGWINCH, told)
        os.write(1, b"ready\\n")
        while True:
            signal.pause()
    """
    with runnerd_daemon.connect() as client:
        handle = client.start([sys.executable, "-c", script], pty=Pty(rows=10, cols=20))
        read_until(handle, b"ready")
        assert client.inspect(handle.exec_id).pty == TerminalSize(rows=10, cols=20)
        handle.resize(11, 22)
        handle.resize(11, 22)  # no change, so nobody is told
        assert read_until(handle, b"22\r\n") == b"11 22\r\n"
        handle.resize(65535, 1)
        assert read_until(handle, b" 1\r\n") == b"65535 1\r\n"
        stty = f"stty rows 5 cols 6 </proc/{handle.pid}/fd/0"
        assert client.run(["sh", "-c", stty]).exit.code == 0
        assert handle.inspect().pty == TerminalSize(rows=5, cols=6)
        handle.cancel(0)
        assert handle.inspect().pty == TerminalSize(rows=65535, cols=1)


# ------------------------------------------------------------------ the end


def test_it_is_hung_up_once_after_the_drain(runnerd_daemon: RunnerdProcess) -> None:
    """A leftover in a session of its own keeps its terminal until the exit is told, no longer."""
    word = mark(1093)
    script = (
        f"exec 3<&0; setsid sh -c 'sleep {word} & echo late; read x <&3; "
        "echo $? >$OUT; echo x 2>>$OUT; wait' & sleep 0.3; exit 4"
    )
    with runnerd_daemon.connect() as client:
        out = Path(runnerd_daemon.socket_path).parent / "out"
        handle = client.start(["sh", "-c", script], pty=Pty(), env={"OUT": str(out)})
        stdout, _ = output_of(handle)
        its_exit = handle.exit
        assert its_exit is not None
        assert (stdout, its_exit.code) == (b"late\r\n", 4)
        assert its_exit.phases.drained_ms is not None
        assert its_exit.phases.exited_ms is not None
        assert 450 < its_exit.phases.drained_ms - its_exit.phases.exited_ms < 1500
        said = wait_for(lambda: out.exists() and b"error" in out.read_bytes() and out.read_bytes())
        assert said.startswith(b"1\n")  # end of file
        assert b"rror" in said  # and EIO for what it writes
        (sleeper,) = marked(word)
        assert is_alive(sleeper)
        with pytest.raises(RemoteError) as caught:
            handle.resize(24, 80)
        assert caught.value.kind == "exec_ended"
        assert handle.inspect().holders == []
        handle.cancel(0)


def test_the_shims_end_hangs_up_and_tells_the_truth(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", "trap '' HUP; sleep 1000"], pty=Pty())
        assert handle.pid is not None
        shim = int(Path(f"/proc/{handle.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(shim, signal.SIGKILL)
        assert client.wait(handle.exec_id, until="closed", timeout_s=10).reason == "internal"


def test_a_stray_failure_while_reading_ends_the_exec_and_leaves_nothing(
    start_daemon: Start,
) -> None:
    fault = """
        import runnerd.daemon.terminal as t
        def read(self, fd, size): raise MemoryError("planted")
        t.PseudoTerminal.read = read
    """
    daemon = start_daemon(**planted(fault))
    with daemon.connect() as client:
        before = open_fds(daemon.pid)
        handle = client.start(["sh", "-c", "echo x; sleep 1000"], pty=Pty(), attach=False)
        assert handle.wait(10).reason == "internal"
        client.wait(handle.exec_id, until="closed", timeout_s=10)
        wait_for(lambda: open_fds(daemon.pid) <= before)
        assert client.run(["true"]).exit.code == 0


@pytest.mark.parametrize("at", ["tcgetattr", "resize", "_open_slave"])
def test_a_terminal_half_made_leaves_no_descriptor(start_daemon: Start, at: str) -> None:
    fault = f"""
        import errno, os, termios
        import runnerd.daemon.terminal as t
        def fail(*_): raise (termios.error if {at!r} == "tcgetattr" else OSError)(12, "planted")
        where = {{"tcgetattr": termios, "resize": t.PseudoTerminal, "_open_slave": t}}[{at!r}]
        setattr(where, {at!r}, fail)
    """
    daemon = start_daemon(**planted(fault))
    with daemon.connect() as client:
        client.run(["true"])
        before = open_fds(daemon.pid)
        for _ in range(10):
            with pytest.raises(RemoteError) as caught:
                client.start(["true"], pty=Pty())
            data = caught.value.data
            assert data is not None
            assert (data.stage, data.errno, data.retryable) == ("pty", errno.ENOMEM, True)
        assert open_fds(daemon.pid) <= before
