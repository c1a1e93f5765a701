"""Cases from the field: slow, stopped and vanished readers, and what they cost everybody else."""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.protocol.framing import Encoding
from tests.cases.field import rounds
from tests.cases.looking import SLACK, metric, peak_rss_bytes, rss_bytes, within
from tests.harness import RunnerdProcess, wait_for
from tests.raw import ClosedError, RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

# RUNNERD_CASES_FULL=1 has the cases run for as long as they say, and the daemon's patience as it is
# by default.
STUCK_S: Final = rounds(30, 3)
LONG_S: Final = rounds(60, 3)


class Follower(threading.Thread):
    """A healthy reader of one exec, that notes its longest pause.

    Attributes:
        longest_s: The longest time without a record.
        gaps: How many gaps it was told of.
        offset: Where the stream's next byte is.
    """

    def __init__(self, daemon: RunnerdProcess, exec_id: str) -> None:
        super().__init__()
        self.longest_s = 0.0
        self.gaps = 0
        self.offset = 0
        self.is_contiguous = True
        self._client = RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)
        self._client.call("exec.attach", exec_id=exec_id, after="tail")
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        last_s = time.monotonic()
        while not self._over.is_set():
            note = self._client.receive()
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
            self.gaps += note["method"] == "exec.gap"
            if note["method"] == "exec.output":
                offset = note["params"]["offset"]
                self.is_contiguous &= self.offset in (0, offset)
                self.offset = offset + len(note["params"]["data"])
            self._client.notes.clear()

    def finish(self, after_bytes: int) -> None:
        wait_for(lambda: self.offset > after_bytes, 10 * SLACK)
        self._over.set()
        self.join()
        self._client.sock.close()


def test_c56_who_does_not_read_disturbs_nobody(start_daemon: Callable[..., RunnerdProcess]) -> None:
    """Readers get data without a pause beside one that never reads and one that is stopped.

    Both of those are closed and counted; one that only paused is told of its gap. One more comes
    in the middle of the run.
    """
    # A small spool, so that a pause of a moment goes past what it holds.
    daemon = start_daemon("--stuck-reader-s", str(STUCK_S), "--spool-bytes-max", str(2 << 20))
    script = "while :; do seq 1 20000; sleep 0.02; done"
    began_s = time.monotonic()
    with daemon.connect() as client, RawClient(daemon.socket_path) as never:
        exec_id = client.start(["sh", "-c", script], attach=False, grace_s=0.0).exec_id
        never.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        never.call("exec.attach", exec_id=exec_id)
        stopped = daemon.start_ctl("attach", exec_id)
        wait_for(lambda: client.inspect(exec_id).subscriptions == 2)
        stopped.send_signal(signal.SIGSTOP)
        followers = [Follower(daemon, exec_id) for _ in range(2)]
        with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as pausing:
            pausing.call("exec.attach", exec_id=exec_id)
            seen = followers[0].offset
            # Past what a socket, a batch on its way there and the transcript hold together.
            wait_for(lambda: followers[0].offset > seen + 6_000_000, 30)
            assert pausing.note("exec.gap", exec_id)["stdout_bytes"] > 0
        _sleep_until(began_s + LONG_S / 2)
        followers.append(Follower(daemon, exec_id))
        _sleep_until(began_s + LONG_S)
        stuck = "runnerd_connections_stuck_total"
        wait_for(lambda: metric(client, stuck) == 2, STUCK_S + 10 * SLACK)
        for follower in followers:
            follower.finish(after_bytes=2_000_000)
        assert client.inspect(exec_id).state == "running"
        client.cancel(exec_id)
        never.read_to_end()
        stopped.send_signal(signal.SIGCONT)
        _, said = stopped.communicate(timeout=20)
        # It comes back by itself, and says what it missed.
        assert stopped.returncode == 128 + signal.SIGKILL
        assert b"connection lost" in said
        assert b"bytes of stdout can no longer be shown" in said
    for follower in followers:
        assert follower.longest_s <= 1.0 * SLACK
        assert (follower.gaps, follower.is_contiguous) == (0, True)


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))  # the case itself: so long it runs


def test_c57_without_a_subscriber_memory_is_bounded(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """`yes` without a reader costs its tail; who attaches is told the gap, then what is live."""
    daemon = start_daemon()
    with daemon.connect() as starter:
        exec_id = starter.start(["yes"], attach=False).exec_id
    with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        before = rss_bytes(daemon.pid)
        began_s = time.monotonic()
        for second in range(1, LONG_S + 1):
            _sleep_until(began_s + second)
            assert rss_bytes(daemon.pid) - before < (32 + 16) << 20, f"after {second} s"
        wait_for(lambda: _total(client, exec_id) > 200_000_000, 60)
        assert peak_rss_bytes(daemon.pid) - before < (32 + 16) << 20
        assert rss_bytes(daemon.pid) - before < 16 << 20
        client.call("exec.attach", exec_id=exec_id)
        gap = client.receive()
        assert gap["method"] == "exec.gap"
        assert gap["params"]["first_seq"] == 1
        live = client.call("exec.inspect", exec_id=exec_id)["last_seq"]
        wait_for(lambda: client.receive()["params"].get("seq", 0) > live + 10)
        with within(1.0, "the cancel"):
            assert client.call("exec.cancel", exec_id=exec_id)["outcome"] == "ended"


def _total(client: RawClient, exec_id: str) -> int:
    # A sequence stands for at most 64 KiB, a full pipe; `yes` fills it.
    return int(client.call("exec.inspect", exec_id=exec_id)["last_seq"]) * 32768


def test_c57_a_lost_blocking_subscriber_is_waited_for_and_then_no_more(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Under `block` a lost reader holds the command for hold_s; then output is dropped."""
    starter = RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK)
    starter.call("exec.start", exec_id="held", argv=["yes"], hold_s=1.0, attach={"window_bytes": 1})
    starter.note("exec.output", "held")
    lost_s = time.monotonic()
    starter.sock.close()
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        wait_for(lambda: client.call("exec.inspect", exec_id="held")["flow"] == "drop", 1.0 * SLACK)
        assert time.monotonic() - lost_s >= 1.0
        assert client.call("exec.inspect", exec_id="held")["first_seq"] >= 1
        wait_for(lambda: client.call("exec.inspect", exec_id="held")["first_seq"] > 100)
        client.call("exec.attach", exec_id="held")
        assert client.note("exec.gap", "held")["first_seq"] == 1
        with within(1.0, "the cancel"):
            assert client.call("exec.cancel", exec_id="held")["outcome"] == "ended"


@pytest.mark.parametrize("wanted", ["stdout", "stderr"])
@pytest.mark.parametrize("window", [None, 1000])
def test_c60_a_stream_nobody_wants_is_read_all_the_same(
    runnerd_daemon: RunnerdProcess, wanted: str, window: int | None
) -> None:
    """3 MB on the stream not subscribed to hold neither the command nor the other stream."""
    big, small = (">&2", "") if wanted == "stdout" else ("", ">&2")
    script = f"head -c 3000000 /dev/zero {big}; echo ok {small}"
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        with within(2.0, "all of it"):
            client.call(
                "exec.start",
                exec_id="c60",
                argv=["sh", "-c", script],
                attach={"streams": [wanted], "window_bytes": window},
            )
            its_exit = client.note("exec.exited", "c60")["exit"]
        assert client.output("c60", wanted) == b"ok\n"
        assert its_exit["code"] == 0
        unwanted = "stderr" if wanted == "stdout" else "stdout"
        assert its_exit[unwanted]["total_bytes"] == 3_000_000
        assert client.output("c60", unwanted) == b""


class Reader:
    """One of many subscribers, all served by one thread.

    Attributes:
        count: Bytes of output taken.
        crc: Their checksum.
        gap_bytes: Bytes it was told are no longer kept.
        methods: The notifications that were neither output nor heartbeats.
    """

    def __init__(self, daemon: RunnerdProcess, exec_id: str) -> None:
        self.client = RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)
        self.client.call("exec.attach", exec_id=exec_id)
        self.count = self.crc = self.gap_bytes = 0
        self.methods: list[str] = []
        self.closed = False

    def take(self, bytes_max: int = 1 << 18) -> None:
        """Take what one read of the socket brings."""
        try:
            self.client.take(bytes_max)
        except ClosedError:
            self.closed = True
        for note in self.client.notes:
            self._note(note["method"], note["params"])
        self.client.notes.clear()

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "exec.output":
            assert params["offset"] == self.count + self.gap_bytes
            self.count += len(params["data"])
            self.crc = zlib.crc32(params["data"], self.crc)
            return
        if method == "exec.gap":
            self.gap_bytes += params["stdout_bytes"]
        if method != "exec.heartbeat":  # opening fifty takes its time on a busy machine
            self.methods.append(method)


def test_c61_fifty_subscribers_of_which_twenty_are_ill(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """Healthy ones get everything in order; slow ones get gaps; dead ones are closed and counted.

    A healthy reader may be behind by what the spool holds, 16 MiB here, so that the slow ones,
    25 MB behind, are told of a gap.
    """
    options = ("--stuck-reader-s", str(STUCK_S), "--spool-bytes-max", str(16 << 20))
    daemon = start_daemon(*options)
    line = b"0123456789abcde\n" * 3200
    script = (
        "import sys, time\n"
        "sys.stdin.readline()\n"
        "end = time.monotonic()\n"
        "for _ in range(500):\n"
        "    sys.stdout.buffer.write(b'0123456789abcde\\n' * 3200)\n"
        "    sys.stdout.flush()\n"
        "    end += 0.01\n"
        "    time.sleep(max(0, end - time.monotonic()))\n"
    )
    with daemon.connect() as client:
        handle = client.start([sys.executable, "-c", script], stdin="pipe", attach=False)
        healthy = [Reader(daemon, handle.exec_id) for _ in range(30)]
        slow = [Reader(daemon, handle.exec_id) for _ in range(10)]
        ill = [daemon.start_ctl("attach", handle.exec_id) for _ in range(10)]
        wait_for(lambda: client.inspect(handle.exec_id).subscriptions == 50, 20)
        for stopped in ill[:5]:
            stopped.send_signal(signal.SIGSTOP)
        for vanished in ill[5:]:
            vanished.kill()
            vanished.communicate()
        before = metric(client, "process_open_fds")
        handle.write(b"\n", eof=True)
        began_s = time.monotonic()
        _serve(healthy, slow)
        assert time.monotonic() - began_s <= 5.0 * SLACK
        wanted = zlib.crc32(line * 500)
        for reader in healthy:
            assert (reader.count, reader.gap_bytes, reader.crc) == (500 * len(line), 0, wanted)
            assert reader.methods == ["exec.exited", "exec.closed"]
        for reader in slow:
            while "exec.closed" not in reader.methods and not reader.closed:
                reader.take()
            if not reader.closed:
                assert reader.gap_bytes > 0
                assert reader.count + reader.gap_bytes == 500 * len(line)
        wait_for(lambda: metric(client, "runnerd_subscriptions") == 0, STUCK_S + 10 * SLACK)
        assert metric(client, "runnerd_connections_stuck_total") >= 5
        for reader in healthy + slow:
            reader.client.sock.close()
        wait_for(lambda: metric(client, "runnerd_connections") == 1)
        assert metric(client, "process_open_fds") < before - 40
        for stopped in ill[:5]:
            stopped.kill()
            stopped.communicate()


def _serve(healthy: list[Reader], slow: list[Reader]) -> None:
    """Read for the healthy as data comes, for the slow at 10 kB/s, until the healthy are done."""
    with selectors.DefaultSelector() as selector:
        for reader in healthy:
            selector.register(reader.client.sock, selectors.EVENT_READ, reader)
        next_s = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(0.05):
                key.data.take()
                if "exec.closed" in key.data.methods or key.data.closed:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= next_s:
                next_s += 1.0
                for reader in slow:
                    reader.take(10_000)
