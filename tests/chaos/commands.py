"""What a round of chaos runs: commands that write down themselves what they did.

Each has a file of its own. `begin PID` is written first, `end CODE` right before it exits by
itself: so what the daemon says of its end can be compared with what it knows. What it prints is
told by the offset alone, so every byte received is checked, wherever a gap lets it begin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

LINE: Final = b"0123456789abcde\n"
SILENT_TERM: Final = "trap '' TERM; "


class Command:
    """One exec of a round.

    Args:
        exec_id: Its id; also its nonce.
        folder: Where it writes down what it did.
        script: Run by sh, between `begin` and `end`.
        code: What it exits with, if nobody hinders it; None where it would not end.
        stdout_bytes: What it prints, if nobody hinders it; None where that is not known.
        params: Further parameters of its start.

    Attributes:
        harms: What was done to it, by name; see harms.py.
    """

    def __init__(
        self,
        exec_id: str,
        folder: Path,
        script: str,
        *,
        code: int | None,
        stdout_bytes: int | None = 0,
        **params: Any,
    ) -> None:
        self.exec_id = exec_id
        self.code = code
        self.stdout_bytes = stdout_bytes
        self.stdin = params.pop("feed", b"")
        self.harms: set[str] = set()
        self.pid: int | None = None
        self._file = folder / exec_id.rpartition(":")[2]
        end = 0 if code is None else code
        text = f'echo begin $$ >"$0"\n{script}\necho end {end} >>"$0"\nexit {end}'
        argv = ["sh", "-c", text, str(self._file)]
        self.start = {"exec_id": exec_id, "nonce": exec_id, "argv": argv, **params}

    def told(self) -> list[list[str]]:
        """Return what it wrote down, a list of words a line."""
        try:
            return [line.split() for line in self._file.read_text().splitlines()]
        except OSError:
            return []

    @property
    def began(self) -> bool:
        """Whether it ran at all."""
        return bool(self.told())

    @property
    def ended_with(self) -> int | None:
        """What it was about to exit with; None where it did not get there."""
        return next((int(words[1]) for words in self.told() if words[0] == "end"), None)


def printed(offset: int, count: int) -> bytes:
    """Return `count` bytes as `yes` prints them from an offset on."""
    first = offset % len(LINE)
    return (LINE * ((first + count) // len(LINE) + 1))[first : first + count]


def _says(size: int) -> str:
    return f"yes {LINE[:-1].decode()} | head -c {size}"


def _quick(chance: Random) -> dict[str, Any]:
    return {"script": ":", "code": chance.randrange(256)}


def _sleeps(chance: Random) -> dict[str, Any]:
    return {"script": f"sleep {chance.uniform(0.01, 0.3):.2f}", "code": 7}


def _prints(chance: Random) -> dict[str, Any]:
    size = chance.choice((1, 1000, 65536, 200_000, 700_000))
    pause = chance.choice(("", "sleep 0.1; "))
    return {"script": pause + _says(size), "code": 0, "stdout_bytes": size}


def _prints_to_both(chance: Random) -> dict[str, Any]:
    script = f"{_says(50_000)} & {_says(90_000)} >&2; wait"
    return {"script": script, "code": 2, "stdout_bytes": 50_000}


def _echoes(chance: Random) -> dict[str, Any]:
    size = chance.choice((16, 5000, 200_000))
    return {
        "script": "cat", "code": 1, "stdout_bytes": size, "stdin": "pipe", "feed": printed(0, size),
    }  # fmt: skip


def _leaves(chance: Random) -> dict[str, Any]:
    leftovers = chance.choice(("keep", "kill"))
    return {"script": "(sleep 0.2; echo late >&2) &", "code": 4, "leftovers": leftovers}


def _terminal(chance: Random) -> dict[str, Any]:
    return {"script": "stty size; sleep 0.05", "code": 5, "stdout_bytes": None, "pty": {}}


def _tree(chance: Random) -> dict[str, Any]:
    deaf = chance.choice(("", SILENT_TERM))
    deadline = {"deadline_s": 0.2} if chance.random() < 0.3 else {}
    script = f"{deaf}sleep 900 & setsid sh -c '{deaf}sleep 901; :' & sleep 902; wait"
    return {"script": script, "code": None, **deadline}


def _floods(chance: Random) -> dict[str, Any]:
    return {
        "script": f"exec yes {LINE[:-1].decode()}",
        "code": None,
        "stdout_bytes": None,
        "flow": chance.choice(("block", "drop")),
        "deadline_s": chance.choice((0.1, 0.3, 5)),
    }


KINDS: Final[tuple[Callable[[Random], dict[str, Any]], ...]] = (
    _quick, _sleeps, _prints, _prints_to_both, _echoes, _leaves, _terminal, _tree, _floods,
)  # fmt: skip


def command(chance: Random, exec_id: str, folder: Path) -> Command:
    """Make one at random."""
    made = chance.choice(KINDS)(chance)
    more = {
        "grace_s": chance.choice((0, 0.1)),
        "hold_s": 0.2,
        "sha256": chance.random() < 0.3,
        "oom_score_adj": 1000,
    }
    return Command(exec_id, folder, **(more | made))
