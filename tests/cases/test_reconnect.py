"""Cases from the field: connections come and go, execs do not notice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import StreamLost
from runnerd.protocol.framing import Encoding
from tests.cases.field import rounds
from tests.cases.looking import metric, records, within
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def open_raw(daemon: RunnerdProcess) -> RawClient:
    return RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)


@pytest.mark.timeout(900)  # the full form takes five minutes
def test_c62_an_exec_outlives_its_connection(runnerd_daemon: RunnerdProcess) -> None:
    """Each later attach replays from the first byte without a gap, and then follows live.

    A line a second, and an attach a minute; without RUNNERD_CASES_FULL=1 fifty times as fast.
    """
    script = f"for i in $(seq 1 300); do echo $i; sleep {rounds(100, 2) / 100}; done"
    with open_raw(runnerd_daemon) as starter:
        starter.call("exec.start", exec_id="c62", argv=["sh", "-c", script], attach={}, hold_s=0)
        wait_for(lambda: len(starter.output("c62").splitlines()) > 4 or not starter.receive())
    told: list[dict[str, Any]] = []
    seen: list[bytes] = []
    for lines in (60, 120, 180, 240, 301):
        with open_raw(runnerd_daemon) as client:
            answer = client.call("exec.attach", exec_id="c62")
            assert answer["first_seq"] == 1
            while client.output("c62").count(b"\n") < lines:
                if client.receive()["method"] == "exec.closed":
                    break
            told = records(client, "c62")
            assert [note["seq"] for note in told] == [*range(1, len(told) + 1)]
            seen = client.output("c62").split(b"\n")[:-1]
            assert seen == [b"%d" % number for number in range(1, len(seen) + 1)]
            replayed = [note for note in told if note["seq"] <= answer["last_seq"]]
            assert len(replayed) < len(told) or lines == 301
    assert told[-2]["exit"]["code"] == 0
    assert len(seen) == 300


@pytest.mark.parametrize("flow", ["block", "drop"])
def test_c63_pieces_joined_by_sequence_are_the_whole(
    start_daemon: Callable[..., RunnerdProcess], flow: str
) -> None:
    """Attaches, each cut after a random time, give every line once: no gap and no repeat.

    The 500 are 250 for each flow.
    Under `block` it is acknowledging that makes this hold, however small the transcript; under
    `drop` it is the spool, which has what the tail in memory has let go of.
    """
    daemon = start_daemon()
    script = "for i in $(seq 1 200000); do echo $i; done; sleep 1"
    wanted = b"".join(b"%d\n" % number for number in range(1, 200_001))
    chance = random.Random(63)  # the same cuts in every run
    attaches = rounds = 0
    while attaches < 250:
        rounds += 1
        pieces = Pieces(f"c63-{rounds}")
        with open_raw(daemon) as starter:
            argv = ["bash", "-c", script]
            starter.call("exec.start", exec_id=pieces.exec_id, argv=argv, flow=flow)
        while not pieces.is_over:
            attaches += 1
            pieces.take(daemon, chance.uniform(0.001, 0.050))
        assert b"".join(pieces.data) == wanted
    assert attaches >= rounds * 2


def test_c63_who_comes_back_at_once_takes_the_place(runnerd_daemon: RunnerdProcess) -> None:
    """An attach that is faster than the end of the connection it replaces is waited for too.

    The daemon hears of both at once; that the attach is served first must not leave the command
    waiting for a reader that is gone.
    """
    for number in range(50):
        exec_id = f"c63-{number}"
        second = open_raw(runnerd_daemon)
        with open_raw(runnerd_daemon) as first:
            first.call(
                "exec.start",
                exec_id=exec_id,
                argv=["head", "-c", "1000000", "/dev/zero"],
                attach={"window_bytes": 1},
            )
            first.note("exec.output", exec_id)
        with second, within(1.0, "the rest"):
            second.call("exec.attach", exec_id=exec_id)
            second.note("exec.closed", exec_id)
            assert second.output(exec_id) == bytes(1_000_000)


class Pieces:
    """One exec's stream, put together from many connections.

    Attributes:
        exec_id: The exec.
        data: Its output, in order.
        is_over: Whether `closed` was told.
    """

    def __init__(self, exec_id: str) -> None:
        self.exec_id = exec_id
        self.data: list[bytes] = []
        self.is_over = False
        self._last_seq = 0

    def take(self, daemon: RunnerdProcess, time_s: float) -> None:
        """Attach after the last sequence, read for a while, and drop the socket."""
        with open_raw(daemon) as client:
            number = client.call(
                "exec.attach", exec_id=self.exec_id, after=self._last_seq, window_bytes=65536
            )["subscription"]
            until_s = time.monotonic() + time_s
            with contextlib.suppress(TimeoutError):
                while not self.is_over and time.monotonic() < until_s:
                    self._add(client.receive(until_s - time.monotonic()))
                    if len(client.notes) % 16 == 0:
                        _ack(client, number, self._last_seq)

    def _add(self, note: dict[str, Any]) -> None:
        assert note["method"] in ("exec.output", "exec.exited", "exec.closed")
        assert note["params"]["seq"] == self._last_seq + 1
        self._last_seq += 1
        if note["method"] == "exec.output":
            self.data.append(note["params"]["data"])
        self.is_over = note["method"] == "exec.closed"


def _ack(client: RawClient, subscription: int, seq: int) -> None:
    """Acknowledge output, as the notification that has no answer."""
    params = {"subscription": subscription, "seq": seq}
    client.sock.sendall(client.encode("exec.ack", params, None))


def test_c65_three_at_once_are_told_the_same_end(runnerd_daemon: RunnerdProcess) -> None:
    """After the exit, attach, wait and inspect from new connections agree, and at once."""
    script = ["sh", "-c", "echo x; exit 6"]

    def ask(what: str) -> tuple[bytes, int]:
        with within(0.2, what), open_raw(runnerd_daemon) as client:
            if what == "attach":
                client.call("exec.attach", exec_id="c65")
                client.note("exec.closed", "c65")
                code = client.note("exec.exited", "c65")["exit"]["code"]
                return client.output("c65"), code
            answer = client.call(f"exec.{what}", exec_id="c65")
            return b"", (answer if what == "wait" else answer["exit"])["code"]

    with open_raw(runnerd_daemon) as client:
        client.call("exec.start", exec_id="c65", argv=script)
        client.call("exec.wait", exec_id="c65", until="closed")
        for _ in range(20):
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(ask, ["attach", "wait", "inspect"]))
            assert answers == [(b"x\n", 6), (b"", 6), (b"", 6)]


def test_c65_an_attach_in_the_instant_of_the_exit(runnerd_daemon: RunnerdProcess) -> None:
    """1000 attaches around the moment of the exit: each has the output, one exit and the close."""
    with open_raw(runnerd_daemon) as starter, open_raw(runnerd_daemon) as client:
        for number in range(1000):
            exec_id = f"i{number}"
            starter.call("exec.start", exec_id=exec_id, argv=["sh", "-c", "echo x; exit 6"])
            for _ in range(number % 8):  # the start's answer is 1 to 3 ms before the exit
                client.call("ping")
            client.call("exec.attach", exec_id=exec_id)
            client.note("exec.closed", exec_id)
            told = records(client, exec_id)
            assert [note["method"] for note in told] == [
                "exec.output",
                "exec.exited",
                "exec.closed",
            ]
            assert [note["seq"] for note in told] == [1, 2, 3]
            assert (told[0]["data"], told[1]["exit"]["code"]) == (b"x\n", 6)
            client.notes.clear()


def test_c68_every_subscriber_has_the_same_stream(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Three clients at three times, one of them twice: all have all of it, under equal numbers.

    The stream, 289 kB, is more than a tail in memory: who comes late reads it from disk.
    """
    daemon = start_daemon()
    wanted = subprocess.run(["seq", "1", "50000"], capture_output=True, check=True).stdout
    clients = [open_raw(daemon) for _ in range(3)]
    clients[0].call("exec.start", exec_id="c68", argv=["sh", "-c", "seq 1 50000; sleep 1"])
    streams = [
        (client, client.call("exec.attach", exec_id="c68")["subscription"])
        for client in (clients[0], clients[1], clients[1])
    ]
    gone = clients[0].call("exec.attach", exec_id="c68")["subscription"]
    clients[0].call("exec.detach", subscription=gone)
    clients[2].call("exec.wait", exec_id="c68")
    streams.append((clients[2], clients[2].call("exec.attach", exec_id="c68")["subscription"]))
    told = [_to_the_end(client, subscription) for client, subscription in streams]
    assert told[0][-2][0] == "exec.exited"
    assert b"".join(data for _, _, data in told[0]) == wanted
    assert told[1:] == told[:1] * 3
    for client in clients:
        client.sock.close()


def _to_the_end(client: RawClient, subscription: int) -> list[tuple[str, int, bytes]]:
    """Return everything told to one subscription, `closed` included."""
    while True:
        found = [
            (note["method"], note["seq"], note.get("data", b""))
            for note in records(client, "c68")
            if note["subscription"] == subscription
        ]
        if found and found[-1][0] == "exec.closed":
            return found
        client.receive()


def _cut_by_close(daemon: RunnerdProcess, exec_id: str, argv: list[str]) -> list[str]:
    with open_raw(daemon) as client:
        client.call("exec.start", exec_id=exec_id, argv=argv, attach={})
    return [note["method"] for note in client.notes]


def _cut_by_kill(daemon: RunnerdProcess, exec_id: str, argv: list[str]) -> list[str]:
    runner = daemon.start_ctl("run", "--id", exec_id, "--", *argv)
    with daemon.connect() as client:
        wait_for(lambda: exec_id in [each.exec_id for each in client.list_execs()])
    runner.send_signal(signal.SIGKILL)
    said, _ = runner.communicate()
    return [said.decode()] if said else []


def _cut_by_violation(daemon: RunnerdProcess, exec_id: str, argv: list[str]) -> list[str]:
    with open_raw(daemon) as client:
        client.call("exec.start", exec_id=exec_id, argv=argv, attach={})
        client.sock.sendall(b"\xff\xff\xff\xff")  # a frame of 4 GiB
        client.read_to_end()
        return [note["method"] for note in client.notes]


def _cut_by_half_close(daemon: RunnerdProcess, exec_id: str, argv: list[str]) -> list[str]:
    with open_raw(daemon) as client:
        client.call("exec.start", exec_id=exec_id, argv=argv, attach={})
        client.sock.shutdown(socket.SHUT_WR)
        client.read_to_end()
        return [note["method"] for note in client.notes]


@pytest.mark.parametrize(
    "cut", [_cut_by_close, _cut_by_kill, _cut_by_violation, _cut_by_half_close]
)
def test_c69_no_end_of_a_connection_is_an_exit(
    runnerd_daemon: RunnerdProcess, cut: Callable[[RunnerdProcess, str, list[str]], list[str]]
) -> None:
    """However the first connection ends, it tells no exit; the second is told the true one."""
    assert cut(runnerd_daemon, "c69", ["sh", "-c", "sleep 3; exit 8"]) == []
    with runnerd_daemon.connect() as client:
        wait_for(lambda: client.inspect("c69").subscriptions == 0)
        assert client.inspect("c69").state == "running"
        handle = client.attach("c69")
        assert list(handle.output()) == []
        assert handle.exit is not None
        assert (handle.exit.code, handle.exit.reason) == (8, "exited")


def test_c69_the_library_says_that_the_stream_ended_without_an_exit(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Where no other connection is wanted, iterating over the output raises, and names the exec."""
    connection = runnerd_daemon.connect(reconnect_s=0)
    with connection as client, runnerd_daemon.connect() as second:
        handle = client.start(["sh", "-c", "echo; sleep 1; exit 8"], window_bytes=None)
        output = handle.output(30)
        next(output)
        with socket.socket(fileno=client.fileno()) as same:
            same.shutdown(socket.SHUT_WR)
            same.detach()
        with pytest.raises(StreamLost) as caught:
            next(output)
        assert caught.value.exec_ids == (handle.exec_id,)
        assert handle.exit is None
        assert second.wait(handle.exec_id).code == 8


def test_c70_an_exec_without_a_connection_keeps_its_deadline(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """With the last connection closed a command runs on and is listed, until its own deadline.

    It is looked at once the connection is known to be gone, which is when anything would happen.
    """
    with runnerd_daemon.connect() as first:
        exec_id = first.start(["sleep", "1000.170"], deadline_s=1.5, grace_s=0.5).exec_id
    with runnerd_daemon.connect() as client:
        wait_for(lambda: metric(client, "runnerd_connections") == 1)
        assert [(each.exec_id, each.state) for each in client.list_execs()] == [
            (exec_id, "running")
        ]
        its_exit = client.wait(exec_id)
        assert (its_exit.reason, its_exit.signal) == ("deadline", 15)
        assert (its_exit.wall_s or 0.0) >= 1.5


def test_c71_a_start_whose_answer_was_lost_runs_once(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Sent again over a new connection, with its nonce, it is answered with the first one's exec.

    The first connection goes at four moments: before the daemon has read it, and later.
    """
    for number in range(100):
        place = tmp_path / f"k{number}"
        start: dict[str, Any] = {
            "exec_id": f"c71-{number}",
            "nonce": f"n{number}",
            "argv": ["sh", "-c", f"echo run >> {place}"],
        }
        with open_raw(runnerd_daemon) as first, open_raw(runnerd_daemon) as beside:
            first.send("exec.start", **start)
            for _ in range(number % 4):
                beside.call("ping")
        with open_raw(runnerd_daemon) as second:
            answers = [second.call("exec.start", **start) for _ in range(2)]
            # Where the first was cut off before it was read, the second is the one that runs.
            assert not answers[1]["created"]
            assert answers[0] | {"created": False} == answers[1]
            its_exit = second.call("exec.wait", exec_id=start["exec_id"])
            assert (its_exit["code"], its_exit["reason"]) == (0, "exited")
            for other in ({"argv": ["true"]}, {"umask": 0}):
                with pytest.raises(RawError) as caught:
                    second.call("exec.start", **(start | other))
                assert (caught.value.kind, caught.value.data["field"]) == (
                    "nonce_reused",
                    next(iter(other)),
                )
            with pytest.raises(RawError) as caught:
                second.call("exec.start", **(start | {"nonce": "another"}))
            assert caught.value.kind == "exec_exists"
        assert place.read_text() == "run\n"
