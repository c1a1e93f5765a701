"""The terminal runnerctl itself was started in: it hangs up, it is left raw by nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.requests import Pty
from tests.harness import REPOSITORY, wait_for, with_default_signals
from tests.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.harness import RunnerdProcess


class Person:
    """A runnerctl that leads the session of a terminal, as under `ssh -t` or in a pane."""

    def __init__(self, words: list[str], errors: Path) -> None:
        self.keyboard, self.terminal = os.openpty()
        termios.tcsetwinsize(self.terminal, (30, 100))
        self.mode = termios.tcgetattr(self.terminal)
        self.errors = errors
        self.seen = b""
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                stdin=self.terminal,
                stdout=self.terminal,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=self._take_terminal,  # noqa: PLW1509  # no threads here
            )

    def _take_terminal(self) -> None:
        with_default_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.close(self.keyboard)

    def until(self, text: bytes) -> None:
        os.set_blocking(self.keyboard, False)

        def has_come() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self.keyboard, 65536)
            return text in self.seen

        wait_for(has_come, 20)

    def types(self, keys: bytes) -> None:
        os.set_blocking(self.keyboard, True)
        while keys:
            keys = keys[os.write(self.keyboard, keys) :]

    def is_idle_after(self, number: signal.Signals) -> bool:
        """Return whether a signal sent was taken, and it sleeps again."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        is_pending = int(fields["ShdPnd"], 16) >> (number - 1) & 1
        return not is_pending and fields["State"].startswith("S")

    def hang_up(self) -> None:
        os.close(self.keyboard)
        self.keyboard = -1

    def end(self) -> tuple[int, bytes]:
        return self.process.wait(30), self.errors.read_bytes()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.keyboard, self.terminal):
            if descriptor >= 0:
                os.close(descriptor)


@contextlib.contextmanager
def person(daemon: RunnerdProcess, errors: Path, *words: str) -> Iterator[Person]:
    one = Person(daemon.ctl_words(*words), errors)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("verb", ["run", "attach"])
def test_a_terminal_that_hangs_up_is_129_and_no_defect(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, verb: str
) -> None:
    """Its session leader is sent HUP and CONT, and CONT would make it raw again: five times."""
    for at in range(5):
        exec_id = f"x{at}"
        command = ["--id", exec_id, "--", "sh", "-c", "echo ready; exec sleep 1000"]
        if verb == "attach":
            assert runnerd_daemon.ctl("run", "-dit", *command).returncode == 0
        words = ["run", "-it", *command] if verb == "run" else ["attach", "-it", exec_id]
        with person(runnerd_daemon, tmp_path / "errors", *words) as one:
            one.until(b"ready")
            one.hang_up()
            assert one.end() == (128 + signal.SIGHUP, b"")
        with runnerd_daemon.connect() as client:
            if verb == "run":
                assert client.wait(exec_id, timeout_s=10).signal == signal.SIGHUP
            else:
                assert client.inspect(exec_id).state == "running"
                client.cancel(exec_id, grace_s=0)


@pytest.mark.parametrize("words", [["--tail"], ["--after", "1"]], ids=["tail", "after"])
def test_a_command_that_prints_nothing_is_told_the_size_of_whoever_comes(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, words: list[str]
) -> None:
    """Also where nothing is shown again: it is not waited for."""
    with runnerd_daemon.connect() as client:
        client.start(["sh", "-c", "echo ready; exec sleep 1000"], exec_id="x", pty=Pty())
        wait_for(lambda: client.inspect("x").last_seq == 1, 20)

        def has_our_size() -> bool:
            pty = client.inspect("x").pty
            return pty is not None and (pty.rows, pty.cols) == (30, 100)

        with person(runnerd_daemon, tmp_path / "errors", "attach", "-it", *words, "x"):
            wait_for(has_our_size, 20)
        client.cancel("x", grace_s=0)


def test_a_paste_that_finds_no_room_waits_and_arrives_whole(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    """The command does not read until writes have waited for room in vain."""
    daemon = start_daemon("--stdin-queue-bytes-max", "65536")
    go, got = tmp_path / "go", tmp_path / "got"
    script = (
        "stty raw -echo; echo ready; until [ -e $0 ]; do sleep 0.02; done; "
        "head -c 200000 >$1.part; mv $1.part $1; exec sleep 1000"
    )
    command = ["sh", "-c", script, str(go), str(got)]
    words = daemon.ctl_words("run", "-it", "--id", "x", "--", *command)
    words[2] = f"import runnerd.ctl.keys as keys; keys.ROOM_WAIT_S = 0.01; {words[2]}"
    pasted = b"".join(b"%07d\n" % number for number in range(25000))
    with contextlib.closing(Person(words, tmp_path / "errors")) as one, daemon.connect() as client:
        one.until(b"ready")
        one.types(pasted)
        wait_for(lambda: (client.inspect("x").stdin_accepted_bytes or 0) >= 65536, 20)
        go.touch()
        wait_for(got.exists, 20)
        assert got.read_bytes() == pasted
        client.cancel("x", grace_s=0)


def test_the_detach_keys_work_where_no_other_key_is_taken_any_more(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """A newer owner's fence refuses our keys; we must not be shut in with the command."""
    words = ["run", "-it", "--id", "x", "--fence", "1", "--", "sh", "-c", "echo ready; exec cat"]
    with person(runnerd_daemon, tmp_path / "errors", *words) as one:
        one.until(b"ready")
        with runnerd_daemon.connect(fence=2) as owner:
            one.types(b"a")
            wait_for(lambda: b"no longer passed on" in one.errors.read_bytes(), 20)
            one.types(b"b")
            one.types(b"\x10\x11")
            code, said = one.end()
            assert code == 0, said
            assert b"attach -it x" in said
            assert owner.inspect("x").state == "running"
            owner.cancel("x", grace_s=0)


@contextlib.contextmanager
def unanswered(daemon: RunnerdProcess, folder: Path, options: str) -> Iterator[Person]:
    """Somebody whose start has taken effect, without an answer; it is x."""
    words = daemon.ctl_words("run", options, "--id", "x", "--", "sleep", "1000")
    proxy = Proxy(folder / "proxy.sock", daemon.socket_path)
    words[words.index(daemon.socket_path)] = proxy.path
    proxy.swallows_after_hello = True
    with (
        contextlib.closing(Person(words, folder / "errors")) as one,
        proxy,  # whose threads begin here
        daemon.connect() as client,
    ):
        wait_for(lambda: any(each.exec_id == "x" for each in client.list_execs()), 20)
        yield one
        assert b"hint: to end it then: runnerctl cancel x\n" in one.errors.read_bytes()
        assert client.inspect("x").state == "running"
        client.cancel("x", grace_s=0)


@pytest.mark.parametrize("options", ["-it", "-t"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_not_answered_is_left_at_the_second_signal(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, options: str, number: signal.Signals
) -> None:
    """The first is kept for the command, in case the answer comes."""
    with unanswered(runnerd_daemon, tmp_path, options) as one:
        one.process.send_signal(number)
        wait_for(lambda: one.is_idle_after(number), 20)
        one.process.send_signal(number)
        assert one.end()[0] == 128 + number
        assert termios.tcgetattr(one.terminal) == one.mode


@pytest.mark.parametrize("options", ["-it", "-t"])
def test_a_start_that_is_not_answered_is_left_by_ctrl_c(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, options: str
) -> None:
    """Until there is a command it is no key for it."""

    def has_left() -> bool:
        one.types(b"\x03")
        return one.process.poll() is not None

    with unanswered(runnerd_daemon, tmp_path, options) as one:
        wait_for(has_left, 20)
        assert one.end()[0] == 128 + signal.SIGINT
        assert termios.tcgetattr(one.terminal) == one.mode


def test_the_last_ctrl_c_says_that_the_command_may_run_on(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """The daemon is frozen: what was said of cancelling and killing has not happened."""
    words = ["run", "-t", "--id", "x", "--", "sh", "-c", "echo ready; exec sleep 1000"]
    with person(runnerd_daemon, tmp_path / "errors", *words) as one:
        one.until(b"ready")
        runnerd_daemon.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(4):
                one.process.send_signal(signal.SIGINT)
                wait_for(lambda: one.process.poll() or one.is_idle_after(signal.SIGINT), 20)
            code, said = one.end()
        finally:
            runnerd_daemon.process.send_signal(signal.SIGCONT)
    assert code == 128 + signal.SIGINT
    assert said.endswith(b"it may run on\nhint: runnerctl inspect x\n")
