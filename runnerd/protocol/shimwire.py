"""The messages on a shim's control socket: one text line each, in both directions.

What each means, and when it comes, stands in shim/README.md; shim/runnerd_shim.c writes and reads
the other end, and changes together with this file. Parsing is strict: the shim is our own program,
so a line that does not fit is a bug or a tampered shim, and never guessed at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Scope = Literal["command", "group", "tree"]
ExitKind = Literal["exit", "kill", "dump"]
Place = Literal["g", "s", "x"]
Found = Literal["c", "p"]
SurvivorReason = Literal["D", "user", "other"]
Leader = Literal["gone", "default", "caught"]

_SCOPES: Final = frozenset(get_args(Scope))
_EXIT_KINDS: Final[dict[str, ExitKind]] = {"exit": "exit", "kill": "kill", "dump": "dump"}
_PLACES: Final[dict[str, Place]] = {"g": "g", "s": "s", "x": "x"}
_FOUND: Final[dict[str, Found]] = {"c": "c", "p": "p"}
_REASONS: Final[dict[str, SurvivorReason]] = {"D": "D", "user": "user", "other": "other"}
_LEADERS: Final[dict[str, Leader]] = {"gone": "gone", "default": "default", "caught": "caught"}

# More digits than any number of the shim has (64 bits: 20); int() of a longer one costs time.
_DIGITS_MAX: Final = 20


class ShimMessageError(ValueError):
    """A line that is not one of the shim's messages. Ours or a tampered shim's fault."""


class SignalledProcess(msgspec.Struct, frozen=True):
    """One process of a receipt.

    Attributes:
        pid: Its pid, which may belong to another process by now.
        place: `g` in the command's group, `s` left the group, `x` left the session.
        found: `c` by the kernel's lists of children, `p` by a scan of /proc.
    """

    pid: int
    place: Place
    found: Found


class Survivor(msgspec.Struct, frozen=True):
    """A process KILL has not ended: in uninterruptible sleep, another user's, or neither."""

    pid: int
    reason: SurvivorReason


class Parked(msgspec.Struct, frozen=True):
    """The shim and its child wait for a job."""

    pid: int


class Failed(msgspec.Struct, frozen=True):
    """The command was not started, and nothing of it ran.

    Attributes:
        stage: Where it failed; `killed` if the child died before execve.
        errno: Why; for `killed` the signal that ended the child.
        interpreter: Whether it is not the program that is missing but its interpreter or loader.
    """

    stage: str
    errno: int
    interpreter: bool


class LeafRefused(msgspec.Struct, frozen=True):
    """The command's cgroup could not be entered; it starts all the same."""

    errno: int


class OomAdjRefused(msgspec.Struct, frozen=True):
    """The command's OOM score could not be raised; it starts all the same."""

    errno: int


class Started(msgspec.Struct, frozen=True):
    """Execve has succeeded.

    Attributes:
        pid: The command's pid, its group and its session.
        oom_score_adj: Its score at execve; None where it could not be read.
        at_ns: When execve was called, in nanoseconds of CLOCK_MONOTONIC.
    """

    pid: int
    oom_score_adj: int | None
    at_ns: int


class Exited(msgspec.Struct, frozen=True):
    """The command has ended. Its usage is that of itself and the children it waited for.

    Attributes:
        kind: `exit` by itself, `kill` by a signal, `dump` by a signal with a core file.
        value: The exit code or the signal.
        at_ns: When the shim saw it, in nanoseconds of CLOCK_MONOTONIC.
        utime_us: CPU time in user mode, in microseconds.
        stime_us: CPU time in the kernel, in microseconds.
        maxrss_kib: Peak resident set, in KiB.
        minflt: Page faults served from memory.
        majflt: Page faults that read from a disk.
        inblock: Blocks of 512 bytes read.
        oublock: Blocks of 512 bytes written.
    """

    kind: ExitKind
    value: int
    at_ns: int
    utime_us: int
    stime_us: int
    maxrss_kib: int
    minflt: int
    majflt: int
    inblock: int
    oublock: int


class Signalled(msgspec.Struct, frozen=True):
    """The answer to `signal`: how many processes got it, and the first errno, 0 for none."""

    signum: int
    count: int
    errno: int


class Ending(msgspec.Struct, frozen=True):
    """The receipt of an end, sent before anything is signalled.

    Attributes:
        grace_ms: The time left until KILL, in milliseconds, 0 if it has begun.
        leader: `gone`, its exit was told before; `default`, TERM meets its default action, or
            none is sent, so an exit by code is the command's own; `caught`, it may be the answer.
    """

    grace_ms: int
    leader: Leader


class Termed(msgspec.Struct, frozen=True):
    """TERM was sent, once. `total` counts all that got it; at most 200 are listed."""

    total: int
    gone: int
    processes: tuple[SignalledProcess, ...]


class Killing(msgspec.Struct, frozen=True):
    """The rounds of KILL begin."""


class Killed(msgspec.Struct, frozen=True):
    """The rounds of KILL are over. `total` counts all that got it; at most 200 are listed."""

    total: int
    processes: tuple[SignalledProcess, ...]


class Survivors(msgspec.Struct, frozen=True):
    """What KILL has not ended within its bound. The shim goes on trying once a second."""

    total: int
    processes: tuple[Survivor, ...]


class Empty(msgspec.Struct, frozen=True):
    """Nothing of the command is left; the shim leaves."""


ShimMessage = (
    Parked
    | Failed
    | LeafRefused
    | OomAdjRefused
    | Started
    | Exited
    | Signalled
    | Ending
    | Termed
    | Killing
    | Killed
    | Survivors
    | Empty
)


def parse_shim_message(data: bytes) -> ShimMessage:
    """Read one message of a shim.

    Args:
        data: One packet of the control socket.

    Returns:
        The message.

    Raises:
        ShimMessageError: If it is not one, for whatever reason.
    """
    try:
        words = data.decode("ascii").split(" ")
        return _PARSERS[words[0]](words)
    except (KeyError, ValueError, IndexError) as error:
        raise ShimMessageError(f"not a message of the shim: {data[:80]!r}") from error


def signal_message(signum: int, scope: Scope) -> bytes:
    """Ask for a signal, 1 to 64, to the command, its group, or its whole tree."""
    assert 1 <= signum <= 64, signum
    assert scope in _SCOPES, scope
    return b"signal %d %s" % (signum, scope.encode())


def end_message(grace_ms: int) -> bytes:
    """Ask for the end of the tree: TERM, then KILL after `grace_ms`; 0 is KILL at once."""
    assert grace_ms >= 0, grace_ms
    return b"end %d" % grace_ms


def _natural(word: str) -> int:
    # Not int() alone, which takes signs, spaces, underscores and leading zeros as well.
    if not word.isdigit() or len(word) > _DIGITS_MAX or (word[0] == "0" and word != "0"):
        raise ValueError(word)
    return int(word)


def _score(word: str) -> int | None:
    if word == "-":
        return None
    if not word.startswith("-"):
        return _natural(word)
    if word == "-0":
        raise ValueError(word)
    return -_natural(word[1:])


def _exactly(words: list[str], count: int) -> None:
    if len(words) != count:
        raise ValueError(words)


def _parse_parked(words: list[str]) -> Parked:
    _, pid = words
    return Parked(_natural(pid))


def _parse_failed(words: list[str]) -> Failed:
    if len(words) == 4 and words[3] == "interpreter":
        return Failed(_word(words[1]), _natural(words[2]), interpreter=True)
    _, stage, errno = words
    return Failed(_word(stage), _natural(errno), interpreter=False)


def _word(word: str) -> str:
    if not (word.isalpha() and word.islower()):
        raise ValueError(word)
    return word


def _parse_leaf(words: list[str]) -> LeafRefused:
    _, errno = words
    return LeafRefused(_natural(errno))


def _parse_oom_adj(words: list[str]) -> OomAdjRefused:
    _, errno = words
    return OomAdjRefused(_natural(errno))


def _parse_started(words: list[str]) -> Started:
    _, pid, score, at_ns = words
    return Started(_natural(pid), _score(score), _natural(at_ns))


def _parse_exited(words: list[str]) -> Exited:
    _exactly(words, 11)
    return Exited(_EXIT_KINDS[words[1]], *map(_natural, words[2:]))


def _parse_signalled(words: list[str]) -> Signalled:
    _, signum, count, errno = words
    return Signalled(_natural(signum), _natural(count), _natural(errno))


def _parse_ending(words: list[str]) -> Ending:
    _, grace_ms, leader = words
    return Ending(_natural(grace_ms), _LEADERS[leader])


def _processes(words: list[str], total: int) -> tuple[SignalledProcess, ...]:
    processes = []
    for word in words:
        pid, place, found = word.split(":")
        processes.append(SignalledProcess(_natural(pid), _PLACES[place], _FOUND[found]))
    if len(processes) > total:
        raise ValueError(total)
    return tuple(processes)


def _parse_termed(words: list[str]) -> Termed:
    total = _natural(words[1])
    return Termed(total, _natural(words[2]), _processes(words[3:], total))


def _parse_killing(words: list[str]) -> Killing:
    _exactly(words, 1)
    return Killing()


def _parse_killed(words: list[str]) -> Killed:
    total = _natural(words[1])
    return Killed(total, _processes(words[2:], total))


def _parse_survivors(words: list[str]) -> Survivors:
    total = _natural(words[1])
    survivors = []
    for word in words[2:]:
        pid, reason = word.split(":")
        survivors.append(Survivor(_natural(pid), _REASONS[reason]))
    if len(survivors) > total:
        raise ValueError(total)
    return Survivors(total, tuple(survivors))


def _parse_empty(words: list[str]) -> Empty:
    _exactly(words, 1)
    return Empty()


_PARSERS: Final[dict[str, Callable[[list[str]], ShimMessage]]] = {
    "parked": _parse_parked,
    "failed": _parse_failed,
    "leaf": _parse_leaf,
    "oom-adj": _parse_oom_adj,
    "started": _parse_started,
    "exited": _parse_exited,
    "signalled": _parse_signalled,
    "ending": _parse_ending,
    "termed": _parse_termed,
    "killing": _parse_killing,
    "killed": _parse_killed,
    "survivors": _parse_survivors,
    "empty": _parse_empty,
}
