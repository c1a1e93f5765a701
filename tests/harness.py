"""A real daemon for a test: started, waited for, stopped, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runnerd.client.blocking import Client, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RUNNERD: Final = (sys.executable, "-m", "runnerd.daemon.main")
REPOSITORY: Final = Path(__file__).resolve().parent.parent
PATIENCE: Final = float(os.environ.get("RUNNERD_TEST_PATIENCE", "1"))
"""How many times as long to wait: an emulated processor is ten times slower."""
READY_S: Final = 20.0 * PATIENCE
STOP_S: Final = 10.0 * PATIENCE
_PR_SET_CHILD_SUBREAPER: Final = 36  # prctl(2)
_OURS: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGCHLD,
)


def with_default_signals() -> None:
    """Undo, in a child, what the test runner's own parent ignores or blocks.

    A runner started in the background of a plain shell has SIGINT and SIGQUIT ignored, and
    everything it starts would inherit that.
    """
    for number in _OURS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def wait_for(what: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until `what()` is true and return it: a level, polled, never an edge."""
    deadline_s = time.monotonic() + timeout_s * PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.005)
    return found


def children(pid: int | str = "self") -> set[int]:
    """Return the direct children of a process, none if it is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found |= set(map(int, (task / "children").read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """Return everything below a process."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class RunnerdProcess:
    """One daemon process.

    Args:
        directory: Where its socket, log and state go.
        options: Further options of `runnerd serve`.
        env: Variables over the test's own.
        program: What runs instead of the daemon's own main: words before its options.
        prepare: Called in the child before it becomes the daemon.
        wrapper: A command that execs or runs the daemon, given as its last arguments (`tini -s
            --`); `pid` and `process` are then the wrapper's.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = RUNNERD,
        prepare: Callable[[], None] = lambda: None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.socket_path = str(directory / "runnerd.sock")
        self.log_path = directory / "runnerd.log"
        read_fd, write_fd = os.pipe()
        # A state directory of its own: the default one is shared with every daemon of the machine.
        mine = ("--socket", self.socket_path, "--state-dir", str(directory / "state"))
        words = ("serve", *mine, "--ready-fd", str(write_fd), *options)

        def prepare_all() -> None:
            with_default_signals()
            prepare()

        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrapper, *program, *words],
                cwd=REPOSITORY,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                preexec_fn=prepare_all,  # noqa: PLW1509  # no threads here
            )
        os.close(write_fd)
        self.pid = self.process.pid
        with os.fdopen(read_fd, "rb") as ready:
            readable, _, _ = select.select([ready], [], [], READY_S)
            said = os.read(ready.fileno(), 100) if readable else b""
        if not said:
            self.kill()
            raise AssertionError(f"runnerd did not get ready:\n{self.log_path.read_text()}")

    def connect(self, **options: Any) -> Client:
        """Return a new connection."""
        return connect(self.socket_path, **options)

    def ctl_words(self, *words: str) -> list[str]:
        """Return the command line of a runnerctl that talks to this daemon."""
        # As the installed script does; by -m its module would be compiled anew each time.
        start = "from runnerd.ctl.main import script; script()"
        return [sys.executable, "-c", start, "--socket", self.socket_path, *words]

    def ctl(self, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run runnerctl to its end and return its exit code and what it printed."""
        defaults: dict[str, Any] = {
            "cwd": REPOSITORY,
            "capture_output": True,
            "timeout": 60,
            "check": False,
            "preexec_fn": with_default_signals,
        }
        if "input" not in options:
            defaults["stdin"] = subprocess.DEVNULL
        return subprocess.run(  # noqa: PLW1510  # in defaults
            self.ctl_words(*words), **{**defaults, **options}
        )

    def start_ctl(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start runnerctl; the caller waits for it."""
        defaults: dict[str, Any] = {
            "cwd": REPOSITORY,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "preexec_fn": with_default_signals,
        }
        return subprocess.Popen(self.ctl_words(*words), **{**defaults, **options})

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code as Popen gives it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """Kill it, whatever state it is in."""
        self.process.kill()
        self.process.wait(STOP_S)


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[Callable[..., RunnerdProcess]]:
    """Give a function that starts daemons; at the end stop them and check that nothing is left.

    This process adopts what they leave behind, so that a process which escaped all of runnerd
    is still found, by being our child.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = children()
    started: list[RunnerdProcess] = []

    def start(*options: str, place: Path | None = None, **more: Any) -> RunnerdProcess:
        if place is None:
            place = directory / f"d{len(started)}"
            place.mkdir()
        daemon = RunnerdProcess(place, *options, **more)
        started.append(daemon)
        return daemon

    try:
        yield start
    finally:
        for daemon in started:
            try:
                daemon.stop()
            except subprocess.TimeoutExpired:
                daemon.kill()
                raise
        _check_nothing_left(before)
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _check_nothing_left(before: set[int]) -> None:
    # What a shim ends after its daemon's end is given the time that takes.
    deadline_s = time.monotonic() + 5
    while left := _living(children() - before):
        if time.monotonic() > deadline_s:
            names = {pid: _command(pid) for pid in left}
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes were left behind: {names}")
        time.sleep(0.01)


def _living(pids: set[int]) -> set[int]:
    for pid in pids:
        if not is_alive(pid):
            # Adopted by us, so ours to reap; a Popen's own child is among `before` or waited for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return {pid for pid in pids if is_alive(pid)}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return "?"
