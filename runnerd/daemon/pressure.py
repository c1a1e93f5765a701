"""How long processes have stood still for want of memory, as the kernel counts it (PSI).

Source: Documentation/accounting/psi.rst; cgroup v2: memory.pressure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from .memory import Cgroup

SYSTEM = Path("/proc/pressure/memory")


class Stalled(NamedTuple):
    """Seconds since the cgroup was made, or the system booted.

    Attributes:
        source: Of whom: cgroup = the daemon's, with all its commands; system = the whole machine.
        some_s: At least one process waited for memory.
        full_s: All that had something to do waited, so nothing got done.
    """

    source: Literal["cgroup", "system"]
    some_s: float
    full_s: float


def memory_pressure(cgroup: Cgroup, system: Path = SYSTEM) -> Stalled | None:
    """Read the counters; None where the kernel has none, psi=0 or before Linux 4.20.

    Args:
        cgroup: The daemon's; of v1 there is no such file, the system's is read then.
        system: The system's file.
    """
    if cgroup.version == 2 and (text := cgroup.read("memory.pressure")) is not None:
        found = _parsed(text)
        if found is not None:
            return Stalled("cgroup", *found)
    try:
        found = _parsed(system.read_text())
    except OSError:
        return None
    return None if found is None else Stalled("system", *found)


def _parsed(text: str) -> tuple[float, float] | None:
    """Return the totals of `some` and `full`, in seconds; they are told in microseconds."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        for field in fields:
            name, _, value = field.partition("=")
            if name == "total" and value.isdigit():
                totals[kind] = int(value) / 1e6
    if "some" not in totals:
        return None
    return totals["some"], totals.get("full", 0.0)
