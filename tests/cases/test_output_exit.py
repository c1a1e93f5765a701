"""Cases from the field: when output ends, when an exec ends, and that neither is lost."""

from __future__ import annotations

import concurrent.futures
import hashlib
import signal
import subprocess
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from runnerd.client.blocking import Client
from runnerd.protocol.framing import Encoding
from runnerd.protocol.notes import OutputNote
from tests.cases.looking import SLACK, cpu_s, marked, records, within
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from pathlib import Path


def test_c01_a_background_child_does_not_hold_the_exit(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The leader's exit ends an exec; what it left in the background lives until cancelled."""
    with runnerd_daemon.connect() as client:
        for _ in range(3):
            with within(1.0, "the exit"):
                done = client.run(["sh", "-c", "sleep 1000.101 & echo hi"])
            assert (done.stdout, done.stderr, done.exit.code) == (b"hi\n", b"", 0)
            assert client.inspect(done.exit.exec_id).state == "lingering"
            assert marked("sleep", "1000.101")
            client.cancel(done.exit.exec_id, grace_s=0.5)
            assert not marked("sleep", "1000.101")
        client.run(["sh", "-c", "sleep 1000.102 & echo hi"])
        assert marked("sleep", "1000.102")
    runnerd_daemon.stop()
    wait_for(lambda: not marked("sleep", "1000.102"), 2.0 * SLACK)


def test_c03_late_output_is_kept_and_a_held_pipe_does_not_hold_the_exit(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """What comes within the drain after the leader's exit is delivered; nothing waits for EOF."""
    with runnerd_daemon.connect() as client:
        script = f"exec > >(sleep 0.2; tee {tmp_path}/t.log) 2>&1; echo done; exit 4"
        done = client.run(["bash", "-c", script])
        assert (done.stdout, done.exit.code) == (b"done\n", 4)
        with within(1.0, "the exit"):
            held = client.run(
                ["bash", "-c", "exec > >(cat >/dev/null; sleep 1000.103) 2>&1; exit 4"]
            )
        assert held.exit.code == 4
        client.cancel(held.exit.exec_id, grace_s=0.0)


def test_c04_three_thousand_short_commands_lose_no_byte_and_no_exit(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Of 3000 short commands, 16 at a time, every one has all its output and exactly one exit."""
    text = b"running in container\n"
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        left, live = [f"e{number}" for number in range(3000)], set[str]()
        while left or live:
            while left and len(live) < 16:
                exec_id = left.pop()
                live.add(exec_id)
                client.send(
                    "exec.start", exec_id=exec_id, argv=["echo", text.decode().strip()], attach={}
                )
            message = client.receive()
            assert "error" not in message
            if message.get("method") == "exec.closed":
                live.remove(message["params"]["exec_id"])
        told: dict[str, list[tuple[str, int]]] = {f"e{number}": [] for number in range(3000)}
        output: dict[str, bytes] = dict.fromkeys(told, b"")
        for note in client.notes:
            params = note["params"]
            told[params["exec_id"]].append((note["method"], params["seq"]))
            output[params["exec_id"]] += params.get("data", b"")
    assert Counter(output.values()) == {text: 3000}
    for records_of_one in told.values():
        methods = [method for method, _ in records_of_one]
        assert methods[-2:] == ["exec.exited", "exec.closed"]
        assert set(methods[:-2]) == {"exec.output"}
        assert [seq for _, seq in records_of_one] == [*range(1, len(records_of_one) + 1)]


def test_c05_the_exit_comes_after_the_last_byte_however_slowly_it_is_read(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Each stream matches a local run to the byte, 200 times, for a reader of 1 kB pieces."""
    commands = [["seq", "1", "100000"], ["sh", "-c", "seq 1 9000; seq 1 4000 >&2"]]
    wanted = {}
    for argv in commands:
        local = subprocess.run(argv, capture_output=True, check=True)
        wanted[tuple(argv)] = (_digest(local.stdout), _digest(local.stderr))
    assert wanted["seq", "1", "100000"][0][0] == 588895
    with runnerd_daemon.connect() as client:
        for number in range(200):
            argv = commands[number % 2]
            handle = client.start(argv, window_bytes=1024, sha256=True)
            streams = {"stdout": b"", "stderr": b""}
            for note in handle.output():
                assert isinstance(note, OutputNote)
                streams[note.stream] += note.data
            assert handle.exit is not None
            assert (_digest(streams["stdout"]), _digest(streams["stderr"])) == wanted[tuple(argv)]
            assert handle.exit.stdout.sha256 == wanted[tuple(argv)][0][1]
            assert handle.exit.stderr.sha256 == wanted[tuple(argv)][1][1]
            assert handle.exit.code == 0


def _digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


def test_c07_only_a_reaped_status_is_an_exit(runnerd_daemon: RunnerdProcess) -> None:
    """EOF on both pipes is no exit, and it costs the daemon no CPU to wait behind it."""
    with runnerd_daemon.connect() as client:
        began_s = time.monotonic()
        handle = client.start(["sh", "-c", "exec 1>&- 2>&-; sleep 3; exit 5"])
        before_s = cpu_s(runnerd_daemon.pid)
        assert list(handle.output()) == []
        assert handle.exit is not None
        assert time.monotonic() - began_s >= 3.0
        assert (handle.exit.code, handle.exit.reason) == (5, "exited")
        assert (handle.exit.wall_s or 0.0) >= 3.0
        assert cpu_s(runnerd_daemon.pid) - before_s < 0.3  # 10 % of the 3 s; a busy poll has 100


def test_c07_a_killed_client_is_no_exit(runnerd_daemon: RunnerdProcess) -> None:
    """A client killed with SIGKILL ends its connection and nothing else."""
    runner = runnerd_daemon.start_ctl("run", "--id", "kept", "--", "sleep", "3.105")
    with runnerd_daemon.connect() as client:
        wait_for(lambda: [each.exec_id for each in client.list_execs()] == ["kept"])
        runner.send_signal(signal.SIGKILL)
        runner.communicate()
        wait_for(lambda: client.inspect("kept").subscriptions == 0)
        assert client.inspect("kept").exit is None
        handle = client.attach("kept")
        assert list(handle.output()) == []
        assert handle.exit is not None
        assert (handle.exit.code, handle.exit.reason) == (0, "exited")
        assert (handle.exit.wall_s or 0.0) >= 3.1


def test_c09_starting_on_seventy_connections_delays_nobody(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """70 starts at once all finish, and list and metrics answer all the while."""
    slowest_s = {"list": 0.0, "metrics": 0.0}
    over = threading.Event()

    def watch(what: str) -> None:
        with runnerd_daemon.connect() as client:
            while not over.wait(0.05):
                began_s = time.monotonic()
                if what == "list":
                    client.list_execs()
                else:
                    client.metrics()
                slowest_s[what] = max(slowest_s[what], time.monotonic() - began_s)

    def start(client: Client) -> tuple[int | None, bytes]:
        done = client.run(["echo", "1"])
        return done.exit.code, done.stdout

    with runnerd_daemon.connect() as first:
        first.metrics()  # the scrape's library is imported once, and not what is measured here
    clients = [runnerd_daemon.connect() for _ in range(70)]
    watchers = [threading.Thread(target=watch, args=(what,)) for what in slowest_s]
    try:
        for watcher in watchers:
            watcher.start()
        with concurrent.futures.ThreadPoolExecutor(70) as pool, within(5.0, "all 70"):
            assert list(pool.map(start, clients)) == [(0, b"1\n")] * 70
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
        for client in clients:
            client.close()
    assert max(slowest_s.values()) <= 0.5 * SLACK, slowest_s


def test_c10_a_late_attach_has_everything(runnerd_daemon: RunnerdProcess) -> None:
    """300 times: whoever attaches after the exit gets the whole replay and the same status."""
    wanted = subprocess.run(["seq", "1", "20000"], capture_output=True, check=True).stdout
    with runnerd_daemon.connect() as client, runnerd_daemon.connect() as late:
        for number in range(300):
            exec_id = f"c10-{number}"
            done = client.run(["sh", "-c", "seq 1 20000; exit 3"], exec_id=exec_id)
            assert (done.exit.code, done.stdout) == (3, wanted)
            handle = late.attach(exec_id)
            assert b"".join(_data(note) for note in handle.output()) == wanted
            assert handle.exit is not None
            assert handle.exit.code == 3
            assert late.wait(exec_id).code == 3
            known = late.inspect(exec_id).exit
            assert known is not None
            assert known.code == 3


def _data(note: object) -> bytes:
    assert isinstance(note, OutputNote)
    return note.data


def test_c12_order_within_a_stream_is_exact_and_slow_writes_alternate(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Sequences are gapless over both streams; writes apart in time, or merged, keep order.

    The fast form merged is `stderr: "stdout"`, or a terminal.
    The slow form writes 40 pairs, since 20 pauses of 50 ms prove what 400 would.
    """
    loop = "for i in $(seq 1 {count}); do echo o$i; {pause} echo e$i >&2; {pause} done"
    fast = ["bash", "-c", loop.format(count=200, pause="")]
    slow = ["bash", "-c", loop.format(count=40, pause="sleep 0.05;")]
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        client.call("exec.start", exec_id="fast", argv=fast, attach={})
        client.call("exec.start", exec_id="slow", argv=slow, attach={})
        client.call("exec.start", exec_id="merged", argv=fast, stderr="stdout", attach={})
        client.call("exec.start", exec_id="terminal", argv=fast, pty={}, attach={})
        for exec_id in ("fast", "slow", "merged", "terminal"):
            client.note("exec.closed", exec_id)
            told = records(client, exec_id)
            assert [note["seq"] for note in told] == [*range(1, len(told) + 1)]
        stdout = b"".join(b"o%d\n" % number for number in range(1, 201))
        assert client.output("fast", "stdout") == stdout
        assert client.output("fast", "stderr") == stdout.replace(b"o", b"e")
        merged = b"".join(b"o%d\ne%d\n" % (number, number) for number in range(1, 201))
        assert client.output("terminal") == merged.replace(b"\n", b"\r\n")
        assert client.output("merged") == merged
        chunks = [
            (note["stream"], note["data"])
            for note in records(client, "slow")
            if note["method"] == "exec.output"
        ]
        assert chunks == [
            (stream, b"%s%d\n" % (letter, number))
            for number in range(1, 41)
            for stream, letter in (("stdout", b"o"), ("stderr", b"e"))
        ]
