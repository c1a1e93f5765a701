"""How things ended, as a shell sees it: exit codes, and words for standard error.

Exit codes of runnerctl:
    0-255    the command's own
    128 + N  the command was ended by signal N
    127      the program was not found
    126      the program cannot be executed
    125      runnerctl's own: a refusal, bad usage, a stream lost for good, an exit not known

Source: POSIX.1-2024, Shell Command Language, 2.8.2, "Exit Status for Commands"; 125 as
docker-run(1) and env(1) use it.
"""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from runnerd.client.errors import ClientError, StreamLost
    from runnerd.protocol.exits import Exit
    from runnerd.protocol.notes import GapNote

REFUSED: Final = 125
CANNOT_EXECUTE: Final = 126
NOT_FOUND: Final = 127
SIGNAL_BASE: Final = 128
SIGKILL: Final = 9
INTERRUPTED: Final = SIGNAL_BASE + 2  # SIGINT

_ENDED_BY: Final = {
    "cancelled": "ended by a cancel",
    "deadline": "ended by its deadline",
    "orphaned": "ended because nobody was attached for too long",
    "stalled": "ended because it neither printed nor computed for too long",
    "stopped": "ended because runnerd stopped",
    "lost": "its exit is lost",
    "internal": "ended by a defect in runnerd",
}


def exit_code(exit: Exit) -> int:
    """Map a command's exit onto the code a POSIX shell would report for it.

    The map loses information: 137 may be SIGKILL or exit(137), and 125 is also what a command
    may use itself. `wait --json` has the exit itself.
    """
    if exit.code is not None:
        return exit.code
    if exit.signal is not None:
        return SIGNAL_BASE + exit.signal
    return REFUSED


def error_code(error: ClientError) -> int:
    """Map an error onto an exit code: 127 and 126 for a program, 125 for all else."""
    data = getattr(error, "data", None)
    if data is None or data.kind != "start_failed" or data.stage != "exec":
        return REFUSED
    return NOT_FOUND if data.errno == errno.ENOENT else CANNOT_EXECUTE


def ending(exit: Exit) -> str | None:
    """Say who ended a command, or None where it simply ended by itself."""
    how = ""
    if exit.signal is not None:
        how = f" (signal {exit.signal})"
    elif exit.code is not None:
        how = f" (exit code {exit.code})"
    if exit.reason in _ENDED_BY:
        return f"{_ENDED_BY[exit.reason]}{how}"
    if exit.signal == SIGKILL and exit.oom.verdict in ("killed", "possible"):
        likely = "" if exit.oom.verdict == "killed" else ", most likely"
        return f"killed at the memory limit{likely}{how}"
    return None


def plain(text: str) -> str:
    """Make text of others fit for a terminal: nothing in it moves the cursor or asks anything."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def say(text: str) -> None:
    """Print one line on standard error, as runnerctl's own words."""
    say_bare(f"runnerctl: {text}")


def say_hint(text: str) -> None:
    """Print on standard error what to do about what was said before."""
    say_bare(f"hint: {text}")


def say_bare(line: str) -> None:
    """Print one line on standard error, and from the first that fails on nothing any more."""
    if sys.stderr is None:  # print would take standard output instead
        return
    try:
        print(plain(line), file=sys.stderr, flush=True)
    except OSError:
        # Nobody reads it. The exit code still tells.
        sys.stderr = None  # else its flush at exit fails once more


def say_gap(gap: GapNote) -> None:
    """Name what is no longer kept of the output, in its place."""
    lost = (("stdout", gap.stdout_bytes), ("stderr", gap.stderr_bytes))
    known = [f"{count} bytes of {name}" for name, count in lost if count]
    say(f"{' and '.join(known) or 'some of the output'} can no longer be shown")


def say_reconnecting(_lost: StreamLost) -> None:
    """Say that a connection was lost; what follows on standard output is whole all the same."""
    say("connection lost; reconnecting")


def say_error(error: ClientError) -> None:
    """Print what happened, what is still true and what to do, the latter two where known."""
    preserved = f" ({error.preserved})" if error.preserved else ""
    say(f"{error.message}{preserved}")
    if error.hint:
        # Some name a field of the error's data, which nobody sees here.
        after_s = getattr(getattr(error, "data", None), "retry_after_s", None)
        after = "a moment" if after_s is None else f"{after_s:g} s"
        say_hint(error.hint.replace("data.retry_after_s", after))
