"""Cases of the group `metrics`: the numbers add up while everything goes on at once.

C148 without what needs a journal; evicted records are those the count limit drops.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from runnerd.client.errors import RemoteError
from runnerd.protocol.requests import Pty
from tests.cases.field import metric, rounds
from tests.harness import wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from runnerd.client.blocking import Client
    from tests.harness import RunnerdProcess

START_ERRORS = {
    "exec": ({"argv": ["no-such-program-anywhere"]}, 1),
    "cwd": ({"argv": ["true"], "cwd": "/no/such/directory"}, 1),
    "user": ({"argv": ["true"], "user": "no-such-user-anywhere"}, 1),
}


def _check(text: str) -> None:
    """At any moment: what was started has exited, or is running or draining."""
    started = metric(text, "runnerd_execs_started_total")
    exited = metric(text, "runnerd_execs_exited_total")
    states = {
        state: metric(text, "runnerd_execs", state=state)
        for state in ("starting", "running", "draining", "lingering")
    }
    assert min(states.values()) >= 0
    assert started == exited + states["running"] + states["draining"], (started, exited, states)


def test_c148_the_metrics_add_up(start_daemon: Callable[..., RunnerdProcess]) -> None:
    """2000 requests of every kind, scraped all the while: nothing is negative, lost or double."""
    daemon = start_daemon("--finished-execs-max", "50")
    count = rounds(2000, 600) // 10
    errors: list[BaseException] = []
    over = threading.Event()

    def scrape() -> None:
        with daemon.connect() as client:
            while not over.is_set():
                _check(client.metrics().text)

    def mix() -> None:
        with daemon.connect() as client:
            for _ in range(count // 4):
                _one_of_each(daemon, client)

    def guarded(target: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001  # told by the main thread
                errors.append(error)

        return run

    scraper = threading.Thread(target=guarded(scrape))
    workers = [threading.Thread(target=guarded(mix)) for _ in range(4)]
    for thread in (scraper, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    over.set()
    scraper.join()
    assert errors == []
    with daemon.connect() as client:
        # A connection is gone once the daemon has read its end.
        wait_for(lambda: client.info().live_execs == 0 and client.info().connections == 1)
        text = client.metrics().text
        _check(text)
        each = count // 4 * 4
        for state in ("starting", "running", "draining", "lingering"):
            assert metric(text, "runnerd_execs", state=state) == 0
        by_reason = {
            reason: metric(text, "runnerd_execs_exited_total", reason=reason)
            for reason in ("exited", "cancelled", "deadline", "stopped", "internal", "lost")
        }
        assert sum(by_reason.values()) == metric(text, "runnerd_execs_exited_total")
        # Of each round: ok, one in a terminal, its duplicate's first, the lingering one, the
        # vanished client's, the signalled one; one cancelled; one at its deadline.
        assert by_reason == {
            "exited": 5 * each,
            "cancelled": each,
            "deadline": each,
            "stopped": 0,
            "internal": 0,
            "lost": 0,
        }
        for stage in START_ERRORS:
            failed = metric(text, "runnerd_exec_start_failures_total", stage=stage)
            assert failed == each, stage
        assert metric(text, "runnerd_refusals_total", kind="exec_exists") == each
        assert metric(text, "runnerd_stray_failures_total") == 0
        assert metric(text, "runnerd_connections") == 1
        assert metric(text, "runnerd_subscriptions") == 0
        with pytest.raises(RemoteError) as refused:
            client.attach("ok-1-0")
        assert refused.value.kind == "exec_unknown"
        assert len(client.list_execs()) == 50


def _one_of_each(daemon: RunnerdProcess, client: Client) -> None:
    done = client.run(["true"])
    assert done.exit.reason == "exited"
    done = client.run(["echo", "x"], pty=Pty())
    assert (done.exit.reason, done.stdout) == ("exited", b"x\r\n")
    for params, _ in START_ERRORS.values():
        with pytest.raises(RemoteError):
            client.start(attach=False, **params)  # type: ignore[arg-type]
    first = client.start(["sleep", "60"], attach=False)
    with pytest.raises(RemoteError):
        client.start(["true"], exec_id=first.exec_id)
    assert first.cancel(0).outcome == "ended"
    assert client.cancel(first.exec_id).outcome == "already_ended"
    with pytest.raises(RemoteError):
        client.signal(first.exec_id, "TERM")
    signalled = client.start(["sleep", "60"], attach=False)
    signalled.signal("TERM")
    assert signalled.wait(10).reason == "exited"
    assert client.run(["sleep", "60"], deadline_s=0.01).exit.reason == "deadline"
    lingering = client.start(["sh", "-c", "sleep 60 >/dev/null 2>&1 &"], attach=False)
    assert lingering.wait(10).reason == "exited"
    lingering.cancel(0)
    with RawClient(daemon.socket_path) as vanishing:
        vanishing.call("exec.start", argv=["echo", "hi"], attach={})
