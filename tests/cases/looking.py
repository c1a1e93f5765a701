"""What the cases look at from outside: /proc, and one exec's stream as a client was told it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.harness import is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runnerd.client.blocking import Client
    from tests.raw import RawClient

SLACK: Final = 3.0  # the cases' times hold on an idle machine; here others work beside them
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Return a process's resident set."""
    return _memory(pid, "VmRSS")


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident set a process has had."""
    return _memory(pid, "VmHWM")


def _memory(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def cpu_s(pid: int) -> float:
    """Return the CPU seconds a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def marked(*words: str) -> set[int]:
    """Return the living processes whose command line ends with these words."""
    wanted = [word.encode() for word in words]
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
                if argv[-len(wanted) :] == wanted and is_alive(int(entry.name)):
                    found.add(int(entry.name))
    return found


def metric(client: Client, name: str, **labels: str) -> float:
    """Return one sample of the daemon's metrics, 0 where it is not there yet."""
    wanted = set(labels.items())
    for line in client.metrics().text.splitlines():
        found = re.fullmatch(r"(\w+)(?:\{(.*)\})? ([0-9.e+-]+)", line)
        if found and found[1] == name:
            have = set(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if wanted <= have:
                return float(found[3])
    return 0.0


def records(client: RawClient, exec_id: str) -> list[dict[str, Any]]:
    """Return the records told of an exec so far, in the order they came, each with `method`."""
    return [
        {"method": note["method"], **note["params"]}
        for note in client.notes
        if note.get("params", {}).get("exec_id") == exec_id and note["method"] != "exec.heartbeat"
    ]


@contextlib.contextmanager
def within(limit_s: float, what: str = "") -> Iterator[None]:
    """Fail where the block takes longer than the case allows, slack included."""
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    assert took_s <= limit_s * SLACK, f"{what} took {took_s:.2f} s; {limit_s} s x {SLACK:g} allowed"
