"""Whether the sandbox is idle, and leaving it in the same step, with real commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.client.asynchronous import connect as connect_async
from runnerd.client.blocking import connect
from runnerd.client.errors import RemoteError
from tests.daemon.looking import planted
from tests.daemon.test_fence import Owner, refused
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

RACE_S: Final = 60.0 if os.environ.get("RUNNERD_CASES_FULL") == "1" else 4.0
ROUNDS: Final = 1000
SLOW_JOURNAL: Final = """
import time
from runnerd.daemon import starting
from runnerd.daemon.journal_file import JournalFile
write = JournalFile.write
def slow(file, rows, meta, *, anew):
    time.sleep(0.4)
    write(file, rows, meta, anew=anew)
JournalFile.write = slow
starting.JOURNAL_WAIT_S = 10
"""
LEAVES: Final = ["sh", "-c", "sleep 900 >/dev/null 2>&1 </dev/null & exit 0"]


def activity(client: RawClient, **params: object) -> dict[str, Any]:
    return client.call("sandbox.activity", **params)


def idle_for_s(client: RawClient, **params: object) -> float:
    found: float = activity(client, **params)["idle_for_s"]
    return found


def closed(client: RawClient, exec_id: str) -> None:
    client.call("exec.wait", exec_id=exec_id, until="closed")


def test_what_counts_and_what_does_not(runnerd_daemon: RunnerdProcess) -> None:
    path = runnerd_daemon.socket_path
    with RawClient(path) as client, RawClient(path) as reader:
        assert activity(client)["idle"]  # two connections are no activity
        client.call("exec.start", exec_id="e", argv=["cat"], stdin="pipe")
        now = activity(client)
        assert (now["idle"], now["idle_for_s"]) == (False, 0)
        assert (now["reasons"], now["execs"]) == (["live_execs"], ["e"])
        reader.call("exec.attach", exec_id="e")
        now = activity(client)
        assert (now["reasons"], now["attached_total"]) == (
            ["live_execs", "attached_clients"],
            1,
        )
        client.call("exec.write", exec_id="e", data="", eof=True)
        closed(client, "e")
        now = activity(client)
        assert (now["idle"], now["execs_total"], now["attached_total"]) == (True, 0, 0)
        now = activity(client, if_idle_for_s=1000)
        assert (now["idle"], now["reasons"]) == (False, ["recent_work"])


def test_looking_is_no_activity(runnerd_daemon: RunnerdProcess) -> None:
    """However often somebody looks, from however many connections, the time goes on."""
    path = runnerd_daemon.socket_path
    with RawClient(path) as client:
        client.call("exec.start", exec_id="e", argv=["echo", "x"])
        closed(client, "e")
        before_s = wait_for(lambda: found_s if (found_s := idle_for_s(client)) > 0.3 else None)
        began_s = time.monotonic()
        for _ in range(3):
            with RawClient(path) as probe:
                for method in ("ping", "daemon.info", "daemon.metrics", "exec.list"):
                    probe.call(method)
                probe.call("exec.inspect", exec_id="e")
                probe.call("exec.wait", exec_id="e")
                probe.call("exec.attach", exec_id="e")  # of what is over
                probe.note("exec.closed", "e")
                ended = refused(probe, "exec.signal", exec_id="e", signal="TERM")
                exists = refused(probe, "exec.start", exec_id="e", argv=["true"])
                assert (ended.kind, exists.kind) == ("exec_ended", "exec_exists")
                refused(probe, "daemon.drain", if_idle_for_s=1e6)
                activity(probe, if_idle_for_s=5, leftovers_count=True)
        assert idle_for_s(client) >= before_s + (time.monotonic() - began_s) - 0.05


def test_it_is_counted_from_the_end_of_what_counted(runnerd_daemon: RunnerdProcess) -> None:
    path = runnerd_daemon.socket_path
    with RawClient(path) as client:

        def just_now(what: Callable[[], object]) -> None:
            """Whatever it is, it is work: so the time since then is no longer than it took."""
            wait_for(lambda: idle_for_s(client) > 0.05)
            began_s = time.monotonic()
            what()
            found_s = idle_for_s(client)
            assert found_s <= time.monotonic() - began_s

        just_now(lambda: client.call("env.set", set={"A": "1"}))
        just_now(lambda: client.call("exec.cancel", exec_id="never seen".replace(" ", "-")))
        just_now(lambda: refused(client, "exec.start", argv=["/nonexistent"]))
        client.call("sandbox.pin", reason="p")
        just_now_unpinned = time.monotonic()
        client.call("sandbox.pin", reason="p", unpin=True)
        assert idle_for_s(client) <= time.monotonic() - just_now_unpinned
        with Owner(path, 1) as owner:
            just_now(lambda: owner.call("sandbox.claim", owner="a", expect="any"))


def test_leftovers_are_listed_and_count_only_where_asked_for(
    runnerd_daemon: RunnerdProcess,
) -> None:
    path = runnerd_daemon.socket_path
    with RawClient(path) as client:
        client.call("exec.start", exec_id="e", argv=LEAVES)
        wait_for(lambda: client.call("exec.inspect", exec_id="e")["state"] == "lingering")
        now = activity(client)
        assert (now["idle"], now["execs"], now["leftovers"]) == (True, [], ["e"])
        counted = activity(client, leftovers_count=True)
        assert (counted["reasons"], counted["idle_for_s"]) == (["leftovers"], 0)
        error = refused(client, "daemon.drain", if_idle_for_s=0, leftovers_count=True)
        assert error.data["reasons"] == ["leftovers"]
        wait_for(lambda: idle_for_s(client) > 0.2)
        pid = int(client.call("exec.inspect", exec_id="e", tree=True)["processes"][0]["pid"])
        os.kill(pid, signal.SIGKILL)
        closed(client, "e")
        assert idle_for_s(client) > 0.2  # its end is no work
        assert idle_for_s(client, leftovers_count=True) < idle_for_s(client) - 0.1


def test_who_is_attached_to_leftovers_counts_until_they_leave_or_it_ends(
    runnerd_daemon: RunnerdProcess,
) -> None:
    path = runnerd_daemon.socket_path
    with RawClient(path) as client:
        client.call("exec.start", exec_id="e", argv=LEAVES)
        wait_for(lambda: client.call("exec.inspect", exec_id="e")["state"] == "lingering")
        pid = int(client.call("exec.inspect", exec_id="e", tree=True)["processes"][0]["pid"])
        for leaves in (True, False):
            with RawClient(path) as reader:
                reader.call("exec.attach", exec_id="e")
                attached_s = time.monotonic()
                assert activity(client)["reasons"] == ["attached_clients"]
                wait_for(lambda: time.monotonic() - attached_s > 0.3)  # noqa: B023 - called here
                if not leaves:
                    os.kill(pid, signal.SIGKILL)
                    closed(client, "e")
                    assert idle_for_s(client) <= time.monotonic() - attached_s - 0.3
            wait_for(lambda: activity(client)["idle"])
            assert idle_for_s(client) <= time.monotonic() - attached_s - 0.3


@pytest.mark.parametrize("argv", [["sleep", "0.4"], ["/nonexistent"]])
def test_a_start_counts_until_its_exit_or_its_failure(start_daemon: Start, argv: list[str]) -> None:
    daemon = start_daemon(**planted(SLOW_JOURNAL))
    with RawClient(daemon.socket_path) as client:
        sent_s = time.monotonic()
        with contextlib.suppress(RawError):
            client.call("exec.start", exec_id="e", argv=argv)
            closed(client, "e")
        assert idle_for_s(client) <= time.monotonic() - sent_s - 0.4


def test_a_pin_is_the_sandboxs_and_not_its_connections(start_daemon: Start, tmp_path: Any) -> None:
    daemon = start_daemon(place=tmp_path)
    with RawClient(daemon.socket_path) as client:
        assert not client.call("sandbox.pin", reason="Ann looks")["was_pinned"]
        assert client.call("sandbox.pin", reason="short", ttl_s=0.2)["was_pinned"] is False
    with RawClient(daemon.socket_path) as client:
        pins = activity(client)["pins"]
        assert (pins[0]["reason"], pins[0]["left_s"]) == ("Ann looks", None)
        error = refused(client, "daemon.drain", if_idle_for_s=0)
        assert (error.kind, error.data["reasons"]) == ("busy", ["pin"])
        assert "pinned ('Ann looks'" in str(error)
        wait_for(lambda: len(activity(client)["pins"]) == 1)
        assert client.call("sandbox.pin", reason="Ann looks", unpin=True)["was_pinned"]
        assert not client.call("sandbox.pin", reason="Ann looks", unpin=True)["was_pinned"]
        assert activity(client)["idle"]
        client.call("sandbox.pin", reason="for this daemon")
    daemon.kill()
    with RawClient(start_daemon(place=tmp_path).socket_path) as client:
        assert activity(client)["pins"] == []  # what it was for has ended with the daemon


def test_no_more_pins_than_hello_says(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        most = client.hello["limits"]["pins"]
        for number in range(most):
            client.call("sandbox.pin", reason=f"{number}" + "x" * 250)
        error = refused(client, "sandbox.pin", reason="one more")
        assert (error.kind, error.data["retry_after_s"]) == ("busy", 60)
        assert len(activity(client)["pins"]) == most


@pytest.mark.parametrize("method", ["daemon.drain", "daemon.stop"])
def test_what_is_refused_for_being_busy_changes_nothing(
    runnerd_daemon: RunnerdProcess, method: str
) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "900"])
        error = refused(client, method, if_idle_for_s=30)
        assert (error.kind, error.data["reasons"]) == ("busy", ["live_execs", "recent_work"])
        assert (error.data["retryable"], error.data["retry_after_s"]) == (True, 30)
        assert activity(client)["state"] == "serving"
        client.call("exec.start", argv=["true"])
        client.call("exec.cancel", exec_id="e", grace_s=0)
        wait_for(lambda: activity(client)["execs"] == [])
        error = refused(client, method, if_idle_for_s=30)
        assert error.data["reasons"] == ["recent_work"]
        assert 0 < error.data["retry_after_s"] <= 30


def test_drained_while_idle_nothing_starts_until_undrained(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("daemon.drain", if_idle_for_s=0)
        client.call("daemon.drain", if_idle_for_s=0)  # sent again, it is no different
        assert activity(client)["state"] == "draining"
        assert refused(client, "exec.start", argv=["true"]).kind == "draining"
        client.call("daemon.undrain")
        client.call("exec.start", argv=["true"])


def test_stopped_while_idle_it_is_gone(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("daemon.stop", if_idle_for_s=0)
    assert runnerd_daemon.process.wait(10) == 0


def test_no_start_is_accepted_behind_a_drain_that_found_it_idle(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Two connections race, a start against a drain: each time exactly one of them is refused."""
    began_s = time.monotonic()
    outcomes = {"exec.start": 0, "draining": 0}

    def outcome(client: RawClient, method: str, **params: object) -> str:
        try:
            client.call(method, **params)
        except RawError as error:
            return error.kind
        return method

    with RawClient(runnerd_daemon.socket_path) as one, RawClient(runnerd_daemon.socket_path) as two:
        for number in range(ROUNDS):
            if time.monotonic() - began_s > RACE_S:
                break
            exec_id = f"e{number}"
            turn = threading.Barrier(2)
            told: list[str] = []

            def start(
                turn: threading.Barrier = turn, exec_id: str = exec_id, told: list[str] = told
            ) -> None:
                turn.wait(30)
                told.append(outcome(one, "exec.start", exec_id=exec_id, argv=["sleep", "900"]))

            thread = threading.Thread(target=start)
            thread.start()
            turn.wait(30)
            told.append(outcome(two, "daemon.drain", if_idle_for_s=0))
            thread.join()
            assert sorted(told) in (["busy", "exec.start"], ["daemon.drain", "draining"])
            outcomes[max(told)] += 1
            two.call("daemon.undrain")
            if "exec.start" in told:
                two.call("exec.cancel", exec_id=exec_id, grace_s=0)
                closed(two, exec_id)
    assert sum(outcomes.values()) > 20


def test_both_clients_ask_alike(runnerd_daemon: RunnerdProcess) -> None:
    pytest.importorskip("anyio")
    import anyio  # noqa: PLC0415

    path = runnerd_daemon.socket_path
    with connect(path) as client:
        assert not client.pin("p", ttl_s=900).was_pinned
        assert client.activity(if_idle_for_s=1).reasons == ["pin", "recent_work"]
        with pytest.raises(RemoteError, match="the sandbox is not idle: pinned") as caught:
            client.drain(if_idle_for_s=0)
        assert caught.value.data.reasons == ["pin"]
        with pytest.raises(RemoteError, match="leftovers_count: goes with if_idle_for_s"):
            client.stop(leftovers_count=True)

    async def ask() -> None:
        async with connect_async(path, fence=1) as client:
            assert (await client.unpin("p")).was_pinned
            assert (await client.claim("a", expect="unclaimed")).durable
            assert (await client.activity()).idle
            await client.drain(if_idle_for_s=0)
            await client.stop(if_idle_for_s=0)

    anyio.run(ask)
    assert runnerd_daemon.process.wait(10) == 0


def test_the_commands_say_it_in_words_and_by_their_exit_codes(
    runnerd_daemon: RunnerdProcess,
) -> None:
    ctl = runnerd_daemon.ctl
    idle = ctl("activity")
    assert (idle.returncode, idle.stdout[:16]) == (0, b"idle, last work ")
    ctl("run", "-d", "--id", "web", "--", *LEAVES)
    assert ctl("pin", "Ann looks", "--ttl", "900").returncode == 0
    with RawClient(runnerd_daemon.socket_path) as client:
        wait_for(lambda: client.call("exec.inspect", exec_id="web")["state"] == "lingering")
    busy = ctl("activity")
    assert busy.returncode == 1
    lines = busy.stdout.decode().splitlines()
    assert lines[:2] == ["not idle", "  left running: web (does not count)"]
    assert lines[2].startswith("  pinned: Ann looks (")
    assert lines[2].endswith("m59s left)") or lines[2].endswith("15m0s left)")
    assert json.loads(ctl("activity", "--json", "--leftovers-count").stdout)["reasons"] == [
        "leftovers",
        "pin",
    ]
    refused_words = ctl("drain", "--if-idle-for", "0")
    assert refused_words.returncode == 125
    assert refused_words.stderr.decode() == (
        "runnerctl: the sandbox is not idle: pinned ('Ann looks') (nothing ran, nothing changed)\n"
        "hint: try again once it is idle; sandbox.activity, or runnerctl activity, shows why not\n"
    )
    assert ctl("stop", "--if-idle-for", "0").returncode == 125
    assert ctl("unpin", "Ann looks").returncode == 0
    gone = ctl("unpin", "Ann looks")
    assert (gone.returncode, gone.stderr[:40]) == (1, b"runnerctl: there is no pin of that reaso")
    assert ctl("drain", "--if-idle-for", "0").returncode == 0
    assert ctl("stop", "--if-idle-for", "0").returncode == 0
    assert runnerd_daemon.process.wait(10) == 0
