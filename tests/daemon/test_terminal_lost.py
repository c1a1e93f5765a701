"""A person's session whose connection is cut: the screen and the keys come back. Real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.daemon.tmux import Tmux, tmux
from tests.harness import wait_for
from tests.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.harness import RunnerdProcess

SAYING_HOW_IT_ENDS: Final = '"$@"; echo "ended with $?"; exec sleep 1000'
SHELL: Final = ("env", "PS1=there> ", "bash", "--norc", "--noprofile")


class Session:
    """Somebody at a command's terminal, through a proxy, and what the daemon says of it."""

    def __init__(self, daemon: RunnerdProcess, proxy: Proxy, screens: Tmux) -> None:
        self.daemon = daemon
        self.proxy = proxy
        self.screens = screens

    def begin(self, *words: str) -> None:
        path = self.daemon.socket_path
        line = [self.proxy.path if word == path else word for word in self.daemon.ctl_words(*words)]
        # The shell says how it ended: tmux itself misses the end of a pane's program now and then
        # on a busy machine.
        self.screens.start("me", "sh", "-c", SAYING_HOW_IT_ENDS, "sh", *line)

    def keys(self, *keys: str) -> None:
        self.screens.keys("me", *keys)

    def until(self, text: str) -> str:
        return self.screens.until("me", text)

    def has_rung(self) -> bool:
        return self.screens.run("display-message", "-p", "-t", "me", "#{window_bell_flag}") == "1\n"

    def accepted_bytes(self) -> int:
        with self.daemon.connect() as client:
            return client.inspect("x").stdin_accepted_bytes or 0

    def readers(self) -> int:
        with self.daemon.connect() as client:
            return client.inspect("x").subscriptions

    def size(self) -> tuple[int, int]:
        with self.daemon.connect() as client:
            pty = client.inspect("x").pty
            assert pty is not None
            return pty.cols, pty.rows

    def cut(self) -> None:
        """Cut, and come back."""
        before = self.proxy.connections
        self.proxy.cut()
        wait_for(lambda: self.proxy.connections > before, 20)


@pytest.fixture
def session(runnerd_daemon: RunnerdProcess, tmp_path: Path) -> Iterator[Session]:
    with (
        tmux(str(tmp_path / "tmux")) as screens,
        Proxy(tmp_path / "proxy.sock", runnerd_daemon.socket_path) as proxy,
    ):
        yield Session(runnerd_daemon, proxy, screens)


def begin_run(session: Session) -> None:
    session.begin("run", "-it", "--id", "x", "--", *SHELL)


def begin_attach(session: Session) -> None:
    done = session.daemon.ctl("run", "-dit", "--id", "x", "--", *SHELL)
    assert done.returncode == 0
    session.begin("attach", "-it", "x")


both = pytest.mark.parametrize("begin", [begin_run, begin_attach], ids=["run", "attach"])


@both
def test_screen_and_keys_go_on_after_every_cut(
    session: Session, begin: Callable[[Session], None]
) -> None:
    """Three cuts: a bell, and nothing on the screen but what the command shows."""
    begin(session)
    session.until("there>")
    assert not session.has_rung()
    for at in range(3):
        session.cut()
        session.keys(f"echo af''ter {at}", "Enter")
        session.until(f"after {at}\nthere>")
    wait_for(session.has_rung)
    shown = session.until("there>")
    assert [line for line in shown.splitlines() if line.startswith("after")] == [
        f"after {at}" for at in range(3)
    ]
    assert "runnerctl" not in shown
    session.keys("exit 7", "Enter")
    last = session.until("ended with 7")
    assert "may not have arrived" not in last


@both
def test_keys_and_sizes_wait_while_there_is_no_connection(
    session: Session, begin: Callable[[Session], None]
) -> None:
    begin(session)
    session.until("there>")
    session.proxy.is_down = True
    session.proxy.cut()
    wait_for(lambda: session.readers() == 0)
    session.keys("echo ty''ped", "Enter")
    session.screens.resize("me", 61, 17)
    session.proxy.is_down = False
    session.until("typed\nthere>")
    wait_for(lambda: session.size() == (61, 17))
    session.keys("stty size", "Enter")
    session.until("17 61\nthere>")
    assert session.readers() == 1


@both
def test_keys_on_their_way_may_be_missing_and_later_ones_go_on(
    session: Session, begin: Callable[[Session], None]
) -> None:
    """The key is there, and its answer is not: it is not sent twice, and said at the end."""
    begin(session)
    session.until("there>")
    before = session.accepted_bytes()
    session.proxy.swallows_answers = True
    session.keys("q")
    wait_for(lambda: session.accepted_bytes() == before + 1)
    session.keys("r")  # waits behind it
    session.proxy.swallows_answers = False
    session.cut()
    assert "qq" not in session.until("there> qr")
    session.keys("C-u", "echo af''ter", "Enter")
    session.until("after\nthere>")
    session.keys("exit", "Enter")
    session.until("what was typed as the connection was lost may not have arrived")


@both
def test_a_size_whose_answer_was_lost_is_sent_again(
    session: Session, begin: Callable[[Session], None]
) -> None:
    begin(session)
    session.until("there>")
    # The one before: attach says two sizes at first, to have the command draw.
    wait_for(lambda: session.size() == (80, 24))
    session.proxy.swallows_answers = True
    session.screens.resize("me", 62, 18)
    wait_for(lambda: session.size() == (62, 18))
    with session.daemon.connect() as other:
        other.resize("x", 5, 5)
    session.proxy.swallows_answers = False
    session.cut()
    wait_for(lambda: session.size() == (62, 18))


@both
def test_the_detach_keys_work_after_a_cut(
    session: Session, begin: Callable[[Session], None]
) -> None:
    begin(session)
    session.until("there>")
    session.cut()
    session.keys("echo af''ter", "Enter")
    session.until("after\nthere>")
    session.keys("C-p", "C-q")
    session.until("detached; bring it back by: runnerctl attach -it x")
    wait_for(lambda: session.readers() == 0)
    with session.daemon.connect() as client:
        assert client.inspect("x").state == "running"
        client.cancel("x", grace_s=0)


def test_what_is_left_after_a_cut_does_not_wait_for_us(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    """Without the detach it would: for 30 s, once what it prints fills the tail."""
    daemon = start_daemon("--spool", "off")
    go, done = tmp_path / "go", tmp_path / "done"
    script = (
        f"echo 'there>'; while [ ! -e {go} ]; do sleep 0.02; done; seq 300000; : > {done}; sleep 99"
    )
    with (
        tmux(str(tmp_path / "tmux")) as screens,
        Proxy(tmp_path / "proxy.sock", daemon.socket_path) as proxy,
    ):
        session = Session(daemon, proxy, screens)
        session.begin("run", "-it", "--id", "x", "--", "sh", "-c", script)
        session.until("there>")
        session.cut()
        wait_for(lambda: session.readers() == 1)
        session.keys("C-p", "C-q")
        session.until("detached")
        go.touch()
        wait_for(done.exists, 15)
        with daemon.connect() as client:
            client.cancel("x", grace_s=0)


def test_a_session_that_does_not_come_back_puts_the_terminal_back(session: Session) -> None:
    begin_run(session)
    session.until("there>")
    session.proxy.close()
    assert "\nhint: connect again" in session.screens.until("me", "ended with 125", 40)
