"""Once the sandbox has an owner, nobody else changes anything, and that outlives the daemon."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.core.fence import CHANGES
from runnerd.protocol.requests import METHODS
from tests.daemon.looking import log_lines, planted
from tests.harness import RunnerdProcess, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

SLOW_FENCE: Final = """
import time
from runnerd.daemon.journal_file import JournalFile
write = JournalFile.write
def slow(file, rows, meta, *, anew):
    time.sleep({after_s} if 'fence' in meta else 0)
    write(file, rows, meta, anew=anew)
JournalFile.write = slow
"""


HELD: Final = """
import os, time
from runnerd.daemon import fencing, journal, starting
from runnerd.daemon.journal_file import JournalFile
starting.JOURNAL_WAIT_S = journal.HUNG_S = 30
fencing.FENCE_WAIT_S = 0.05
write = JournalFile.write
def held(file, rows, meta, *, anew):
    while {what} and not os.path.exists('{go}'):
        time.sleep(0.01)
    write(file, rows, meta, anew=anew)
JournalFile.write = held
"""


class Owner(RawClient):
    """A connection with a fence."""

    def __init__(self, path: str, fence: int | str | None) -> None:
        super().__init__(path, hello=False)
        self.hello = self.call("hello", protocol=[1], **({} if fence is None else {"fence": fence}))


def refused(client: RawClient, method: str, **params: object) -> RawError:
    with pytest.raises(RawError) as caught:
        client.call(method, **params)
    return caught.value


def may_change(client: RawClient) -> bool:
    try:
        client.call("daemon.undrain")
    except RawError as error:
        if error.kind != "fenced":
            raise
        return False
    return True


def request_for(method: str, exec_id: str, marker: Path) -> dict[str, Any]:
    """Parameters with which the method would have an effect."""
    special: dict[str, dict[str, Any]] = {
        "exec.start": {"exec_id": "new", "argv": ["touch", str(marker)]},
        "exec.signal": {"exec_id": exec_id, "signal": "KILL"},
        "exec.resize": {"exec_id": exec_id, "rows": 24, "cols": 80},
        "exec.write": {"exec_id": exec_id, "data": "", "eof": True},
        "sandbox.claim": {"owner": "other", "expect": "any"},
        "sandbox.pin": {"reason": "other"},
    }
    names_exec = "exec_id" in METHODS[method].__struct_fields__
    return special.get(method, {"exec_id": exec_id} if names_exec else {})


@pytest.mark.parametrize("held", [None, 4], ids=["without a fence", "with a lower one"])
def test_whoever_is_fenced_changes_nothing_and_still_sees_everything(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, held: int | None
) -> None:
    marker = tmp_path / "marker"
    path = runnerd_daemon.socket_path
    with Owner(path, 5) as owner, Owner(path, held) as fenced:
        assert owner.hello["fence"] == fenced.hello["fence"] == 5
        pid = owner.call("exec.start", exec_id="e", argv=["cat"], stdin="pipe")["pid"]
        for method, is_change in CHANGES.items():
            if is_change:
                error = refused(fenced, method, **request_for(method, "e", marker))
                assert (error.kind, error.data["fence"]) == ("fenced", 5), method
        named = refused(fenced, "exec.attach", exec_id="e", subscriber="owner", generation=9)
        assert named.kind == "fenced"
        assert fenced.call("exec.inspect", exec_id="e")["state"] == "running"
        assert [each["exec_id"] for each in fenced.call("exec.list")["execs"]] == ["e"]
        attached = fenced.call("exec.attach", exec_id="e")
        fenced.call("exec.detach", subscription=attached["subscription"])
        assert fenced.call("daemon.info")["fence"] == 5
        assert fenced.call("daemon.info")["state"] == "serving"
        assert fenced.call("daemon.info")["claim"] is None
        assert fenced.call("sandbox.activity")["pins"] == []
        fenced.call("daemon.metrics")
        fenced.call("ping")
        assert is_alive(pid)
        assert not marker.exists()
        # A cancel would have left a tombstone, a start an exec.
        assert refused(fenced, "exec.cancel", exec_id="later").kind == "fenced"
        owner.call("exec.start", exec_id="later", argv=["true"])
        owner.call("exec.start", exec_id="new", argv=["true"])


def test_a_new_owner_ends_the_older_ones_connections_rights_at_once(
    runnerd_daemon: RunnerdProcess,
) -> None:
    path = runnerd_daemon.socket_path
    with Owner(path, None) as anyone, Owner(path, "current") as operator:
        assert may_change(anyone)
        assert may_change(operator)
        with Owner(path, 1) as first, Owner(path, 1) as also_first:
            assert may_change(first)
            assert may_change(also_first)
            assert not may_change(anyone)
            assert not may_change(operator)
            with Owner(path, 2) as second, Owner(path, "current") as override:
                assert may_change(second)
                assert may_change(override)
                assert not may_change(first)
                assert not may_change(also_first)


def test_what_waits_for_a_start_is_fenced_by_an_owner_who_comes_meanwhile(
    start_daemon: Start, tmp_path: Path
) -> None:
    """It was looked at when it came, and took effect when the exec had started."""
    go = tmp_path / "go"
    daemon = start_daemon(**planted(HELD.format(what="rows", go=str(go))))
    path = daemon.socket_path
    with Owner(path, 1) as first:
        start = first.send("exec.start", exec_id="e", argv=["cat"], stdin="pipe")
        looks = first.send("exec.attach", exec_id="e")
        changes = [
            first.send("exec.write", exec_id="e", data="dG9sZA==", eof=True),
            first.send("exec.signal", exec_id="e", signal="KILL"),
            first.send("exec.attach", exec_id="e", subscriber="reader"),
        ]
        first.call("ping")  # behind them: they have come
        with Owner(path, 2) as second:
            assert second.call("daemon.info")["fence"] == 2
            go.touch()
            first.answer(start)
            first.answer(looks)
            for each in changes:
                with pytest.raises(RawError) as caught:
                    first.answer(each)
                assert caught.value.kind == "fenced"
            receipt = second.call("exec.cancel", exec_id="e", grace_s=0)
            assert (receipt["outcome"], first.output("e")) == ("ended", b"")


@pytest.mark.parametrize("fence", [0, -1, 2**63, 1.5, "latest", True])
def test_what_is_no_fence_is_refused_and_sets_none(
    runnerd_daemon: RunnerdProcess, fence: object
) -> None:
    with RawClient(runnerd_daemon.socket_path, hello=False) as client:
        assert refused(client, "hello", protocol=[1], fence=fence).kind == "invalid_params"
        assert client.call("hello", protocol=[1])["fence"] is None


def test_a_hello_that_is_refused_sets_no_fence(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path, hello=False) as client:
        assert refused(client, "hello", protocol=[99], fence=7).kind == "protocol_unsupported"
        other = refused(client, "hello", protocol=[1], fence=7, incarnation="other")
        assert other.kind == "incarnation_changed"
        assert client.call("hello", protocol=[1])["fence"] is None


def test_it_outlives_the_daemon(start_daemon: Start, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    daemon = start_daemon(place=place)
    for fence, ends in ((5, signal.SIGKILL), (8, signal.SIGTERM), (None, signal.SIGKILL)):
        with Owner(daemon.socket_path, fence) as owner:
            assert owner.hello["journal"]
            daemon.process.send_signal(ends)
            daemon.process.wait(10)
        daemon = start_daemon(place=place)
    with Owner(daemon.socket_path, 7) as older, Owner(daemon.socket_path, 8) as owner:
        assert older.hello["fence"] == 8
        assert not may_change(older)
        assert may_change(owner)


def test_a_new_owner_acts_only_once_it_can_no_longer_be_forgotten(
    start_daemon: Start, tmp_path: Path
) -> None:
    """What it sends behind its hello waits as well, on every connection of its own."""
    daemon = start_daemon(**planted(SLOW_FENCE.format(after_s=0.4)))
    marker = tmp_path / "marker"
    path = daemon.socket_path
    with Owner(path, None) as before, RawClient(path, hello=False) as owner:
        with RawClient(path, hello=False) as also:
            hello = owner.send("hello", protocol=[1], fence=1)
            start = owner.send("exec.start", argv=["touch", str(marker)])
            wait_for(lambda: before.call("daemon.info")["fence"] == 1)
            also_hello = also.send("hello", protocol=[1], fence=1)
            also.send("exec.start", argv=["touch", str(marker)])
            assert not may_change(before)  # in force for all others at once
            assert before.call("daemon.info")["starts"] == 0
            assert owner.answer(hello)["journal"]
            assert also.answer(also_hello)["journal"]
            owner.answer(start)
    wait_for(marker.exists)


def test_where_it_cannot_be_written_in_time_that_is_said(start_daemon: Start) -> None:
    shorter = "from runnerd.daemon import fencing; fencing.FENCE_WAIT_S = 0.1\n"
    daemon = start_daemon(**planted(shorter + SLOW_FENCE.format(after_s=1.0)))
    with Owner(daemon.socket_path, 1) as owner:
        assert (owner.hello["fence"], owner.hello["journal"]) == (1, False)
        assert may_change(owner)


def test_until_it_is_written_everybody_is_told_that_it_is_not(
    start_daemon: Start, tmp_path: Path
) -> None:
    """The second hello with the same fence was told that it is, for all that was known by then."""
    go = tmp_path / "go"
    daemon = start_daemon(**planted(HELD.format(what="meta.get('fence')", go=str(go))))
    path = daemon.socket_path
    for fence in (1, 1, None, "current"):
        with Owner(path, fence) as each:
            assert (each.hello["fence"], each.hello["journal"]) == (1, False)
    go.touch()
    wait_for(lambda: says_it_is_written(path))


def says_it_is_written(path: str) -> bool:
    with Owner(path, 1) as owner:
        return bool(owner.hello["journal"])


def test_without_a_journal_it_is_remembered_as_long_as_the_daemon(start_daemon: Start) -> None:
    daemon = start_daemon("--state-dir", "/proc/1/nowhere")
    with Owner(daemon.socket_path, 3) as owner, Owner(daemon.socket_path, 2) as older:
        assert (owner.hello["fence"], owner.hello["journal"]) == (3, False)
        assert may_change(owner)
        assert not may_change(older)


def test_runnerctl_says_its_fence(runnerd_daemon: RunnerdProcess) -> None:
    ctl = runnerd_daemon.ctl
    assert ctl("run", "--", "true").returncode == 0
    assert ctl("run", "--fence", "4", "--", "true").returncode == 0
    fenced = ctl("run", "--", "true")
    assert fenced.returncode == 125
    assert b"the sandbox has an owner with 4" in fenced.stderr
    assert ctl("--fence", "3", "drain").returncode != 0
    assert ctl("ps").returncode == 0
    assert ctl("--fence", "current", "drain").returncode == 0
    assert b"draining" in ctl("info").stdout
    assert ctl("undrain", "--fence", "4").returncode == 0
    for wrong in ("0", "x", "-1", "1.5"):
        assert b"neither a number above 0" in ctl("info", f"--fence={wrong}").stderr
    assert not log_lines(runnerd_daemon, "stray_failure")


def test_a_hello_overtaken_while_it_waits_is_answered_once(start_daemon: Start) -> None:
    """Else its id, which may be used again by then, gets a hello's answer for something else."""
    daemon = start_daemon(**planted(SLOW_FENCE.format(after_s=0.3)))
    path = daemon.socket_path
    with (
        RawClient(path) as anyone,
        RawClient(path, hello=False) as first,
        RawClient(path, hello=False) as second,
    ):
        anyone.call("exec.start", exec_id="e", argv=["sleep", "900"])
        hello = first.encode("hello", {"protocol": [1], "fence": 1}, "same")
        first.sock.sendall(hello)
        wait_for(lambda: anyone.call("daemon.info")["fence"] == 1)
        overtaking = second.send("hello", protocol=[1], fence=2)
        assert first.answer("same")["journal"] is True
        params = {"exec_id": "e", "timeout_s": 1.5}
        first.sock.sendall(first.encode("exec.wait", params, "same"))
        assert second.answer(overtaking)["journal"] is True
        with pytest.raises(RawError) as caught:
            first.answer("same")
        assert caught.value.kind == "wait_timeout"
