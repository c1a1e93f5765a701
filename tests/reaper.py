"""Run a command with signals as they should be, and leave nothing of it running.

    python tests/reaper.py COMMAND...

Why tests/run needs something between itself and pytest:

* A shell that starts a job in the background has it ignore INT and QUIT, Python adds PIPE and
  XFSZ, and all of it is inherited through every exec. A test of what a command inherits, or of
  Ctrl-C, would then pass or fail by how the suite was started. So dispositions and mask go back
  to their defaults first. HUP alone stays as it is: nohup's user asked for that.
* Tests start daemons whose business is to survive. This process is a subreaper, so whatever
  loses its parent comes here: it is reaped at once (some containers' PID 1 takes seconds, and a
  test that looks for zombies would wait for it), and what still runs after the command's end is
  killed. A run that passed but left something running has failed: that is a leak. Children
  that were here before the command (a shell's `exec tests/run > >(tee log)`) are left alone.

The exit code is the command's, 128 + N for a signal.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LEAVE_S = 3.0  # a shim whose daemon was killed takes 1.5 s to end its tree; then it is a leak
KILL_S = 5.0  # what survives KILL for longer is stuck in the kernel


def reset_signals() -> None:
    """Give every signal its default disposition, but HUP, and block none."""
    for signum in signal.valid_signals() - {signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def descendants(strangers: frozenset[int] = frozenset()) -> dict[int, str]:
    """List the living processes below this one, with their names; zombies are not living.

    Args:
        strangers: children to leave out, with all below them.
    """
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        head, _, tail = text.rpartition(")")  # the name may itself hold ") "
        pid, _, name = head.partition(" (")
        state, parent = tail.split()[:2]
        children.setdefault(int(parent), []).append(int(pid))
        if state not in "ZX":
            names[int(pid)] = name
    found: dict[int, str] = {}
    todo = [os.getpid()]
    while todo:
        for below in children.get(todo.pop(), []):
            if below in strangers:
                continue
            todo.append(below)
            if below in names:
                found[below] = names[below]
    return found


def reap() -> None:
    """Reap every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def leave_nothing(strangers: frozenset[int]) -> dict[int, str]:
    """Wait for what the command left to end by itself, then kill it; say what had to be."""
    killed: dict[int, str] = {}
    began_s = time.monotonic()
    while time.monotonic() < began_s + LEAVE_S + KILL_S:
        reap()
        living = descendants(strangers)
        if not living:
            break
        if time.monotonic() >= began_s + LEAVE_S:
            killed |= living
            for pid in living:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.02)
    return killed


def wait_for(child: int) -> int:
    """Wait for the command, reaping what comes here meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    """Run the command, and tell how it ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    strangers = frozenset(descendants())
    # Held back until the handlers below stand: the command may be running before they do.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
    child = os.fork()
    if child == 0:
        reset_signals()
        os.execvp(argv[0], argv)

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        os.kill(child, signum)

    # A terminal sends INT and QUIT to pytest itself; TERM comes from whoever knows our pid only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = wait_for(child)
    leaked = leave_nothing(strangers)
    if leaked and code == 0:
        listed = ", ".join(f"{name} ({pid})" for pid, name in sorted(leaked.items()))
        print(f"the tests passed, but left running (killed now): {listed}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
