"""A start is refused where memory is short, by the cgroup nearest its limit, read cheaply."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from runnerd.core.admission import MemoryUse, check_memory
from runnerd.core.bounds import Bounds
from runnerd.core.registry import Registry
from runnerd.daemon.admission import MemoryGauge
from runnerd.daemon.memory import Cgroup
from runnerd.protocol.errors import RequestError
from tests.unit.core_parts import NOW_S, WALL_S, start_params

FULL = MemoryUse(91, 100)
V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
V2 = ("memory.current", "memory.max", "inactive_file")
V1_NO_LIMIT = "9223372036854771712"


def refused(use: MemoryUse | None, percent_max: int = 90) -> bool:
    try:
        check_memory(use, percent_max, "e")
    except RequestError:
        return True
    return False


def test_a_refusal_says_whose_doing_it_is_and_when_to_come_back() -> None:
    with pytest.raises(RequestError) as caught:
        check_memory(FULL, 90, "e")
    data = caught.value.data
    assert (data.kind, data.layer, data.retryable) == ("busy", "sandbox", True)
    assert (data.retry_after_s, data.preserved) == (1.0, "nothing ran, nothing changed")


@pytest.mark.parametrize(
    ("used", "limit", "percent_max", "expected"),
    [(90, 100, 90, False), (91, 100, 90, True), (101, 100, 100, True), (100, 100, 100, False),
     (2, 100, 1, True), (10**18, 1, 0, False), (0, 0, 90, False), (1, 0, 90, True)],
)  # fmt: skip
def test_more_than_the_share_is_refused_and_0_is_off(
    used: int, limit: int, percent_max: int, expected: bool
) -> None:
    assert refused(MemoryUse(used, limit), percent_max) is expected
    assert not refused(None, percent_max)


def accept(registry: Registry, exec_id: str, memory: MemoryUse | None, **fields: Any) -> None:
    registry.accept(
        exec_id, start_params(**fields), cwd="/", now_s=NOW_S, wall_s=WALL_S,
        oom_kills=0, memory=memory,
    )  # fmt: skip


def test_a_refused_start_changes_nothing_and_a_rescue_passes() -> None:
    registry = Registry(Bounds())
    with pytest.raises(RequestError, match="91 of 100 bytes"):
        accept(registry, "e", FULL)
    assert (registry.starts, registry.live_count) == (0, 0)
    accept(registry, "rescue", FULL, admission="skip")
    accept(registry, "e", MemoryUse(90, 100))
    assert registry.starts == 2


@pytest.mark.parametrize("state", ["draining", "stopping"])
def test_what_will_not_pass_by_waiting_is_said_first(
    state: Literal["draining", "stopping"],
) -> None:
    registry = Registry(Bounds())
    registry.state = state
    with pytest.raises(RequestError) as caught:
        accept(registry, "e", FULL)
    assert caught.value.kind == state


def level(
    folder: Path, used: int | str, limit: int | str, inactive: int = 0, names: Any = V2
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(f"{used}\n")
    (folder / names[1]).write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file_x 7\n{names[2]} {inactive}\nfile 9")
    return folder


def gauge(folder: Path, version: Literal[1, 2] = 2, percent_max: int = 90) -> MemoryGauge:
    return MemoryGauge(Cgroup(version, folder), percent_max)


@pytest.mark.parametrize(("version", "names"), [(1, V1), (2, V2)])
def test_cache_that_can_be_taken_back_does_not_count(
    tmp_path: Path, version: Literal[1, 2], names: Any
) -> None:
    folder = level(tmp_path / "group", 990, 1000, inactive=500, names=names)
    found = gauge(folder, version)
    assert found.use(0.0) == MemoryUse(490, 1000)
    level(folder, 990, 1000, inactive=10, names=names)
    assert found.use(1.0) == MemoryUse(980, 1000)


def test_memory_stat_is_read_only_where_it_matters(tmp_path: Path) -> None:
    """It costs ten times the others; daemon.info, which is asked rarely, always tells the truth."""
    found = gauge(level(tmp_path / "group", 900, 1000, inactive=500))
    assert found.use(0.0) == MemoryUse(900, 1000)
    assert found.info().working_set_bytes == 400


def test_a_reading_is_at_most_a_tenth_of_a_second_old(tmp_path: Path) -> None:
    folder = level(tmp_path / "group", 100, 1000)
    found = gauge(folder)
    assert found.use(5.0) == MemoryUse(100, 1000)
    level(folder, 200, 1000)
    assert found.use(5.05) == MemoryUse(100, 1000)
    assert found.use(5.11) == MemoryUse(200, 1000)


def test_the_cgroup_nearest_its_limit_decides(tmp_path: Path) -> None:
    pod = level(tmp_path / "pod", 950, 1000)
    own = level(pod / "own", 10, 500)
    assert gauge(own).use(0.0) == MemoryUse(950, 1000)
    roomy = level(tmp_path / "roomy", 950, 10_000)
    own = level(roomy / "own", 450, 500)
    found = gauge(own)
    assert found.use(0.0) == MemoryUse(450, 500)
    level(roomy, 9_900, 10_000)
    assert found.use(1.0) == MemoryUse(9_900, 10_000)


def test_a_limit_that_is_set_later_counts(tmp_path: Path) -> None:
    """`docker update --memory` and a resized pod change it under a running daemon."""
    folder = level(tmp_path / "group", 950, "max")
    found = gauge(folder)
    assert (found.use(0.0), found.info().reason) == (None, "the memory cgroup has no limit")
    level(folder, 950, 1000)
    assert found.use(1.0) == MemoryUse(950, 1000)
    assert found.info().reason is None


@pytest.mark.parametrize("text", ["", "-1", "lots", V1_NO_LIMIT])
def test_what_is_no_limit_is_not_checked(tmp_path: Path, text: str) -> None:
    folder = level(tmp_path / "group", 950, text, names=V1)
    assert gauge(folder, 1).use(0.0) is None


def test_usage_that_cannot_be_read_is_not_checked(tmp_path: Path) -> None:
    assert gauge(level(tmp_path / "group", "?", 1000)).use(0.0) is None


def test_where_there_is_nothing_to_read_it_says_so(tmp_path: Path) -> None:
    nowhere = MemoryGauge(Cgroup(None, None), 90)
    assert (nowhere.use(0.0), nowhere.info().reason) == (None, "no memory cgroup can be read")
    root = gauge(tmp_path)  # a root cgroup has none of the files
    assert (root.use(0.0), root.info().reason) == (None, "no memory cgroup can be read")
    off = gauge(level(tmp_path / "group", 990, 1000), percent_max=0)
    assert (off.use(0.0), off.info().reason) == (None, "it is off: --admit-memory-percent 0")
