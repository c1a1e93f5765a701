"""Whose the sandbox is: claimed atomically, and known after the daemon's end, however it came."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.client.blocking import connect
from runnerd.client.errors import RemoteError
from tests import needs
from tests.daemon.looking import log_lines, planted
from tests.daemon.test_fence import Owner, refused
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., RunnerdProcess]

CREATORS: Final = 20
SLOW_WRITE: Final = """
import time
from runnerd.core import bounds
from runnerd.daemon import claiming
write = claiming.write_claim
def slow(folder, standing):
    time.sleep({after_s})
    write(folder, standing)
claiming.write_claim = slow
claiming.CLAIM_WAIT_S = {wait_s}
"""

FAILING_WRITE: Final = """
from runnerd.daemon import claiming
write, fails = claiming.write_claim, [28] * 4
def failing(folder, standing):
    if fails:
        raise OSError(fails.pop(), "No space left on device")
    write(folder, standing)
claiming.write_claim = failing
claiming.RETRY_S = 0.02
"""


def create(client: RawClient, owner: str = "a", **more: object) -> dict[str, Any]:
    return client.call("sandbox.claim", owner=owner, expect="unclaimed", **more)


def test_a_create_then_a_resume_and_what_each_is_told(runnerd_daemon: RunnerdProcess) -> None:
    path = runnerd_daemon.socket_path
    with Owner(path, 1) as first:
        assert (first.hello["claim"], first.hello["claim_durable"]) == (None, True)
        error = refused(first, "sandbox.claim", owner="a", expect="claimed")
        assert (error.kind, error.data["incarnation"]) == (
            "not_claimed",
            first.hello["incarnation"],
        )
        made = create(first)
        assert (made["created"], made["previous"], made["durable"]) == (True, None, True)
        assert made["claim"]["owner"] == "a"
        assert made["claim"]["fence"] == 1
        error = refused(first, "sandbox.claim", owner="b", expect="unclaimed")
        assert (error.kind, error.data["owner"]) == ("already_claimed", "a")
        assert error.data["claimed_at"] == made["claim"]["claimed_at"]
        assert error.data["incarnation"] == first.hello["incarnation"]
    with Owner(path, 2) as second:
        assert second.hello["claim"] == made["claim"]
        resumed = second.call("sandbox.claim", owner="b", expect="claimed")
        assert resumed["previous"] == made["claim"]
        assert second.call("daemon.info")["claim"] == resumed["claim"]
    assert [line["owner"] for line in log_lines(runnerd_daemon, "claimed")] == ["a", "b"]


def test_who_watches_hears_of_the_new_owner_by_its_name(runnerd_daemon: RunnerdProcess) -> None:
    path = runnerd_daemon.socket_path
    with RawClient(path) as watcher, Owner(path, 5) as owner:
        watcher.call("events.subscribe")
        create(owner, "spawner-7", nonce="n")
        create(owner, "spawner-7", nonce="n")  # again: nothing has changed
        owner.call("sandbox.claim", owner="spawner-8", expect="claimed")

        def heard() -> list[tuple[Any, Any]] | None:
            watcher.call("ping")
            told = [note["params"] for note in watcher.notes if note["method"] == "event"]
            owners = [each for each in told if each["kind"] == "owner_changed"]
            return [(each["fence"], each["owner"]) for each in owners] if len(owners) > 1 else None

        assert wait_for(heard) == [(5, "spawner-7"), (5, "spawner-8")]


def test_it_needs_a_fence_and_a_lower_one_is_refused(runnerd_daemon: RunnerdProcess) -> None:
    path = runnerd_daemon.socket_path
    for fence in (None, "current"):
        with Owner(path, fence) as client:
            assert refused(client, "sandbox.claim", owner="a", expect="any").kind == "fenced"
    with Owner(path, 4) as older, Owner(path, 5):
        assert refused(older, "sandbox.claim", owner="a", expect="any").kind == "fenced"
        assert older.call("daemon.info")["claim"] is None


@pytest.mark.parametrize("fences", ["one fence", "a fence each"])
def test_of_twenty_creates_at_once_exactly_one_succeeds(
    runnerd_daemon: RunnerdProcess, fences: str
) -> None:
    ready = threading.Barrier(CREATORS)
    told: list[str] = []

    def run(number: int) -> None:
        with RawClient(runnerd_daemon.socket_path, hello=False) as client:
            ready.wait(30)
            fence = 1 if fences == "one fence" else number + 1
            client.call("hello", protocol=[1], fence=fence)
            try:
                told.append(create(client, f"owner {number}")["claim"]["owner"])
            except RawError as error:
                told.append(error.kind)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [each for each in told if each.startswith("owner")]
    assert len(told) == CREATORS
    assert len(won) == 1, told
    assert set(told) - set(won) <= {"already_claimed", "fenced"}
    with RawClient(runnerd_daemon.socket_path) as client:
        assert client.hello["claim"]["owner"] == won[0]


def test_pipelined_creates_of_one_connection_are_no_different(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with Owner(runnerd_daemon.socket_path, 1) as client:
        ids = [
            client.send("sandbox.claim", owner=f"o{number}", expect="unclaimed")
            for number in range(5)
        ]
        assert client.answer(ids[0])["claim"]["owner"] == "o0"
        for each in ids[1:]:
            with pytest.raises(RawError, match="'o0' claimed"):
                client.answer(each)


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_it_outlives_the_daemon_from_the_moment_it_is_answered(
    start_daemon: Start, tmp_path: Path, ends: signal.Signals
) -> None:
    daemon = start_daemon(place=tmp_path)
    for number in range(1, 4):
        with Owner(daemon.socket_path, number) as owner:
            expect = "unclaimed" if number == 1 else "claimed"
            answer = owner.call("sandbox.claim", owner=f"o{number}", expect=expect)
            daemon.process.send_signal(ends)
            assert answer["durable"]
            daemon.process.wait(10)
        daemon = start_daemon(place=tmp_path)
        with Owner(daemon.socket_path, number) as owner:
            assert owner.hello["claim"] == answer["claim"]
            assert owner.hello["claim_durable"]
            error = refused(owner, "sandbox.claim", owner="new", expect="unclaimed")
            assert (error.kind, error.data["owner"]) == ("already_claimed", f"o{number}")
            assert error.data["incarnation"] == answer["claim"]["incarnation"]
            assert error.data["incarnation"] != owner.hello["incarnation"]


def test_neither_it_nor_its_fence_is_lost_with_the_journal(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(place=tmp_path)
    with Owner(daemon.socket_path, 7) as owner:
        create(owner)
    daemon.kill()
    for path in (tmp_path / "state").glob("journal.sqlite*"):
        path.write_bytes(b"nothing of a journal" * 500)
    daemon = start_daemon(place=tmp_path)
    with Owner(daemon.socket_path, 6) as older:
        assert older.hello["fence"] == 7
        assert older.hello["claim"]["owner"] == "a"
        assert refused(older, "exec.start", argv=["true"]).kind == "fenced"


def test_the_same_claim_sent_again_gets_the_same_answer_also_from_the_next_daemon(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(place=tmp_path)
    with Owner(daemon.socket_path, 1) as owner:
        first = create(owner, nonce="n")
        again = create(owner, nonce="n")
        assert (first["created"], again["created"]) == (True, False)
        assert again["claim"] == first["claim"]
        other = refused(owner, "sandbox.claim", owner="a", expect="unclaimed", nonce="m")
        assert other.kind == "already_claimed"
    daemon.kill()
    daemon = start_daemon(place=tmp_path)
    with Owner(daemon.socket_path, 1) as owner:
        assert create(owner, nonce="n") == again


@pytest.mark.parametrize("content", [b"", b"{"], ids=["empty", "cut off"])
def test_a_damaged_claim_is_somebodys_and_that_is_said(
    start_daemon: Start, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "claim.json").write_bytes(content)
    daemon = start_daemon(place=tmp_path)
    with Owner(daemon.socket_path, 1) as owner:
        assert owner.hello["claim"]["owner"] is None
        assert any("cannot be read" in each for each in owner.call("daemon.info")["warnings"])
        assert refused(owner, "sandbox.claim", owner="a", expect="unclaimed").kind == (
            "already_claimed"
        )
        assert owner.call("sandbox.claim", owner="a", expect="claimed")["durable"]
    daemon.kill()
    with RawClient(start_daemon(place=tmp_path).socket_path) as client:
        assert client.hello["claim"]["owner"] == "a"


def test_a_newer_versions_claim_is_left_alone_and_later_ones_end_with_the_daemon(
    start_daemon: Start, tmp_path: Path
) -> None:
    place = tmp_path / "state" / "claim.json"
    place.parent.mkdir(mode=0o700)
    place.write_bytes(b'{"schema": 2}')
    with Owner(start_daemon(place=tmp_path).socket_path, 1) as owner:
        error = refused(owner, "sandbox.claim", owner="a", expect="unclaimed")
        assert error.kind == "already_claimed"
        assert not owner.call("sandbox.claim", owner="a", expect="claimed")["durable"]
        info = owner.call("daemon.info")
        assert "schema 2" in info["claim_reason"]
        assert any("the claim ends with this daemon" in each for each in info["warnings"])
    assert place.read_bytes() == b'{"schema": 2}'


# ---------------------------------------------------------------- disks that are full, slow, ...


def test_without_a_state_directory_it_lasts_as_long_as_the_daemon_and_says_so(
    start_daemon: Start,
) -> None:
    daemon = start_daemon("--state-dir", "/proc/1/nowhere")
    with Owner(daemon.socket_path, 1) as owner:
        assert not owner.hello["claim_durable"]
        assert not create(owner)["durable"]
        assert refused(owner, "sandbox.claim", owner="b", expect="unclaimed").kind == (
            "already_claimed"
        )
        assert "no state directory" in owner.call("daemon.info")["claim_reason"]


def _no_bytes() -> None:
    # As on a full disk: what goes past it is EFBIG, also for root.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def test_a_disk_full_at_boot_is_said_before_anybody_claims(start_daemon: Start) -> None:
    daemon = start_daemon(prepare=_no_bytes)
    with Owner(daemon.socket_path, 1) as owner:
        assert not owner.hello["claim_durable"]
        assert "cannot write" in owner.call("daemon.info")["claim_reason"]
        assert not create(owner)["durable"]


def test_a_disk_that_fills_up_costs_the_durability_until_there_is_room(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(
        place=tmp_path, **planted("from runnerd.daemon import claiming; claiming.RETRY_S = 0.1")
    )
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    with Owner(daemon.socket_path, 1) as owner:
        assert owner.hello["claim_durable"]  # there was room at boot
        assert not create(owner)["durable"]
        info = owner.call("daemon.info")
        assert "cannot write" in info["claim_reason"]
        assert any("the claim ends with this daemon" in each for each in info["warnings"])
        troubles = {each["kind"] for each in owner.call("daemon.health")["degraded"]}
        assert "claim_off" in troubles
        assert not (tmp_path / "state" / "claim.json").exists()
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (soft, hard))
        wait_for(lambda: owner.call("daemon.info")["claim_durable"])
        assert owner.call("daemon.info")["claim_reason"] is None
        troubles = {each["kind"] for each in owner.call("daemon.health")["degraded"]}
        assert "claim_off" not in troubles
    daemon.kill()
    with RawClient(start_daemon(place=tmp_path).socket_path) as client:
        assert client.hello["claim"]["owner"] == "a"


def test_however_often_it_is_tried_there_is_one_line_for_one_cause(start_daemon: Start) -> None:
    daemon = start_daemon(**planted(FAILING_WRITE))
    with Owner(daemon.socket_path, 1) as owner:
        assert not create(owner)["durable"]
        wait_for(lambda: owner.call("daemon.info")["claim_durable"])
    (line,) = log_lines(daemon, "claim_not_durable")
    assert line["reason"].endswith("claim.json': No space left on device")
    assert len(log_lines(daemon, "claim_durable")) == 1


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A place whose state directory has a claim and can no longer be written, by root either."""
    needs.root()
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "claim.json").write_text(
        '{"schema":1,"owner":"a","claimed_at":1.7e9,"incarnation":"i","fence":3}'
    )
    for words in (["--bind", str(state), str(state)], ["-o", "remount,bind,ro", str(state)]):
        done = subprocess.run(["mount", *words], capture_output=True, check=False)
        if done.returncode:
            needs.skip_or_fail(f"cannot mount: {done.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", state], check=True)


def test_a_state_directory_that_is_read_only_is_still_read(
    start_daemon: Start, read_only: Path
) -> None:
    """Else a sandbox that was somebody's would be given away as new."""
    with Owner(start_daemon(place=read_only).socket_path, 4) as owner:
        assert owner.hello["fence"] == 4
        assert owner.hello["claim"]["owner"] == "a"
        error = refused(owner, "sandbox.claim", owner="b", expect="unclaimed")
        assert (error.kind, error.data["fence"]) == ("already_claimed", 3)
        assert not owner.call("sandbox.claim", owner="b", expect="claimed")["durable"]
        assert "no state directory" in owner.call("daemon.info")["claim_reason"]


def test_what_comes_behind_a_claim_waits_until_it_is_written(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(**planted(SLOW_WRITE.format(after_s=0.4, wait_s=10)))
    marker = tmp_path / "marker"
    with Owner(daemon.socket_path, 1) as owner, RawClient(daemon.socket_path) as other:
        claimed = owner.send("sandbox.claim", owner="a", expect="unclaimed")
        started = owner.send("exec.start", argv=["touch", str(marker)])
        wait_for(lambda: other.call("daemon.info")["claim"])  # in force at once, for all others
        info = other.call("daemon.info")
        assert (info["starts"], info["claim_durable"]) == (0, False)
        assert owner.answer(claimed)["durable"]
        owner.answer(started)
    wait_for(marker.exists)


def test_a_disk_that_is_too_slow_is_waited_for_no_longer_and_caught_up_with(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(**planted(SLOW_WRITE.format(after_s=0.5, wait_s=0.001)))
    with Owner(daemon.socket_path, 1) as owner:
        assert not create(owner)["durable"]
        # However many come meanwhile, the last one is what is written.
        for number in range(20):
            owner.call("sandbox.claim", owner=f"o{number}", expect="claimed")
        wait_for(lambda: owner.call("daemon.info")["claim_durable"])
        state = Path(daemon.socket_path).parent / "state"
        assert json.loads((state / "claim.json").read_text())["owner"] == "o19"


# ---------------------------------------------------------------- clients


def test_the_client_claims_with_a_nonce_and_raises_what_was_refused(
    runnerd_daemon: RunnerdProcess,
) -> None:
    with connect(runnerd_daemon.socket_path, fence=1) as client:
        made = client.claim("spawner-7", expect="unclaimed")
        assert made.created
        assert made.durable
        with pytest.raises(RemoteError, match="'spawner-7' claimed the sandbox at 20") as caught:
            client.claim("spawner-8", expect="unclaimed")
        assert caught.value.data.owner == "spawner-7"
        with pytest.raises(RemoteError, match="owner: is empty"):
            client.claim("", expect="any")


def test_runnerctl_claims_and_info_shows_the_owner(runnerd_daemon: RunnerdProcess) -> None:
    assert b"owner            none\n" in runnerd_daemon.ctl("info").stdout
    create_words = ("claim", "spawner\x1b[31m", "--expect", "unclaimed")
    unfenced = runnerd_daemon.ctl(*create_words)
    assert unfenced.returncode == 125
    assert b"hint: say hello with a fence" in unfenced.stderr
    done = runnerd_daemon.ctl(*create_words, "--fence", "1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"spawner\x1b[31m, since 20")
    again = runnerd_daemon.ctl(*create_words, "--fence", "1")
    assert again.returncode == 125
    assert b"claimed the sandbox at" in again.stderr
    shown = runnerd_daemon.ctl("info").stdout.decode()
    assert f"owner            {done.stdout.decode()}" in shown
    taken = runnerd_daemon.ctl("claim", "b", "--expect", "claimed", "--fence", "2", "--json")
    assert json.loads(taken.stdout)["previous"]["fence"] == 1


def test_runnerctl_says_where_a_claim_ends_with_the_daemon(start_daemon: Start) -> None:
    daemon = start_daemon("--state-dir", "/proc/1/nowhere")
    assert b"none (a claim would end with this daemon: no state dir" in daemon.ctl("info").stdout
    done = daemon.ctl("claim", "a", "--expect", "any", "--fence", "1")
    assert done.returncode == 0
    assert b"the claim ends with this daemon: no state directory" in done.stderr
