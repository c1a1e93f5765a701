"""Cases from the field: bytes are bytes, on every stream and in every amount."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import Pty
from tests.cases.looking import peak_rss_bytes, records
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("encoding", [*Encoding])
def test_c49_a_character_cut_in_two_is_no_matter(
    runnerd_daemon: RunnerdProcess, encoding: Encoding
) -> None:
    """Text cut anywhere, by the writer's pauses or by chunks, joins to the source's bytes."""
    slow = "printf 'caf\\303'; sleep 0.1; printf '\\251 \\342\\230'; sleep 0.1; printf '\\225\\n'"
    # One leading byte, so that every chunk of an even size is cut inside a character.
    fast = "import sys; sys.stdout.buffer.write(('x' + 'é' * (1 << 19)).encode())"
    with RawClient(runnerd_daemon.socket_path, encoding=encoding) as client:
        client.call("exec.start", exec_id="slow", argv=["sh", "-c", slow], attach={})
        client.call("exec.start", exec_id="fast", argv=[sys.executable, "-c", fast], attach={})
        client.note("exec.exited", "slow")
        client.note("exec.exited", "fast")
        assert client.output("slow") == b"caf\xc3\xa9 \xe2\x98\x95\n"
        assert client.output("fast") == b"x" + "é".encode() * (1 << 19)


def test_c50_every_byte_passes_every_stream(start_daemon: Callable[..., RunnerdProcess]) -> None:
    """NUL, CR, ESC and what is no UTF-8 pass stdout, stderr and stdin; the log stays text."""
    daemon = start_daemon("--log-level", "debug")
    odd = "import os;os.write(1,bytes(range(256))*4096);os.write(2,b'\\xff\\xfe\\x00')"
    with daemon.connect() as client:
        done = client.run([sys.executable, "-c", odd])
        assert (done.stdout, done.stderr) == (bytes(range(256)) * 4096, b"\xff\xfe\0")
        assert done.exit.code == 0
        noise = client.run(["head", "-c", "1048576", "/dev/urandom"], sha256=True)
        assert len(noise.stdout) == noise.exit.stdout.total_bytes == 1 << 20
        assert hashlib.sha256(noise.stdout).hexdigest() == noise.exit.stdout.sha256
        for data in (noise.stdout, bytes(range(256)) * 4096):
            summed = client.run(["sha256sum"], input=data)
            assert summed.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
            assert (summed.exit.code, summed.stderr) == (0, b"")
        client.run(["sh", "-c", "exit 1", "\x1b[31m\r\n\t\x07"], exec_id="odd")
    daemon.stop()
    lines = daemon.log_path.read_bytes().splitlines()
    assert any(json.loads(line).get("exec_id") == "odd" for line in lines)
    assert all(line.decode().isprintable() for line in lines)


@pytest.mark.parametrize(
    ("options", "kept_max", "kept_at_exit_max"),
    # With a spool, what a disk has not taken yet is in memory beside what is on it: up to half of
    # what all transcripts may have, for as long as it takes.
    [
        (("--spool", "off"), 1 << 20, 1 << 20),
        (("--spool-bytes-max", str(1 << 20)), 2 << 20, 17 << 20),
    ],
)
def test_c52_a_full_transcript_keeps_the_tail_and_counts_the_rest(
    start_daemon: Callable[..., RunnerdProcess],
    options: tuple[str, str],
    kept_max: int,
    kept_at_exit_max: int,
) -> None:
    """Without a reader the command ends at its own pace; total = kept + dropped, the tail is there.

    The kept range is what attach replays after its gap; the flag is `transcript: partial`.
    """
    daemon = start_daemon("--tail-bytes-max", str(1 << 20), *options)
    with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        client.call("exec.start", exec_id="c52", argv=["seq", "1", "5000000"])
        its_exit = client.call("exec.wait", exec_id="c52")
        assert (its_exit["code"], its_exit["reason"]) == (0, "exited")
        count = its_exit["stdout"]
        assert count["total_bytes"] == 38_888_896
        assert count["kept_bytes"] + count["dropped_bytes"] == 38_888_896
        assert (1 << 20) - (64 << 10) - 64 * 192 <= count["kept_bytes"] <= kept_at_exit_max
        wait_for(lambda: len(replayed(daemon, "c52")) <= kept_max)
        info = client.call("exec.inspect", exec_id="c52")
        assert info["transcript"] == "partial"
        client.call("exec.attach", exec_id="c52")
        client.note("exec.closed", "c52")
        gap, *chunks = records(client, "c52")[:-2]
        assert gap["method"] == "exec.gap"
        assert (gap["first_seq"], gap["last_seq"]) == (1, chunks[0]["seq"] - 1)
        tail = client.output("c52")
        dropped = 38_888_896 - len(tail)
        assert (gap["stdout_bytes"], gap["stderr_bytes"]) == (dropped, 0)
        assert chunks[0]["offset"] == dropped
        # What was still on its way to the disk at the exit takes the place of what is older.
        assert dropped == count["dropped_bytes"] or kept_max > 1 << 20
        assert dropped >= count["dropped_bytes"]
        assert tail.endswith(b"\n4999999\n5000000\n")


def replayed(daemon: RunnerdProcess, exec_id: str) -> bytes:
    with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        client.call("exec.attach", exec_id=exec_id)
        client.note("exec.closed", exec_id)
        return client.output(exec_id)


def test_c53_no_line_is_waited_for(runnerd_daemon: RunnerdProcess) -> None:
    """50 MB without a newline pass, and the daemon's memory does not follow."""
    long = "import sys;sys.stdout.write('x'*50_000_000+'END')"
    with runnerd_daemon.connect() as client:
        client.run(["true"])
        before = peak_rss_bytes(runnerd_daemon.pid)
        done = client.run([sys.executable, "-c", long])
        assert done.exit.code == 0
        assert done.stdout == b"x" * 50_000_000 + b"END"
        done = client.run(["sh", "-c", "head -c 70000 /dev/zero | tr '\\0' y; echo; echo after"])
        assert (done.exit.code, done.stdout) == (0, b"y" * 70_000 + b"\nafter\n")
        assert peak_rss_bytes(runnerd_daemon.pid) - before < 16 << 20


def test_c55_pipes_change_no_byte(runnerd_daemon: RunnerdProcess) -> None:
    """500 of 500 runs over pipes give both streams as written."""
    argv = ["sh", "-c", "printf 'a\\nb\\tc\\n'; echo err >&2"]
    with runnerd_daemon.connect() as client:
        for _ in range(500):
            done = client.run(argv)
            assert (done.stdout, done.stderr) == (b"a\nb\tc\n", b"err\n")
            assert done.exit.code == 0


def test_c55_a_terminal_changes_line_ends_and_nothing_else(runnerd_daemon: RunnerdProcess) -> None:
    """500 of 500 runs in a terminal give one stream, in order, with ONLCR's line ends."""
    argv = ["sh", "-c", "printf 'a\\nb\\tc\\n'; echo err >&2"]
    with runnerd_daemon.connect() as client:
        for _ in range(500):
            done = client.run(argv, pty=Pty(rows=24, cols=80))
            assert (done.stdout, done.stderr) == (b"a\r\nb\tc\r\nerr\r\n", b"")
            assert done.exit.code == 0
