"""A person at runnerctl run -it and attach -it: screens, keys, and our terminal put back."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.field import mark, marked
from tests.daemon.tmux import Tmux, tmux
from tests.harness import RunnerdProcess, children, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHELL: Final = ("env", "PS1=$ ", "bash", "--norc", "--noprofile")


@pytest.fixture
def screens(runnerd_daemon: RunnerdProcess, tmp_path: Path) -> Iterator[Tmux]:
    """A tmux, gone before the daemon's own end is looked at."""
    assert runnerd_daemon.pid
    with tmux(str(tmp_path / "tmux")) as server:
        yield server


def ctl(daemon: RunnerdProcess, *words: str) -> list[str]:
    return daemon.ctl_words(*words)


def person(daemon: RunnerdProcess, screens: Tmux) -> None:
    """Sit somebody down at a shell of their own, with `rc` for runnerctl."""
    screens.start("me", *SHELL)
    screens.until("me", "$")
    words = " ".join(f"'{word}'" for word in daemon.ctl_words())
    screens.keys("me", f'rc() {{ {words} "$@"; }}; clear', "Enter")
    screens.until("me", "$\n2,0 ")


# ------------------------------------------------------------------ like a local one


def plain(screen: str) -> str:
    return screen


def without_numbers(screen: str) -> str:
    """Of top's screen what does not change from one second to the next: all but its figures."""
    return re.sub(r"[ ]*\d[\d.:,]*", " #", screen)


VIM: Final = [
    (["ihello", "Enter", "wörld\t|", "Escape"], "wörld"),
    ([":set number list", "Enter", "yy3pgg"], "  4 "),
    (["resize", "60", "12"], "60x12"),
    ([":split", "Enter", "G"], "[No Name]"),
    (["resize", "101", "33"], "101x33"),
    ([":%s/w/W/g", "Enter", ":", "Escape"], "Wörld"),  # what it says is gone at a late redraw
]
INTERRUPTED, STOPPED = mark(), mark()
BASH: Final = [
    (["echo one", "Enter"], "one\n$"),
    (["ecko two", "Left", "Left", "Left", "Left", "Left", "BSpace", "h", "C-e", "Enter"], "two\n$"),
    (["resize", "40", "10"], "40x10"),
    (["Up", "C-a", "printf x%.0s {1..70}; ", "Enter"], "xx"),
    (["resize", "90", "20"], "90x20"),
    # A key that signals throws away what was typed before it, so the program has to run by then.
    ([f"sleep {INTERRUPTED}", "Enter"], "sleep"),
    (["marked", INTERRUPTED], "sleep"),
    (["C-c"], "^C"),
    (["echo $? $(stty size)", "Enter"], "130 20 90"),
    ([f"sleep {STOPPED}", "Enter"], "sleep"),
    (["marked", STOPPED], "sleep"),
    (["C-z"], "Stopped"),
    (["kill -9 %1; sleep 0.3; clear", "Enter"], "$"),
]
TOP: Final = [
    ([], "PID"),
    (["resize", "60", "12"], "60x12"),
    (["resize", "120", "30"], "120x30"),
    (["c"], "COMMAND"),
    (["1"], "Cpu0"),
]


@pytest.mark.parametrize(
    ("words", "steps", "seen"),
    [
        (["vim.tiny", "-u", "NONE", "-i", "NONE", "-n"], VIM, plain),
        ([*SHELL], BASH, plain),
        (["top", "-p", "1", "-d", "1000"], TOP, without_numbers),
    ],
    ids=["vim", "bash", "top"],
)
def test_a_screen_is_as_the_local_one_after_keys_and_resizes(
    runnerd_daemon: RunnerdProcess,
    screens: Tmux,
    words: list[str],
    steps: list[tuple[list[str], str]],
    seen: Callable[[str], str],
) -> None:
    """The same program twice, side by side; of top the figures are left out, nothing else."""
    needs.program(words[0], {"vim.tiny": "vim-tiny", "top": "procps"}.get(words[0], ""))
    screens.start("here", *words)
    more = ["-e", "LANG", "-e", "HISTFILE", "--id", "there"]
    screens.start("there", *ctl(runnerd_daemon, "run", "-it", *more, "--", *words))
    for screen in ("here", "there"):
        screens.until(screen, {"vim.tiny": "~", "top": "PID"}.get(words[0], "$"))
    for keys, expected in steps:
        if keys[:1] == ["marked"]:
            wait_for(functools.partial(both_run, keys[1]))
            continue
        for screen in ("here", "there"):
            if keys[:1] == ["resize"]:
                screens.resize(screen, int(keys[1]), int(keys[2]))
            elif keys:
                screens.keys(screen, *keys)
        screens.until("here", expected)
        same(screens, seen)


def both_run(word: str) -> bool:
    return len(marked(word)) == 2


def same(screens: Tmux, seen: Callable[[str], str]) -> None:
    pair: list[str] = []

    def alike() -> bool:
        # Compared while neither changes: a screen between two of its updates is no difference.
        pair[:] = [seen(screens.screen(each, colours=True)) for each in ("here", "there")]
        return pair[0] == pair[1] and pair[0] == seen(screens.screen("here", colours=True))

    try:
        wait_for(alike, 20)
    except AssertionError as error:
        raise AssertionError(f"here:\n{pair[0]}\n\nthere:\n{pair[1]}") from error


# ------------------------------------------------------------------ leaving and coming back


def test_detached_the_program_goes_on_and_attach_brings_its_screen_back(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    needs.program("vim.tiny", "vim-tiny")
    person(runnerd_daemon, screens)
    screens.keys("me", "rc run -it --id vi -- vim.tiny -u NONE -n", "Enter")
    screens.until("me", "~")
    screens.keys("me", "isome text", "Escape", "C-p", "C-q")
    left = screens.until("me", "detached; bring it back by: runnerctl attach -it vi")
    assert " 0 80x24" in left  # the ordinary screen again, not the editor's
    screens.keys("me", "clear; stty size; stty -a | grep -o ' icanon isig\\| -icanon'", "Enter")
    screens.until("me", "24 80\n")
    screens.resize("me", 70, 18)
    screens.keys("me", "clear; rc attach -it vi", "Enter")
    back = screens.until("me", "some text\n~")
    assert " 1 70x18" in back
    with runnerd_daemon.connect() as client:
        info = client.inspect("vi")
        assert info.pty is not None
        assert (info.pty.rows, info.pty.cols, info.subscriptions) == (18, 70, 1)
    screens.keys("me", ":cq 7", "Enter")
    screens.until("me", "$")
    screens.keys("me", "echo code=$?", "Enter")
    screens.until("me", "code=7")


def test_a_lone_ctrl_p_arrives_with_the_next_key_and_other_keys_may_be_chosen(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    person(runnerd_daemon, screens)
    reads = "stty raw -echo; echo ready; dd bs=1 count=4 2>/dev/null | od -An -tx1"
    screens.keys("me", f'rc run -it -- sh -c "{reads}"', "Enter")
    screens.until("me", "\nready")
    screens.keys("me", "C-p", "C-p", "a", "C-q")
    screens.until("me", " 10 10 61 11")
    screens.keys("me", "rc run -it --id b --detach-keys ctrl-a,d -- cat", "Enter")
    with runnerd_daemon.connect() as client:
        wait_for(lambda: any(each.exec_id == "b" for each in client.list_execs()))
    screens.keys("me", "C-a", "d")
    screens.until("me", "detached")
    screens.keys("me", "clear; rc run -it --detach-keys ctrl-é -- cat; echo code=$?", "Enter")
    assert "is no key" in screens.until("me", "code=125")


# ------------------------------------------------------------------ our terminal, on every path


INTERACTIVE: Final = "rc run -it --id x -- env PS1='there> ' bash --norc"


def running(daemon: RunnerdProcess, screens: Tmux, command: str) -> int:
    """Have the person run a shell by runnerctl; returns runnerctl's pid."""
    person(daemon, screens)
    screens.keys("me", f"stty -g > {daemon.socket_path}.before; clear; {command}", "Enter")
    screens.until("me", "there>\n")
    (pane,) = screens.run("list-panes", "-t", "me", "-F", "#{pane_pid}").split()
    (pid,) = children(pane)
    return pid


def assert_as_before(daemon: RunnerdProcess, screens: Tmux) -> None:
    before = f"{daemon.socket_path}.before"
    screens.keys("me", f"clear; stty -g | diff - {before} && echo sa''me", "Enter")
    screens.until("me", "same")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_term_and_hup_put_the_terminal_back_and_hang_the_command_up(
    runnerd_daemon: RunnerdProcess, screens: Tmux, number: signal.Signals
) -> None:
    pid = running(runnerd_daemon, screens, f"{INTERACTIVE}; echo code=$?")
    subprocess.run(["kill", f"-{number}", str(pid)], check=True)
    screens.until("me", f"\ncode={128 + number}")
    with runnerd_daemon.connect() as client:
        its_exit = client.wait("x", timeout_s=10)
        assert (its_exit.signal, its_exit.reason) == (signal.SIGHUP, "exited")
    assert_as_before(runnerd_daemon, screens)


def test_a_lost_daemon_and_an_end_by_itself_put_the_terminal_back(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    running(runnerd_daemon, screens, f"{INTERACTIVE}; echo code=$?")
    screens.keys("me", "exit 9", "Enter")
    screens.until("me", "code=9")
    assert_as_before(runnerd_daemon, screens)
    screens.keys("me", "clear; rc run -it -w /nowhere -- true; echo code=$?", "Enter")
    screens.until("me", "code=125")
    assert_as_before(runnerd_daemon, screens)
    screens.keys("me", f"clear; {INTERACTIVE.replace('--id x', '--id y')}; echo code=$?", "Enter")
    screens.until("me", "there>\n")
    runnerd_daemon.kill()
    assert "\nrunnerctl: " in screens.until("me", "code=125", 90)
    assert_as_before(runnerd_daemon, screens)


def test_stopped_the_terminal_is_the_shells_and_continued_it_is_raw_again(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    pid = running(runnerd_daemon, screens, INTERACTIVE)
    subprocess.run(["kill", "-TSTP", str(pid)], check=True)
    screens.until("me", "Stopped")
    screens.resize("me", 66, 20)
    assert_as_before(runnerd_daemon, screens)
    screens.keys("me", "clear; fg", "Enter")
    screens.until("me", "there>\n")
    screens.keys("me", f"sleep {STOPPED}", "Enter")
    wait_for(lambda: marked(STOPPED))
    screens.keys("me", "C-c")
    screens.until("me", "^C")
    screens.keys("me", "clear; stty size", "Enter")
    screens.until("me", "20 66")
    screens.keys("me", "exit", "Enter")
    screens.until("me", "exit\n$")
    assert_as_before(runnerd_daemon, screens)


def test_continued_the_command_draws_its_screen_again(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    """What it showed is gone, and no size is another one: nothing else would make it."""
    needs.program("vim.tiny", "vim-tiny")
    person(runnerd_daemon, screens)
    screens.keys("me", "rc run -it --id vi -- vim.tiny -u NONE -n", "Enter")
    screens.until("me", "~")
    screens.keys("me", "isome text", "Escape")
    screens.until("me", "some text")
    (pane,) = screens.run("list-panes", "-t", "me", "-F", "#{pane_pid}").split()
    subprocess.run(["kill", "-TSTP", *map(str, children(pane))], check=True)
    screens.until("me", "Stopped")
    screens.keys("me", "clear; fg", "Enter")
    screens.until("me", "some text\n~")
    screens.keys("me", ":q!", "Enter")
    screens.until("me", "$")


def test_attach_leaves_on_a_signal_and_the_command_goes_on(
    runnerd_daemon: RunnerdProcess, screens: Tmux
) -> None:
    done = runnerd_daemon.ctl("run", "-dit", "--id", "x", "--", "env", "PS1=there> ", *SHELL[2:])
    assert (done.returncode, done.stdout) == (0, b"x\n")
    pid = running(runnerd_daemon, screens, "rc attach -it x; echo code=$?")
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
    screens.until("me", "code=143")
    assert_as_before(runnerd_daemon, screens)
    with runnerd_daemon.connect() as client:
        assert client.inspect("x").state == "running"
        client.cancel("x", grace_s=0)


# ------------------------------------------------------------------ what is refused


def test_it_with_a_pipe_is_refused_as_docker_does(runnerd_daemon: RunnerdProcess) -> None:
    for words in (["run", "-it", "--", "cat"], ["attach", "-it", "x"]):
        done = runnerd_daemon.ctl(*words, input=b"x")
        assert done.returncode == 125
        assert done.stderr.startswith(b"runnerctl: -t with -i needs a terminal")
        assert b"\nhint: " in done.stderr
    with runnerd_daemon.connect() as client:
        assert client.info().starts == 0


def test_t_alone_needs_none_and_passes_no_key(runnerd_daemon: RunnerdProcess) -> None:
    done = runnerd_daemon.ctl("run", "-t", "--", "sh", "-c", "tty >/dev/null && stty size; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"24 80\r\n", b"")


def test_attach_t_to_what_has_no_terminal_says_so(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        client.start(["sleep", "1000"], exec_id="pipes", attach=False)
        done = runnerd_daemon.ctl("attach", "-t", "pipes")
        assert (done.returncode, done.stdout) == (125, b"")
        assert b"'pipes' has no terminal (the exec is untouched)\nhint: leave out -t" in done.stderr
        done = runnerd_daemon.ctl("attach", "-i", "pipes")
        assert b"-i goes with -t" in done.stderr


def test_what_is_shown_again_asks_the_terminal_nothing(runnerd_daemon: RunnerdProcess) -> None:
    """A replayed question would be answered, and the answer typed into the command."""
    with runnerd_daemon.connect() as client:
        asks = r"printf 'a\033[6nb\033[c\033[>cc\033]11;?\007d\n'"
        client.start(["sh", "-c", f"{asks}; exit 4"], exec_id="asks", pty=Pty()).wait(10)
    done = runnerd_daemon.ctl("attach", "-t", "asks")
    assert (done.returncode, done.stdout) == (4, b"abcd\r\n")
    assert runnerd_daemon.ctl("attach", "asks").stdout.count(b"\x1b") == 4
