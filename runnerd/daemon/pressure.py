"""How long tasks have stood still for want of memory, CPU or disk, as the kernel counts it (PSI).

Of our own cgroup where that is a v2 one, else of the whole system: a v1 cgroup has no such file.
A system's pressure may be its other tenants', so who reads a value is told whose it is.

Source: Documentation/accounting/psi.rst; cgroup v2: memory.pressure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from .memory import Cgroup

Resource = Literal["memory", "cpu", "io"]
_SYSTEM: Final = Path("/proc/pressure")
_TEXT_BYTES_MAX: Final = 4096  # two lines of under 100 bytes, as the kernel writes them


class Stalls(NamedTuple):
    """Shares of time and their sum.

    Attributes:
        avg10_percent: Of the last 10 s, 0-100; the kernel reckons it anew every 2 s.
        avg60_percent: Of the last minute.
        avg300_percent: Of the last five minutes.
        total_s: Since the cgroup's or the system's beginning, in seconds.
    """

    avg10_percent: float
    avg60_percent: float
    avg300_percent: float
    total_s: float


class Pressure(NamedTuple):
    """What one file says.

    Attributes:
        some: While at least one task stood still.
        full: While all that could have run did; None where the kernel does not say (of the CPU,
            before 5.13).
    """

    some: Stalls
    full: Stalls | None


class PressureFile:
    """Where the pressure on one resource can be read; found once, opened at each read.

    Args:
        cgroup: The daemon's, as memory.find_cgroup returns it.
        resource: What tasks stand still for.
        system: Where the whole system's files are.

    Attributes:
        source: cgroup or system; None where nothing can be read (a kernel without PSI, psi=0, a
            /proc that hides it).
    """

    def __init__(
        self, cgroup: Cgroup, resource: Resource = "memory", system: Path = _SYSTEM
    ) -> None:
        self.source: Literal["cgroup", "system"] | None = None
        self._path: Path | None = None
        if cgroup.version == 2 and cgroup.folder is not None:
            self._take("cgroup", cgroup.folder / f"{resource}.pressure")
        if self.source is None:
            self._take("system", system / resource)

    def _take(self, source: Literal["cgroup", "system"], path: Path) -> None:
        # A kernel booted with psi=0 has the files and refuses to read them.
        if _read(path) is not None:
            self.source, self._path = source, path

    def read(self) -> Pressure | None:
        """Return what it says now, or None where it cannot be read; about 15 microseconds."""
        return None if self._path is None else _read(self._path)


def _read(path: Path) -> Pressure | None:
    try:
        with path.open("rb", buffering=0) as file:
            text = file.read(_TEXT_BYTES_MAX)
    except OSError:
        return None
    return parse_pressure(text or b"")


def parse_pressure(text: bytes) -> Pressure | None:
    """Return what a pressure file's text says, None where that is not the known form."""
    found: dict[bytes, Stalls] = {}
    try:
        for line in text.splitlines():
            kind, *pairs = line.split()
            values = dict(pair.split(b"=") for pair in pairs)
            found[kind] = Stalls(
                avg10_percent=float(values[b"avg10"]),
                avg60_percent=float(values[b"avg60"]),
                avg300_percent=float(values[b"avg300"]),
                total_s=int(values[b"total"]) / 1e6,
            )
    except (KeyError, ValueError):
        return None
    if b"some" not in found:
        return None
    return Pressure(found[b"some"], found.get(b"full"))
