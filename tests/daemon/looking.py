"""What the daemon's tests look at: log, trees, last words; and how they plant faults."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.harness import RunnerdProcess, children, descendants, is_alive, wait_for
from tests.raw import ClosedError, RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

PLANTED: Final = (sys.executable, "-m", "tests.daemon.planted")
TREE: Final = ["sh", "-c", "sleep 900 & setsid sh -c 'sleep 901; :' & echo up; wait"]
"""A command with children in its own session and in another one."""
TREE_SIZE: Final = 4


def planted(code: str) -> dict[str, Any]:
    """Return what starts a daemon with a fault in it."""
    return {"program": PLANTED, "env": {"PLANTED": textwrap.dedent(code)}}


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Wait until a file ends in a whole line, and return its lines; each must be a JSON object.

    A write that passes the end of a page is seen in pieces by whoever reads meanwhile.
    """
    texts: list[str] = wait_for(
        lambda: [text] if not (text := path.read_text()) or text.endswith("\n") else None
    )
    return [json.loads(line) for line in texts[0].splitlines()]


def log_lines(daemon: RunnerdProcess, event: str | None = None) -> list[dict[str, Any]]:
    """Return the log's lines, all or those of one event."""
    lines = whole_lines(daemon.log_path)
    return [line for line in lines if event is None or line["event"] == event]


def last_words(folder: Path) -> dict[str, Any]:
    words: dict[str, Any] = json.loads((folder / "last-words.json").read_text())
    return words


def command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def shims(daemon: RunnerdProcess) -> set[int]:
    """Return the daemon's shims, parked ones included."""
    return {pid for pid in children(daemon.pid) if command_name(pid) == "runnerd-shim"}


def tree_of(pid: int, size: int = TREE_SIZE) -> set[int]:
    """Wait until the command `pid` has its children, and return all of its tree with it.

    Its children in another session included, as long as nothing of it has been orphaned.
    """
    found: set[int] = wait_for(
        lambda: tree if len(tree := descendants(pid) | {pid}) >= size else None
    )
    return found


def shim_of(daemon: RunnerdProcess, pid: int) -> int:
    """Return the shim of the command `pid`."""
    (shim,) = [each for each in shims(daemon) if pid in children(each)]
    return shim


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if is_alive(pid)}


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call took, and what it returned."""
    began_s = time.monotonic()
    outcome = call()
    return time.monotonic() - began_s, outcome


def refusal(path: str) -> dict[str, Any]:
    """Connect as a peer that is not let in, and return the error it is told."""
    with RawClient(path, hello=False) as client:
        client.send("hello", protocol=[1])
        with contextlib.suppress(ClosedError):
            while not client.errors_without_id:
                client.receive()
        error: dict[str, Any] = client.errors_without_id[0]["error"]
        return error
