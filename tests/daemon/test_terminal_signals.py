"""Our terminal after signals to runnerctl itself: as it was found, or raw, as the case may be."""

from __future__ import annotations

import signal
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.daemon.test_terminal_own import Person, person
from tests.harness import wait_for

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess

SCRIPT: Final = 'echo ready; while read -n1 key; do echo "<$key>"; done'
LOCAL_FLAGS: Final = 3
"""Where tcgetattr has them."""
COOKED: Final = termios.ECHO | termios.ICANON | termios.ISIG
HARMLESS: Final = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)
STOPPING: Final = (signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU)
FAULTS: Final = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
)
"""After one there is nobody left to put anything back."""


def is_raw(one: Person) -> bool:
    flags: int = termios.tcgetattr(one.terminal)[LOCAL_FLAGS]
    return not flags & COOKED


def is_cooked(one: Person) -> bool:
    flags: int = termios.tcgetattr(one.terminal)[LOCAL_FLAGS]
    return flags & COOKED == COOKED


def masks(pid: int) -> dict[str, int]:
    """Return which signals a process has pending, catches and ignores, proc(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = (line.split() for line in lines if line.startswith(("Sig", "ShdPnd")))
    return {name: int(mask, 16) for name, mask in words if "/" not in mask}


def not_caught(pid: int) -> set[int]:
    shown = masks(pid)
    taken = shown["SigCgt:"] | shown["SigIgn:"]
    theirs = {signal.SIGKILL, *HARMLESS, *STOPPING, *FAULTS}
    return {number for number in signal.valid_signals() - theirs if not taken >> (number - 1) & 1}


def begun(daemon: RunnerdProcess, verb: str, exec_id: str = "x") -> tuple[str, ...]:
    """Return how somebody gets to a command's terminal, which is there already for attach."""
    words = ("--id", exec_id, "--", "bash", "-c", SCRIPT)
    if verb == "run":
        return ("run", "-it", *words)
    assert daemon.ctl("run", "-dit", *words).returncode == 0
    return ("attach", "-it", exec_id)


@pytest.mark.parametrize("verb", ["run", "attach"])
def test_every_signal_that_could_end_us_puts_the_terminal_back(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, verb: str
) -> None:
    """USR1 is for the command, where that is ours, and ends us with it."""
    for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMAX):
        words = begun(runnerd_daemon, verb, f"x{number}")
        with person(runnerd_daemon, tmp_path / "errors", *words) as one:
            one.until(b"ready")
            assert is_raw(one)
            assert not_caught(one.process.pid) == set()
            one.process.send_signal(number)
            assert one.end()[0] == 128 + number
            assert is_cooked(one)
        with runnerd_daemon.connect() as client:
            assert client.inspect(f"x{number}").state == "running" or verb == "run"


@pytest.mark.parametrize("verb", ["run", "attach"])
def test_a_stop_that_nobody_could_end_leaves_it_raw(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, verb: str
) -> None:
    """A session's leader has an orphaned group, which TSTP does not stop."""
    words = begun(runnerd_daemon, verb)
    with person(runnerd_daemon, tmp_path / "errors", *words) as one:
        one.until(b"ready")
        for key in b"ab":
            one.process.send_signal(signal.SIGTSTP)
            wait_for(lambda: not is_pending(one.process.pid, signal.SIGTSTP))
            one.types(bytes([key]))
            one.until(b"<%c>" % key)
            assert is_raw(one)


def is_pending(pid: int, number: int) -> bool:
    shown = masks(pid)
    return bool((shown["SigPnd:"] | shown["ShdPnd:"]) >> (number - 1) & 1)
