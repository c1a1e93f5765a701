"""Who may start, who is remembered, and for how long."""

from typing import Literal

import pytest

from runnerd.core.bounds import TOMBSTONE_S, TOMBSTONES_MAX, Bounds
from runnerd.core.digest import content_of
from runnerd.core.execs import Exec
from runnerd.core.past import Past
from runnerd.core.registry import Registry
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecStart

from .core_parts import NOW_S, WALL_S, blocking, exit_status, run_to_close, start_params

FEW = Bounds(live_execs_max=3, finished_execs_max=4, finished_s_max=60.0)


def start(
    registry: Registry, exec_id: str, now_s: float = NOW_S, params: ExecStart | None = None
) -> Exec | Past:
    """Start as the daemon does: a known exec is returned, a new one accepted."""
    params = params or start_params()
    content = content_of(params)
    known = registry.recall(exec_id, content, params.horizon, now_s)
    if known is not None:
        return known
    return registry.accept(
        exec_id,
        params,
        content=content,
        cwd="/",
        now_s=now_s,
        wall_s=WALL_S,
        oom_kills=0,
    )


def accept(
    registry: Registry, exec_id: str, now_s: float = NOW_S, params: ExecStart | None = None
) -> Exec:
    """Start what must be new."""
    before = registry.starts
    accepted = start(registry, exec_id, now_s, params)
    assert isinstance(accepted, Exec)
    assert (accepted.number, registry.starts) == (before + 1, before + 1)
    return accepted


def finish(registry: Registry, exec_id: str, now_s: float = NOW_S) -> Exec:
    found = registry.get(exec_id)
    run_to_close(found, now_s)
    registry.closed(found, now_s)
    return found


def fail(registry: Registry, failed: Exec) -> None:
    failed.start_failed()
    registry.failed(failed)


def refusal(
    registry: Registry, exec_id: str, now_s: float = NOW_S, params: ExecStart | None = None
) -> RequestError:
    """Start in vain; the refusal must have changed nothing."""

    def seen() -> tuple[object, ...]:
        kept, _ = registry.page(None, 1000)
        known = registry.settled_count, registry.dropped_number
        return registry.starts, registry.live_count, kept, registry.budget.used_bytes, known

    before = seen()
    with pytest.raises(RequestError) as caught:
        start(registry, exec_id, now_s, params)
    assert seen() == before
    return caught.value


def ids(page: tuple[list[Exec | Past], int | None]) -> list[str]:
    return [each.exec_id for each in page[0]]


def settled_ids(registry: Registry) -> list[str]:
    return [past.exec_id for past in registry.take_settled()]


@pytest.mark.parametrize("state", ["live", "finished"])
def test_a_start_never_adopts(state: str) -> None:
    registry = Registry(FEW)
    accept(registry, "a")
    if state == "finished":
        finish(registry, "a")
    error = refusal(registry, "a")
    assert error.kind == "exec_exists"
    assert error.data.state == state


@pytest.mark.parametrize("state", ["starting", "running", "draining", "lingering"])
def test_an_exec_of_which_anything_may_live_is_live(state: str) -> None:
    registry = Registry(FEW)
    its_exec = accept(registry, "a")
    if state != "starting":
        its_exec.started(100, 900, NOW_S, WALL_S)
    if state in {"draining", "lingering"}:
        its_exec.exited(exit_status(), by_itself=True)
    if state == "lingering":
        its_exec.drained(NOW_S, WALL_S, oom_kills=0, starts=1)
    assert its_exec.state.shown == state
    assert refusal(registry, "a").data.state == "live"
    registry.expire(NOW_S + 1e9)
    assert registry.get("a") is its_exec
    assert registry.live() == [its_exec]


@pytest.mark.parametrize("state", ["stopping", "draining"])
def test_only_a_serving_daemon_admits(state: Literal["stopping", "draining"]) -> None:
    registry = Registry(FEW)
    registry.state = state
    assert refusal(registry, "a").kind == state
    registry.state = "serving"
    accept(registry, "a")


@pytest.mark.parametrize("state", ["stopping", "draining", "serving"])
def test_what_is_known_is_said_before_any_admission(
    state: Literal["stopping", "draining", "serving"],
) -> None:
    """A client that retries must hear what became of its exec, not that the daemon is full."""
    registry = Registry(FEW)
    for exec_id in "abc":
        accept(registry, exec_id)
    registry.bury("gone", NOW_S)
    registry.state = state
    assert refusal(registry, "a").kind == "exec_exists"
    assert refusal(registry, "gone").kind == "cancelled"
    assert refusal(registry, "new").kind == ("busy" if state == "serving" else state)


def test_a_full_daemon_is_busy_until_one_is_over() -> None:
    registry = Registry(FEW)
    for exec_id in "abc":
        accept(registry, exec_id)
    error = refusal(registry, "d")
    assert (error.kind, error.data.retryable, error.data.retry_after_s) == ("busy", True, 1.0)
    finish(registry, "a")
    accept(registry, "d")
    assert refusal(registry, "e").kind == "busy"
    fail(registry, registry.get("d"))
    accept(registry, "e")


def test_readers_that_do_not_read_cannot_fill_the_memory() -> None:
    """What a blocking reader holds back is not dropped, so no new exec may add to it."""
    total = 10_000
    registry = Registry(Bounds(transcript_total_bytes_max=total, tail_bytes_max=8_000))
    held: list[Exec] = []
    while registry.budget.used_bytes <= 2 * total:
        held.append(accept(registry, f"e{len(held)}", params=blocking()))
        assert held[-1].gate.may_read(held[-1].transcript, registry.budget.tail_bytes)
        run_to_close(held[-1], NOW_S, output=b"x" * 6_000)
        registry.closed(held[-1], NOW_S)
    assert len(held) > total // 6_000
    error = refusal(registry, "new")
    assert (error.kind, error.data.retryable, error.data.retry_after_s) == ("busy", True, 1.0)
    # Once nobody is waited for there is room, although nothing writes that would make some.
    for each in held:
        each.gate.open_for_good()
        assert each.gate.may_read(each.transcript, registry.budget.tail_bytes)
    accept(registry, "new")
    assert registry.budget.used_bytes <= total


def test_a_failed_start_leaves_nothing_and_its_id_is_free() -> None:
    registry = Registry(FEW)
    fail(registry, accept(registry, "a"))
    assert registry.live_count == 0
    assert registry.page(None, 10) == ([], None)
    assert registry.budget.used_bytes == 0
    with pytest.raises(RequestError) as caught:
        registry.get("a")
    assert caught.value.kind == "exec_unknown"
    again = accept(registry, "a")
    assert (again.number, registry.starts) == (2, 2)  # numbers are not reused
    assert (registry.take_settled(), registry.take_dropped()) == ([], [])


def test_failed_starts_do_not_shrink_the_others_tails() -> None:
    registry = Registry(Bounds())
    full = registry.budget.tail_bytes
    for at in range(500):
        fail(registry, accept(registry, f"a{at}"))
    assert registry.budget.tail_bytes == full


def test_finished_execs_go_by_count_the_oldest_closed_first() -> None:
    registry = Registry(FEW)
    for exec_id in "abc":
        accept(registry, exec_id)
    for exec_id in "bca":
        finish(registry, exec_id)
    for exec_id in "defg":
        accept(registry, exec_id)
        finish(registry, exec_id)
    assert settled_ids(registry) == ["b", "c", "a"]
    assert settled_ids(registry) == []
    assert ids(registry.page(None, 10)) == ["d", "e", "f", "g"]
    assert refusal(registry, "a").data.state == "settled"


def test_finished_execs_go_by_age() -> None:
    registry = Registry(FEW)
    for at, exec_id in enumerate("abc"):
        accept(registry, exec_id)
        finish(registry, exec_id, NOW_S + at)
    accept(registry, "live")
    registry.expire(NOW_S + 59.9)
    assert settled_ids(registry) == []
    registry.expire(NOW_S + 61.0)
    assert settled_ids(registry) == ["a", "b"]
    registry.expire(NOW_S + 1e9)
    assert settled_ids(registry) == ["c"]
    assert ids(registry.page(None, 10)) == ["live"]


def test_a_dropped_exec_gives_its_bytes_back() -> None:
    registry = Registry(FEW)
    its_exec = accept(registry, "a")
    run_to_close(its_exec, NOW_S, output=b"x" * 1000)
    registry.closed(its_exec, NOW_S)
    assert registry.budget.used_bytes > 1000
    registry.expire(NOW_S + 61)
    assert registry.budget.used_bytes == 0


def test_what_a_blocking_reader_is_owed_is_counted_though_its_exec_is_forgotten() -> None:
    registry = Registry(FEW)
    read, unread = accept(registry, "read"), accept(registry, "unread", params=blocking())
    for each in (read, unread):
        run_to_close(each, NOW_S, output=b"x" * 6_000)
        registry.closed(each, NOW_S)
    assert unread.gate.may_read(unread.transcript, registry.budget.tail_bytes)
    one = unread.transcript.cost
    assert registry.budget.used_bytes == 2 * one
    for exec_id in ("unread", "read"):
        registry.forget(exec_id)
    assert registry.budget.used_bytes == one
    assert (read.transcript.cost, unread.transcript.cost) == (0, one)
    unread.gate.open_for_good()
    assert unread.gate.may_read(unread.transcript, registry.budget.tail_bytes)
    registry.budget.relieve()
    assert (registry.budget.used_bytes, unread.transcript.cost) == (0, 0)


def test_a_tombstone_refuses_the_start_that_meets_it_until_it_expires() -> None:
    registry = Registry(FEW)
    registry.bury("a", NOW_S)
    for _ in range(2):  # refusing does not use it up: a retransmit meets it too
        assert refusal(registry, "a", NOW_S + TOMBSTONE_S - 0.1).kind == "cancelled"
    accept(registry, "b", NOW_S)
    accept(registry, "a", NOW_S + TOMBSTONE_S)


def test_a_second_cancel_renews_the_tombstone() -> None:
    registry = Registry(FEW)
    registry.bury("a", NOW_S)
    registry.bury("b", NOW_S + 1)
    registry.bury("a", NOW_S + TOMBSTONE_S - 1)
    assert refusal(registry, "a", NOW_S + TOMBSTONE_S + 2).kind == "cancelled"
    registry.expire(NOW_S + TOMBSTONE_S + 2)
    accept(registry, "b", NOW_S + TOMBSTONE_S + 2)


def test_tombstones_are_bounded_the_oldest_go_first() -> None:
    registry = Registry(FEW)
    for at in range(TOMBSTONES_MAX):
        registry.bury(f"t{at}", NOW_S)
    registry.bury("t0", NOW_S)  # renewed, so not the oldest any more
    for at in range(2):
        registry.bury(f"more{at}", NOW_S)
    for exec_id in ("t0", "t3", f"t{TOMBSTONES_MAX - 1}", "more1"):
        assert refusal(registry, exec_id).kind == "cancelled"
    for exec_id in ("t1", "t2"):
        accept(registry, exec_id)


def test_pages_are_in_order_of_acceptance_and_stable_while_execs_come_and_go() -> None:
    registry = Registry(Bounds(finished_execs_max=2))
    for at in range(7):
        accept(registry, f"e{at}")
    first, cursor = registry.page(None, 3)
    assert [each.exec_id for each in first] == ["e0", "e1", "e2"]
    for exec_id in ("e5", "e2", "e3"):  # the last of the page and two others close; e5 is dropped
        finish(registry, exec_id)
    accept(registry, "late")
    second, cursor = registry.page(cursor, 3)
    assert [each.exec_id for each in second] == ["e3", "e4", "e6"]
    third, cursor = registry.page(cursor, 3)
    assert [each.exec_id for each in third] == ["late"]
    assert cursor is None


def test_a_full_last_page_is_the_last() -> None:
    registry = Registry(Bounds())
    for at in range(4):
        accept(registry, f"e{at}")
    _, cursor = registry.page(None, 2)
    assert cursor is not None
    assert registry.page(cursor, 2)[1] is None


def test_pages_hold_what_was_asked_for() -> None:
    registry = Registry(Bounds())
    for at in range(6):
        labels = {"parity": "odd" if at % 2 else "even", "all": "yes"}
        accept(registry, f"e{at}", params=start_params(labels=labels))
    for exec_id in ("e1", "e2"):
        registry.get(exec_id).started(100, 900, NOW_S, WALL_S)
    odd = {"parity": "odd"}
    assert ids(registry.page(None, 10, labels=odd)) == ["e1", "e3", "e5"]
    assert ids(registry.page(None, 10, labels=odd | {"all": "yes"})) == ["e1", "e3", "e5"]
    assert ids(registry.page(None, 10, labels=odd | {"all": "no"})) == []
    running = frozenset({"running"})
    assert ids(registry.page(None, 10, states=running)) == ["e1", "e2"]
    assert ids(registry.page(None, 10, states=running, labels=odd)) == ["e1"]
    page, cursor = registry.page(None, 2, labels=odd)
    assert ids((page, cursor)) == ["e1", "e3"]
    assert ids(registry.page(cursor, 2, labels=odd)) == ["e5"]


def test_an_exec_is_alone_only_where_no_other_was_live_at_its_start() -> None:
    registry = Registry(FEW)
    accept(registry, "a")
    accept(registry, "b")
    finish(registry, "a")
    b = registry.get("b")
    b.started(100, 900, NOW_S, WALL_S)
    b.exited(exit_status(code=None, signal=9), by_itself=True)
    b.drained(NOW_S, WALL_S, oom_kills=1, starts=registry.starts)
    assert b.exit is not None
    assert b.exit.oom.verdict == "possible"
