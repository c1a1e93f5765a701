"""What the cases share: marked processes, times with room for a busy machine, cgroups, files."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests import needs
from tests.harness import children, is_alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runnerd.client.execs import Exec

ROOM: Final = 3.0
"""Times in the cases hold on an idle two-core machine, and so many times over elsewhere. The two
seconds of a stop are a promise and get no such room."""

STOP_S: Final = 2.0
STOP_ROOM_S: Final = 0.2  # scheduling, as the cases say

_marks = itertools.count(1)


def rounds(full: int, quick: int) -> int:
    """Return how often to go round: what the case asks for with RUNNERD_CASES_FULL=1, else fewer.

    Only for cases whose every round starts a daemon, or costs seconds; also for times, in seconds.
    """
    return full if is_full() else quick


def is_full() -> bool:
    """Whether every case is to run for as long and as often as it says."""
    return bool(os.environ.get("RUNNERD_CASES_FULL"))


def mark(base: int = 1000) -> str:
    """Return a number for `sleep` that no other process on this machine has as an argument."""
    return f"{base}.{os.getpid():07d}{next(_marks):04d}"


def marked(word: str) -> set[int]:
    """Return the living processes that have `word` as one of their arguments."""
    found: set[int] = set()
    wanted = word.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if wanted in arguments(pid) and is_alive(pid):
            found.add(pid)
    return found


def arguments(pid: int) -> list[bytes]:
    """Return a process's argv, empty where it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def status_field(pid: int, name: str) -> str:
    """Return a field of /proc/PID/status, empty where the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return status_field(pid, "State").startswith("T")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Return a process's resident set."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_fds(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def zombies(pid: int) -> int:
    """Return how many children of a process are zombies."""
    return sum(status_field(child, "State").startswith("Z") for child in children(pid))


def output_of(handle: Exec, timeout_s: float = 30.0) -> tuple[bytes, bytes]:
    """Read an exec to its exit; returns stdout and stderr."""
    streams = {"stdout": b"", "stderr": b""}
    for note in handle.output(timeout_s):
        data = getattr(note, "data", None)
        assert data is not None, f"a gap: {note}"
        streams[note.stream] += data  # type: ignore[union-attr]
    return streams["stdout"], streams["stderr"]


def read_until(handle: Exec, text: bytes, timeout_s: float = 10.0) -> bytes:
    """Read stdout until it holds `text`; returns what was read."""
    read = b""
    for note in handle.output(timeout_s):
        read += getattr(note, "data", b"")
        if text in read:
            return read
    raise AssertionError(f"exited before it said {text!r}, after {read!r}")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds a call took, and what it returned."""
    began_s = time.monotonic()
    result = call()
    return time.monotonic() - began_s, result


def metric(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that carry these labels."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if found is None or found[1] != name:
            continue
        held = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
        if all(held.get(key) == value for key, value in labels.items()):
            total += float(found[3])
    return total


@contextlib.contextmanager
def cgroup(controller: str, name: str) -> Iterator[Path]:
    """Make a cgroup (version 1) at the top level, and remove it with all that is in it.

    Skips where this machine has none to give.
    """
    needs.root()
    top = Path("/sys/fs/cgroup") / controller
    if not (top / "tasks").exists():
        needs.skip_or_fail(f"needs the {controller} controller on cgroup v1")
    folder = top / f"rd-{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        needs.skip_or_fail(f"cannot make a {controller} cgroup: {error.strerror}")
    try:
        yield folder
    finally:
        wait_for(lambda: _removed(folder), 10)


def _removed(folder: Path) -> bool:
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), 9)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def entering(folder: Path, then: str = "") -> list[str]:
    """Return a wrapper that enters a cgroup, runs a line of shell, and execs the daemon."""
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; {then} exec "$@"', "sh"]
