"""Events: who watches hears what happens, and costs nobody anything by not reading."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from runnerd.client.asynchronous import connect as connect_async
from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError, ClientTimeout, StreamLost
from runnerd.core.bounds import EVENTS_MAX, HEARTBEAT_S
from tests.daemon.looking import planted
from tests.daemon.test_heartbeats import LATE_S, wakeups
from tests.harness import RunnerdProcess, wait_for
from tests.proxy import Proxy
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Start = Callable[..., RunnerdProcess]


def events(client: RawClient) -> list[dict[str, Any]]:
    """Return what came so far, but for heartbeats."""
    client.call("ping")  # everything before its answer is read with it
    found = [each["params"] for each in client.notes if each["method"] == "event"]
    return [each for each in found if each["kind"] != "heartbeat"]


def wait_kind(client: RawClient, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(
        lambda: next((each for each in events(client) if each["kind"] == kind), None)
    )
    return found


def test_the_life_of_an_exec_and_of_the_daemon_is_told_in_order(
    start_daemon: Start,
) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as watcher, RawClient(daemon.socket_path) as other:
        other.call("exec.start", exec_id="before", argv=["true"])
        other.call("exec.wait", exec_id="before", until="closed")
        began = watcher.call("events.subscribe")
        assert (began["subscription"], began["number"], began["state"]) == (1, 0, "serving")
        pid = other.call("exec.start", exec_id="e", argv=["sh", "-c", "exit 7"])["pid"]
        other.call("exec.wait", exec_id="e", until="closed")
        other.call("hello", protocol=[1], fence=3)
        other.call("hello", protocol=[1], fence=3)  # the same owner again is no news
        for _ in range(2):
            other.call("daemon.drain")
        for _ in range(2):
            other.call("daemon.undrain")
        daemon.process.terminate()
        watcher.read_to_end()
        told = [each["params"] for each in watcher.notes if each["method"] == "event"]
    assert [each.pop("number") for each in told] == [*range(1, 8)]
    assert {each.pop("subscription") for each in told} == {1}
    assert all(abs(each.pop("at") - time.time()) < 60 for each in told)
    assert told == [
        {"kind": "exec_started", "exec_id": "e", "pid": pid},
        {"kind": "exec_exited", "exec_id": "e", "code": 7, "reason": "exited",
         "oom": told[1]["oom"]},
        {"kind": "exec_closed", "exec_id": "e"},
        {"kind": "owner_changed", "fence": 3},
        {"kind": "draining"},
        {"kind": "serving_again"},
        {"kind": "stopping", "cause": "SIGTERM"},
    ]  # fmt: skip


def test_a_watch_is_a_reader_bounded_as_others_are_and_no_fence_keeps_it_out(
    start_daemon: Start,
) -> None:
    daemon = start_daemon("--subscriptions-max", "1")
    with RawClient(daemon.socket_path) as owner, RawClient(daemon.socket_path) as watcher:
        owner.call("hello", protocol=[1], fence=3)
        number = watcher.call("events.subscribe")["subscription"]
        assert owner.call("daemon.info")["subscriptions"] == 1
        with pytest.raises(RawError) as caught:
            owner.call("events.subscribe")
        assert (caught.value.kind, caught.value.data["retry_after_s"]) == ("busy", 1.0)
        watcher.call("exec.detach", subscription=number)
        owner.call("exec.start", exec_id="e", argv=["true"])
        owner.call("exec.wait", exec_id="e", until="closed")
        assert events(watcher) == []
        watcher.call("events.subscribe")
    with RawClient(daemon.socket_path) as other:  # a connection that goes gives its place back
        wait_for(lambda: other.call("daemon.info")["subscriptions"] == 0)


def test_nothing_is_told_before_the_answer_that_gives_the_subscription(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Behind more answers than its socket and the write after that take."""
    path = runnerd_daemon.socket_path
    with RawClient(path) as client, RawClient(path) as other:
        wanted = [("daemon.metrics", 100 + at) for at in range(100)]
        wanted += [("events.subscribe", 200), ("daemon.drain", 201)]
        client.sock.sendall(b"".join(client.encode(method, {}, at) for method, at in wanted))
        wait_for(lambda: other.call("daemon.info")["state"] == "draining")
        messages = [client.receive()]
        while messages[-1].get("method") != "event":
            messages.append(client.receive())
        assert 200 in [each.get("id") for each in messages]


def test_one_that_does_not_read_costs_bounded_memory_and_delays_nobody(
    start_daemon: Start,
) -> None:
    """What was dropped is counted to the event, for it alone."""
    daemon = start_daemon()
    total = 3 * EVENTS_MAX
    with (
        RawClient(daemon.socket_path) as stuck,
        RawClient(daemon.socket_path) as reads,
        RawClient(daemon.socket_path) as other,
    ):
        stuck.call("events.subscribe")
        reads.call("events.subscribe")
        # 200 kB a thousand: more than its socket holds, which the stuck one never empties.
        before = other.call("daemon.info")["rss_bytes"]
        for at in range(total):
            other.call("daemon.drain" if at % 2 == 0 else "daemon.undrain")
            if at % 50 == 0:
                reads.call("ping")
        grown = other.call("daemon.info")["rss_bytes"] - before
        print(f"{total} events with one that does not read: {grown / 1024:.0f} KiB more")
        assert grown < 4 << 20
        wait_for(lambda: len(events(reads)) == total)
        assert [each["number"] for each in events(reads)] == [*range(1, total + 1)]
        wait_for(lambda: events(stuck)[-1]["number"] == total, timeout_s=30)
        found = events(stuck)
        lost = [each["lost"] for each in found if each["kind"] == "events_lost"]
        assert len(lost) == 1
        assert lost[0] + len(found) - 1 == total
        other.call("daemon.drain")
        wait_for(lambda: events(stuck)[-1]["number"] == total + 1)


def test_without_a_reader_nothing_is_looked_at_and_with_one_seldom(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("events.subscribe")
        time.sleep(0.5)  # what the connection left is over
        before, began_s = wakeups(runnerd_daemon.pid), time.monotonic()
        wait_for(lambda: time.monotonic() - began_s >= HEARTBEAT_S + 2 + LATE_S, timeout_s=30)
        rate = (wakeups(runnerd_daemon.pid) - before) / (time.monotonic() - began_s)
        print(f"wake-ups a second with one reader of events: {rate:.2f}")
        assert rate <= 1.3
        client.call("ping")
        beats = [each["params"] for each in client.notes if each["method"] == "event"]
        assert [(each["kind"], each["number"]) for each in beats] == [("heartbeat", 0)]


PRESSED = """
from pathlib import Path
from runnerd.daemon import run, events
from runnerd.daemon.memory import Cgroup
from runnerd.daemon.pressure import PressureFile
events._LOOK_EVERY_S = 0.05
run.PressureFile = lambda _cgroup: PressureFile(Cgroup(None, None), system=Path({folder!r}))
"""


def test_memory_pressure_is_told_once_a_change_and_to_who_comes_later(
    start_daemon: Start, tmp_path: Path
) -> None:
    def press(percent: float) -> None:
        values = f"avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1"
        (tmp_path / "next").write_text(f"some {values}\nfull {values}\n")
        (tmp_path / "next").rename(tmp_path / "memory")

    press(0)
    daemon = start_daemon(**planted(PRESSED.format(folder=str(tmp_path))))
    with RawClient(daemon.socket_path) as first, RawClient(daemon.socket_path) as second:
        began = first.call("events.subscribe")
        assert (began["pressure"], began["pressure_source"]) == ("normal", "system")
        press(12.5)
        high = wait_kind(first, "memory_pressure")
        assert (high["level"], high["source"]) == ("high", "system")
        assert (high["some_percent"], high["full_percent"]) == (12.5, 12.5)
        assert second.call("events.subscribe")["pressure"] == "high"
        press(7)  # between the two thresholds: no change
        press(1)
        low = wait_kind(second, "memory_pressure")
        assert (low["level"], low["some_percent"]) == ("normal", 1.0)
        wait_for(lambda: len(events(first)) == 2)
        for client in (first, second):
            client.call("exec.detach", subscription=1)
        press(30)
        assert first.call("events.subscribe")["pressure"] == "high"  # looked at then, not later
        (tmp_path / "memory").unlink()
        first.call("daemon.drain")
        wait_kind(first, "draining")  # a file that went is no event and no failure
        assert first.call("daemon.info")["stray_failures"] == 0


def test_both_clients_have_them_to_iterate_over(runnerd_daemon: RunnerdProcess) -> None:
    def take(client: Any) -> list[str]:
        with client.events() as watch:
            assert watch.began.state == "serving"
            with client.start(["true"]) as handle:
                handle.wait_closed()
            found = []
            for event in watch:
                found.append(event.kind)
                if event.kind == "exec_closed":
                    break
            with pytest.raises(ClientTimeout):
                watch.next(timeout_s=0.05)
        with pytest.raises(ClientError, match="closed"):
            watch.next()
        assert client.info().subscriptions == 0
        return found

    expected = ["exec_started", "exec_exited", "exec_closed"]
    with connect(runnerd_daemon.socket_path) as client:
        assert take(client) == expected

    async def body() -> None:
        with anyio.fail_after(60):
            async with (
                connect_async(runnerd_daemon.socket_path) as runner,
                await runner.events() as watch,
            ):
                handle = await runner.start(["true"])
                await handle.wait_closed()
                found = []
                async for event in watch:
                    found.append(event.kind)
                    if event.kind == "exec_closed":
                        break
                assert found == expected
                with pytest.raises(ClientTimeout):
                    await watch.next(timeout_s=0.05)

    for backend in ("asyncio", "trio"):
        anyio.run(body, backend=backend)


def test_a_watch_outlives_its_connection_and_says_that_it_may_have_missed_some(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    path = tmp_path / "proxy.sock"
    with (
        Proxy(path, runnerd_daemon.socket_path) as proxy,
        connect(path) as client,
        connect(runnerd_daemon.socket_path) as other,
    ):
        watch = client.events()
        other.drain()
        assert watch.next(timeout_s=30).kind == "draining"
        proxy.cut()
        lost = watch.next(timeout_s=30)
        assert (lost.kind, lost.lost) == ("events_lost", None)
        other.undrain()
        assert watch.next(timeout_s=30).kind == "serving_again"


def test_a_watch_of_a_daemon_that_ends_says_so(start_daemon: Start) -> None:
    daemon = start_daemon()
    with connect(daemon.socket_path, reconnect_s=0) as client:
        watch = client.events()
        daemon.stop()
        assert watch.next(timeout_s=30).kind == "stopping"
        with pytest.raises(StreamLost):
            watch.next(timeout_s=30)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_runnerctl_prints_a_line_each_and_ends_with_the_daemon(
    start_daemon: Start, words: tuple[str, ...]
) -> None:
    daemon = start_daemon()
    ctl = daemon.start_ctl("events", *words)
    assert ctl.stderr is not None
    assert b"watching: the daemon is serving" in ctl.stderr.readline()
    daemon.ctl("run", "--id", "e", "--", "sh", "-c", "exit 7")
    daemon.ctl("wait", "e", "--until", "closed")
    daemon.stop()
    text = ctl.communicate(timeout=30)[0].decode()
    assert ctl.returncode == 0
    kinds = ["exec_started", "exec_exited", "exec_closed", "stopping"]
    if words:
        found = [json.loads(line) for line in text.splitlines()]
        assert [each["kind"] for each in found] == kinds
        assert found[1]["code"] == 7
    else:
        lines = text.splitlines()
        assert [line.split()[1] for line in lines] == kinds
        assert "exec_id=e code=7 reason=exited oom=" in lines[1]
