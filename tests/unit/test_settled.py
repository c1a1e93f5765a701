"""What is past: packed, bounded, and dropped so that nothing runs twice for it."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core import remembered
from runnerd.core.bounds import Bounds
from runnerd.core.past import Past, look_into, pack_past, unpack_past
from runnerd.core.registry import Registry
from runnerd.core.settled import Settled, marker_of
from runnerd.protocol.exits import Exit

from .core_parts import NOW_S, WALL_S
from .fake_daemon import make_exit
from .strategies import messages


def past(number: int, exec_id: str | None = None, **fields: Any) -> Past:
    exec_id = exec_id or f"x-{number:016x}"
    known: dict[str, Any] = {
        "incarnation": "0123456789abcdef",
        "nonce": "0123456789abcdef0123456789abcdef",
        "digest": bytes(range(32)),
        "accepted_at": WALL_S + number / 7,
        "pid": 100_000 + number,
        "oom_score_adj": 900,
        "journaled": True,
        "exit": make_exit(exec_id),
        "closed": None,
        "transcript": "evicted",
    }
    return Past(exec_id=exec_id, number=number, **(known | fields))


def record(number: int, ended_s_ago: float = 0.0, **fields: Any) -> Past:
    its_exit = make_exit(f"x-{number:016x}")
    its_exit.ended_at = WALL_S - ended_s_ago
    return past(number, argv=["true"], cwd="/", labels={}, **({"exit": its_exit} | fields))


@given(messages(Past))
def test_what_is_packed_comes_back(known: Past) -> None:
    assert unpack_past(pack_past(known)) == known


def test_packed_bytes_of_an_earlier_version_are_read() -> None:
    """Fields added since then get their defaults, in Past and in what it holds."""
    known = past(7)
    fields = msgspec.msgpack.decode(pack_past(known))
    assert len(fields) == len(Past.__struct_fields__)
    assert unpack_past(msgspec.msgpack.encode(fields[:12])) == known
    exit_fields = fields[9]
    assert exit_fields[0] == known.exec_id
    stderr_at = Exit.__struct_fields__.index("stderr")
    exit_fields[stderr_at] = exit_fields[stderr_at][:3]  # before streams had a sha256
    assert unpack_past(msgspec.msgpack.encode(fields)) == known


def test_the_order_in_which_fields_are_packed_is_fixed() -> None:
    """The journal on disk depends on it: new fields go last."""
    packed = hashlib.sha256(pack_past(past(7))).hexdigest()
    assert packed == "4b346ea00a332ecc316e36d4cc30153a7065010055393bedae3a4ad4c3004a73"


@pytest.mark.parametrize("packed", [b"", b"\x90", b"\xc0", pack_past(past(1))[:-1], b"{}"])
def test_what_is_no_past_is_refused(packed: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack_past(packed)


def test_as_many_markers_as_are_kept_fit_a_small_daemon() -> None:
    """Figures in core/past.py and DECISIONS.md: 310 bytes each, 9 MB with their index."""
    assert len(pack_past(past(100_000))) < 340
    most = Bounds().settled_execs_max
    tracemalloc.start()
    try:
        settled = Settled(most)
        for number in range(1, most + 1_001):
            settled.add_marker(past(number))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(settled), settled.dropped_number) == (most, 1_000)
    assert kept_bytes < 10_000_000


def test_markers_go_in_order_of_acceptance_whenever_they_came() -> None:
    settled = Settled(3)
    gone = [settled.add_marker(past(number)) for number in (9, 2, 7, 8, 1)]
    assert gone == [[], [], [], [2], [1]]
    assert settled.dropped_number == 2
    assert settled.get(past(7).exec_id) == marker_of(past(7))
    assert settled.get(past(2).exec_id) is None


def restored(*pasts: Past, starts: int = 100, dropped: int = 0, **bounds: Any) -> Registry:
    registry = Registry(Bounds(**bounds), "now")
    packed = [look_into(pack_past(each)) for each in pasts]
    registry.restore(packed, starts, dropped=dropped, now_s=NOW_S, wall_s=WALL_S)
    return registry


def listed(registry: Registry) -> list[int]:
    return [each.number for each in registry.page(None, 100)[0]]


def test_a_restart_loses_output_and_nothing_else() -> None:
    states = ["kept", "partial", "evicted", "forgotten", "lost"]
    pasts = [record(at + 1, transcript=state) for at, state in enumerate(states)]
    registry = restored(*pasts)
    found = [registry.past(each.exec_id) for each in pasts]
    assert [each and each.transcript for each in found] == [
        *["lost", "lost", "evicted", "forgotten", "lost"]
    ]
    assert listed(registry) == [1, 2, 3, 4, 5]
    assert registry.starts == 100


def test_a_record_of_an_earlier_incarnation_expires_an_hour_after_its_end() -> None:
    """By the wall clock, since the monotonic one began anew; a clock set back adds no time."""
    lost = record(4, exit=None)
    registry = restored(record(1, 3_500), record(2, 4_000), record(3, -9_999), lost)
    assert listed(registry) == [1, 3, 4]
    registry.expire(NOW_S + 101)
    assert listed(registry) == [3, 4]
    registry.expire(NOW_S + 3_601)
    assert listed(registry) == []
    settled = registry.take_settled()
    assert [each.number for each in settled] == [2, 1, 3, 4]
    assert all(each.argv is None and each.cwd is None for each in settled)
    assert [each.number for each in settled if registry.past(each.exec_id) == each] == [2, 1, 3, 4]


def test_records_of_earlier_incarnations_count_and_go_first() -> None:
    registry = restored(*[record(at, 100 - at) for at in range(1, 6)], finished_execs_max=3)
    assert listed(registry) == [3, 4, 5]


def test_of_one_id_the_latest_start_counts() -> None:
    registry = restored(past(3, "e"), past(9, "e"), past(5, "e"))
    found = registry.past("e")
    assert found is not None
    assert found.number == 9
    assert sorted(registry.take_dropped()) == [3, 5]  # so that no journal keeps them
    assert registry.settled_count == 1


@pytest.mark.parametrize(("starts", "dropped"), [(9, 0), (3, 0), (3, 12)])
def test_numbering_goes_on_behind_all_that_is_known(starts: int, dropped: int) -> None:
    registry = restored(past(7), starts=starts, dropped=dropped)
    assert registry.starts == max(starts, dropped, 7)
    assert registry.dropped_number == dropped


@given(st.lists(st.integers(1, 50), unique=True), st.integers(1, 5))
def test_more_than_fits_is_dropped_at_the_restart_too(numbers: list[int], most: int) -> None:
    registry = restored(*map(past, numbers), settled_execs_max=most)
    kept = sorted(numbers)[-most:]
    gone = sorted(set(numbers) - set(kept))
    assert [number for number in numbers if registry.past(past(number).exec_id)] == [
        number for number in numbers if number in kept
    ]
    assert sorted(registry.take_dropped()) == gone
    assert registry.dropped_number == max(gone, default=0)


@pytest.mark.parametrize(
    ("transcript", "has_exit", "kind"),
    [
        ("evicted", True, "exec_evicted"),
        ("forgotten", True, "exec_settled"),
        ("lost", True, "exec_lost"),
        ("lost", False, "exec_lost"),
    ],
)
def test_a_late_attach_hears_what_became_of_the_output_and_of_the_command(
    transcript: str, has_exit: bool, kind: str
) -> None:
    its_exit = make_exit("e", 3) if has_exit else None
    known = past(7, "e", transcript=transcript, exit=its_exit)
    error = remembered.no_output(known)
    assert (error.kind, error.data.exit) == (kind, its_exit)
    if kind != "exec_evicted":
        assert error.data.incarnation == known.incarnation
    if kind == "exec_lost":
        assert error.data.pid == known.pid
    over = remembered.over(known)
    assert (over.kind, over.data.exit) == ("exec_ended" if has_exit else "exec_lost", its_exit)
