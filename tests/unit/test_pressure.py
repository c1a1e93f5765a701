"""Pressure is read from our own cgroup where it has a file, else from the system, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnerd.daemon.memory import Cgroup
from runnerd.daemon.pressure import Pressure, PressureFile, Stalls, parse_pressure

SOME = "some avg10=1.53 avg60=1.47 avg300=17.45 total=9627398"
FULL = "full avg10=0.10 avg60=0.20 avg300=0.30 total=500000"
OTHER = "some avg10=90.00 avg60=80.00 avg300=70.00 total=1"
NOWHERE = Path("/nonexistent")


def folder(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_both_lines_are_read_with_microseconds_as_seconds(tmp_path: Path) -> None:
    group = folder(tmp_path / "group", memory_pressure=f"{SOME}\n{FULL}\n")
    system = folder(tmp_path / "system", memory=OTHER)
    found = PressureFile(Cgroup(2, group), system=system)
    assert found.source == "cgroup"
    assert found.read() == Pressure(
        some=Stalls(1.53, 1.47, 17.45, 9.627398), full=Stalls(0.1, 0.2, 0.3, 0.5)
    )


@pytest.mark.parametrize("version", [1, 2, None])
def test_a_cgroup_without_a_file_leaves_the_system(tmp_path: Path, version: int | None) -> None:
    """Of v1 the name is no evidence: what lies there is not the kernel's."""
    files = {"memory_pressure": SOME} if version == 1 else {}
    group = folder(tmp_path / "group", **files)
    system = folder(tmp_path / "system", memory=OTHER, cpu=SOME)
    cgroup = Cgroup(version, group if version else None)  # type: ignore[arg-type]
    memory = PressureFile(cgroup, system=system)
    assert memory.source == "system"
    reading = memory.read()
    assert reading is not None
    assert (reading.some.avg10_percent, reading.full) == (90.0, None)
    cpu = PressureFile(cgroup, "cpu", system).read()
    assert cpu is not None
    assert cpu.some.avg10_percent == 1.53


def test_where_nothing_can_be_read_it_says_so_and_goes_on(tmp_path: Path) -> None:
    nothing = PressureFile(Cgroup(None, None), system=NOWHERE)
    assert (nothing.source, nothing.read()) == (None, None)
    system = folder(tmp_path / "system", memory=SOME)
    found = PressureFile(Cgroup(None, None), system=system)
    (system / "memory").unlink()
    assert (found.source, found.read()) == ("system", None)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "full avg10=0 avg60=0 avg300=0 total=0", SOME.replace("avg60", "x"), "some avg10",
     SOME.replace("1.53", "much"), SOME.replace("9627398", "-"), SOME.replace("=", "==")],
)  # fmt: skip
def test_another_form_is_no_reading(text: str) -> None:
    assert parse_pressure(text.encode()) is None


def test_this_system_is_read_where_its_kernel_counts() -> None:
    found = PressureFile(Cgroup(None, None))
    reading = found.read()
    assert (reading is None) == (found.source is None)
    if reading is not None:
        assert 0 <= reading.some.avg10_percent <= 100
