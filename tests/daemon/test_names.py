"""Readers with names: who the command waits for, which attach of a name is in force."""

from __future__ import annotations

import functools
import select
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.core.bounds import NAMES_MAX
from runnerd.protocol.framing import Encoding
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

SEQ = ["seq", "1", "200000"]
SEQ_BYTES = b"".join(b"%d\n" % number for number in range(1, 200_001))


@pytest.fixture
def runnerd_daemon(start_daemon: Callable[..., RunnerdProcess]) -> RunnerdProcess:
    """One where a command that is held stands still soon: memory alone takes what it writes."""
    return start_daemon("--spool", "off")


def open_raw(daemon: RunnerdProcess) -> RawClient:
    return RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)


def start(client: RawClient, argv: list[str], attach: dict[str, Any], **params: Any) -> int:
    answer = client.call("exec.start", exec_id="e", argv=argv, attach=attach, **params)
    return int(answer["subscription"])


def inspect(client: RawClient) -> dict[str, Any]:
    return client.call("exec.inspect", exec_id="e")


def wait_until_still(client: RawClient) -> int:
    """Return the last sequence once the command waits to write, and nobody reads its pipe.

    Each answer is a turn of the daemon's loop, in which it would read what it may.
    """
    before, still = -1, 0
    while still < 20:
        found = inspect(client)
        stat = Path(f"/proc/{found['pid']}/stat").read_text()
        is_still = found["last_seq"] == before and stat.rpartition(")")[2].split()[0] == "S"
        still, before = (still + 1 if is_still else 0), int(found["last_seq"])
    return before


def records(client: RawClient) -> list[dict[str, Any]]:
    return [
        note["params"]
        for note in client.notes
        if note["method"] in ("exec.output", "exec.gap", "exec.exited", "exec.closed")
    ]


def acknowledge_to_the_end(client: RawClient, subscription: int) -> None:
    while client.notes == [] or client.notes[-1]["method"] != "exec.closed":
        note = client.receive()
        if note.get("method") == "exec.output":
            client.send("exec.ack", subscription=subscription, seq=note["params"]["seq"])


@pytest.mark.parametrize("window", [{}, {"window_bytes": 300_000}])
@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize("spool", ["off", "disk"])
def test_a_name_that_comes_back_misses_nothing(
    start_daemon: Callable[..., RunnerdProcess], window: dict[str, Any], taken: int, spool: str
) -> None:
    """What stood unread in the dead socket is sent again, with a window and without one.

    The command waits where it is held in memory; with a spool it goes on to its end.
    """
    runnerd_daemon = start_daemon("--spool", spool)
    with open_raw(runnerd_daemon) as first, open_raw(runnerd_daemon) as other:
        start(first, SEQ, {"subscriber": "a", **window})
        # Whatever it has read it knows of: what it took and forgot would be its own loss.
        while len(records(first)) < taken:
            first.take(4096)
        # Then it reads nothing: the socket fills.
        if spool == "off":
            wait_until_still(other)
        else:
            wait_for(lambda: inspect(other)["state"] == "closed")
        told = records(first)
        first.sock.close()
        wait_for(lambda: inspect(other)["subscriptions"] == 0)
        with open_raw(runnerd_daemon) as second:
            answer = second.call(
                "exec.attach",
                exec_id="e",
                after=told[-1]["seq"] if told else 0,
                subscriber="a",
                **window,
            )
            acknowledge_to_the_end(second, answer["subscription"])
            told += records(second)
    assert [each["seq"] for each in told] == list(range(1, len(told) + 1))
    assert b"".join(each["data"] for each in told if "data" in each) == SEQ_BYTES


@pytest.mark.parametrize("streams", [["stdout"], ["stdout", "stderr"]])
def test_a_named_reader_without_a_window_is_not_waited_for_in_vain(
    runnerd_daemon: RunnerdProcess, streams: list[str]
) -> None:
    """It takes little at a time, of a tail that is full again at once: each taking is noticed."""
    with open_raw(runnerd_daemon) as client:
        script = "seq 1 200000; head -c 3000000 /dev/zero >&2; seq 1 200000"
        start(client, ["sh", "-c", script], {"subscriber": "a", "streams": streams})
        while not any(note["method"] == "exec.closed" for note in client.notes):
            client.take(10_000)
        assert client.output("e") == SEQ_BYTES * 2
        assert client.output("e", "stderr") == (bytes(3_000_000) if "stderr" in streams else b"")


def test_only_the_same_name_takes_the_wait_over(runnerd_daemon: RunnerdProcess) -> None:
    """Others read what there is, hold nobody up, and their leaving opens nothing."""
    with open_raw(runnerd_daemon) as other:
        with open_raw(runnerd_daemon) as first:
            start(first, ["yes"], {"subscriber": "a", "window_bytes": 1}, hold_s=30)
            first.note("exec.output", "e")
        wait_for(lambda: inspect(other)["subscriptions"] == 0)
        held_seq = wait_until_still(other)
        for name in ({}, {"subscriber": "b"}, {"subscriber": "b", "generation": 2}):
            number = other.call("exec.attach", exec_id="e", **name)["subscription"]
            while not other.notes or other.notes[-1]["params"]["seq"] < held_seq:
                other.receive()
            other.call("exec.detach", subscription=number)
            other.notes.clear()
            assert inspect(other)["flow"] == "block"
        assert wait_until_still(other) == held_seq
        with open_raw(runnerd_daemon) as second:
            number = second.call("exec.attach", exec_id="e", subscriber="a", window_bytes=1 << 20)[
                "subscription"
            ]
            acknowledge = second.note("exec.output", "e")["seq"]
            assert acknowledge == 1  # nothing was dropped for the others' sake
            second.call("exec.ack", subscription=number, seq=held_seq)
            wait_for(lambda: inspect(other)["last_seq"] > held_seq)


def test_after_the_hold_nobody_is_waited_for_any_more(runnerd_daemon: RunnerdProcess) -> None:
    """For good: the name that comes too late reads like anybody."""
    with open_raw(runnerd_daemon) as other:
        with open_raw(runnerd_daemon) as first:
            start(first, ["yes"], {"subscriber": "a", "window_bytes": 1}, hold_s=0.3)
            first.note("exec.output", "e")
        wait_for(lambda: inspect(other)["flow"] == "drop")
        with open_raw(runnerd_daemon) as second:
            second.call("exec.attach", exec_id="e", subscriber="a", window_bytes=1)
            assert second.note("exec.gap", "e")["first_seq"] == 1
            seq = inspect(other)["last_seq"]
            wait_for(lambda: inspect(other)["last_seq"] > seq + 100)


def test_an_exec_that_is_forgotten_waits_for_no_reader(runnerd_daemon: RunnerdProcess) -> None:
    """Its hold ends with it: were it left to its time, nothing would be there to go on."""
    with open_raw(runnerd_daemon) as other:
        with open_raw(runnerd_daemon) as first:
            start(first, ["sleep", "900"], {"subscriber": "a"}, hold_s=2)
        wait_for(lambda: inspect(other)["subscriptions"] == 0)
        other.call("exec.cancel", exec_id="e", grace_s=0)
        wait_for(lambda: inspect(other)["state"] == "closed")
        assert inspect(other)["flow"] == "block"  # it is still held
        other.call("exec.forget", exec_id="e")
        # The first one's end lets go of what was forgotten, the second's is beyond the hold.
        for seconds in ("0", "2.2"):
            other.call("exec.start", exec_id=seconds, argv=["sleep", seconds])
            other.call("exec.wait", exec_id=seconds)
        assert "runnerd_stray_failures_total{" not in other.call("daemon.metrics")["text"]
    assert "stray_failure" not in runnerd_daemon.log_path.read_text()


GENERATIONS = [(None, None), (None, 1), (1, 1), (1, 2), (3, 7)]


@pytest.mark.parametrize(("older", "newer"), GENERATIONS)
@pytest.mark.parametrize("is_same", [True, False])
def test_a_newer_attach_of_a_name_supersedes_the_older(
    runnerd_daemon: RunnerdProcess, older: int | None, newer: int | None, is_same: bool
) -> None:
    """The older is told, is sent nothing more, and its acknowledgements have no effect."""
    with open_raw(runnerd_daemon) as first, open_raw(runnerd_daemon) as another:
        second = first if is_same else another
        old = start(first, ["yes"], {"subscriber": "a", **_generation(older), "window_bytes": 1})
        first.note("exec.output", "e")
        new = second.call(
            "exec.attach", exec_id="e", subscriber="a", window_bytes=1, **_generation(newer)
        )["subscription"]
        assert first.note("exec.superseded", "e") == {
            "subscription": old,
            "exec_id": "e",
            "subscriber": "a",
            "generation": newer,
        }
        assert inspect(first)["subscriptions"] == 1
        held_seq = wait_until_still(another)
        first.call("exec.ack", subscription=old, seq=1)  # as one that crossed with the news
        assert wait_until_still(another) == held_seq
        with pytest.raises(RawError) as caught:
            first.call("exec.detach", subscription=old)
        assert caught.value.kind == "subscription_unknown"
        assert inspect(first)["flow"] == "block"
        second.call("exec.ack", subscription=new, seq=1)
        while inspect(another)["last_seq"] <= held_seq:  # it is the newer that is waited for
            second.call("ping")
            sent = [
                note["params"]["seq"]
                for note in second.notes
                if note["method"] == "exec.output" and note["params"]["subscription"] == new
            ]
            if sent:
                second.call("exec.ack", subscription=new, seq=max(sent))
        told = [note["params"]["subscription"] for note in first.notes if "data" in note["params"]]
        assert told.count(old) == 1


def _generation(number: int | None) -> dict[str, Any]:
    return {} if number is None else {"generation": number}


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("asked", [None, 1, 4])
def test_an_older_generation_is_refused_and_changes_nothing(
    runnerd_daemon: RunnerdProcess, is_live: bool, asked: int | None
) -> None:
    """Whether the newer one is attached or only remembered."""
    with open_raw(runnerd_daemon) as other:
        first = open_raw(runnerd_daemon)
        start(first, ["cat"], {"subscriber": "a", "generation": 5}, stdin="pipe")
        if not is_live:
            first.sock.close()
            wait_for(lambda: inspect(other)["subscriptions"] == 0)
        with pytest.raises(RawError) as caught:
            other.call("exec.attach", exec_id="e", subscriber="a", **_generation(asked))
        assert (caught.value.kind, caught.value.data["generation"]) == ("superseded", 5)
        assert inspect(other)["subscriptions"] == int(is_live)
        other.call("exec.attach", exec_id="e", subscriber="b", **_generation(asked))
        other.call("exec.attach", exec_id="e", subscriber="a", generation=5)
        other.call("exec.write", exec_id="e", data=b"x", eof=True)
        assert other.note("exec.output", "e")["data"] == b"x"
        if is_live:
            assert first.note("exec.superseded", "e")["generation"] == 5
            first.sock.close()
        other.note("exec.closed", "e")
        with pytest.raises(RawError) as caught:  # and of a finished exec too
            other.call("exec.attach", exec_id="e", subscriber="a", generation=4)
        assert caught.value.kind == "superseded"


def test_names_of_one_exec_are_bounded(runnerd_daemon: RunnerdProcess) -> None:
    """One too many is refused while all are in use; then the one idle for longest makes room."""
    with open_raw(runnerd_daemon) as client:
        client.call("exec.start", exec_id="e", argv=["sleep", "1000"], grace_s=0)
        numbers = [
            client.call("exec.attach", exec_id="e", subscriber=f"n{at}", generation=9)[
                "subscription"
            ]
            for at in range(NAMES_MAX)
        ]
        with pytest.raises(RawError) as caught:
            client.call("exec.attach", exec_id="e", subscriber="more")
        assert caught.value.kind == "busy"
        assert caught.value.data["retry_after_s"] > 0
        assert inspect(client)["subscriptions"] == NAMES_MAX
        client.call("exec.attach", exec_id="e")  # without a name there is room
        for at in (7, 3):
            client.call("exec.detach", subscription=numbers[at])
        client.call("exec.attach", exec_id="e", subscriber="more")
        client.call("exec.attach", exec_id="e", subscriber="n7", generation=1)  # was forgotten
        with pytest.raises(RawError) as caught:
            client.call("exec.attach", exec_id="e", subscriber="n8", generation=1)
        assert caught.value.kind == "superseded"


def test_a_start_lost_before_its_answer_is_waited_for_by_name(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Its name came with it: whoever else attaches first does not take its place."""
    with open_raw(runnerd_daemon) as other:
        for number in range(20):
            exec_id = f"s{number}"
            first = open_raw(runnerd_daemon)
            first.send(
                "exec.start",
                exec_id=exec_id,
                argv=["yes"],
                grace_s=0,
                attach={"subscriber": "a", "window_bytes": 1},
            )
            first.sock.close()
            wait_for(functools.partial(_is_there, other, exec_id))
            subscription = other.call("exec.attach", exec_id=exec_id)["subscription"]
            other.call("exec.detach", subscription=subscription)
            assert other.call("exec.inspect", exec_id=exec_id)["flow"] == "block"
            other.call("exec.cancel", exec_id=exec_id)


def _is_there(client: RawClient, exec_id: str) -> bool:
    return exec_id in [each["exec_id"] for each in client.call("exec.list")["execs"]]


def test_who_is_stuck_is_closed_unless_a_command_waits_for_it(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """The one waited for stays, long past its patience; superseded, it is as stuck as others."""
    daemon = start_daemon("--stuck-reader-s", "0.5")
    with open_raw(daemon) as client, open_raw(daemon) as waited, open_raw(daemon) as named:
        noise = ["sh", "-c", "while :; do head -c 1000000 /dev/zero; sleep 0.01; done"]
        client.call("exec.start", exec_id="noise", argv=noise, grace_s=0)
        start(waited, ["sleep", "1000"], {"subscriber": "a", "generation": 1}, grace_s=0)
        waited.call("exec.attach", exec_id="noise")
        named.call("exec.attach", exec_id="e", subscriber="b")
        named.call("exec.attach", exec_id="noise", subscriber="a")
        # Neither reads any more.
        wait_for(lambda: has_hung_up(named))
        wait_for(lambda: inspect(client)["subscriptions"] == 1)
        assert not has_hung_up(waited)
        number = client.call("exec.attach", exec_id="e", subscriber="a", generation=2)
        wait_for(lambda: has_hung_up(waited))
        assert inspect(client)["subscriptions"] == 1
        assert inspect(client)["flow"] == "block"
        client.call("exec.detach", subscription=number["subscription"])
        assert inspect(client)["flow"] == "drop"


def has_hung_up(client: RawClient) -> bool:
    poll = select.poll()
    poll.register(client.sock, select.POLLRDHUP)
    return bool(poll.poll(0))
