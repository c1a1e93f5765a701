"""The spool with a real daemon, a real disk, and disks that fail, fill up, lie and hang."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runnerd.core.slots import SLOT_BYTES
from runnerd.protocol.framing import Encoding
from tests import needs
from tests.cases.looking import SLACK, metric, rss_bytes
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

from .looking import log_lines, planted

if TYPE_CHECKING:
    from collections.abc import Iterator

StartDaemon = Callable[..., RunnerdProcess]

# Lines that say where they stand, in writes of 48 KiB: a byte out of place is seen.
COUNTING: Final = (
    "import sys\n"
    "for at in range(0, {size}, 49152):\n"
    "    sys.stdout.buffer.write(b''.join(b'%015d\\n' % n for n in range(at, at + 49152, 16)))\n"
)


def counting(size: int) -> list[str]:
    """Return a command that writes `size` bytes, a multiple of 48 KiB."""
    assert size % 49152 == 0
    return [sys.executable, "-c", COUNTING.format(size=size)]


def expected(offset: int, size: int) -> bytes:
    first = offset // 16
    lines = b"".join(b"%015d\n" % (16 * n) for n in range(first, (offset + size) // 16 + 1))
    return lines[offset - 16 * first :][:size]


class Replay:
    """What an attach from the beginning gives, every byte held against what was written.

    Attributes:
        got, lost: Bytes given, and said to be lost.
        gaps: How often.
        exit: The exit's fields.
    """

    def __init__(self, client: RawClient, exec_id: str, **attach: Any) -> None:
        self.got = self.lost = self.gaps = 0
        self.exit: dict[str, Any] = {}
        self._client = client
        self.number = client.call("exec.attach", exec_id=exec_id, **attach)["subscription"]

    def to_end(self, timeout_s: float = 60.0) -> Replay:
        deadline_s = time.monotonic() + timeout_s
        while not self.exit:
            for note in self._client.notes:
                if note["params"].get("subscription") == self.number:
                    self.take(note["method"], note["params"])
            self._client.notes.clear()
            if not self.exit:
                self._client.receive(deadline_s - time.monotonic())
        assert self.got + self.lost == self.exit["stdout"]["total_bytes"]
        return self

    def take(self, method: str, params: dict[str, Any]) -> None:
        if method == "exec.output":
            assert params["offset"] == self.got + self.lost
            assert params["data"] == expected(params["offset"], len(params["data"]))
            self.got += len(params["data"])
        elif method == "exec.gap":
            self.gaps += 1
            self.lost += params["stdout_bytes"]
        elif method == "exec.exited":
            self.exit = params["exit"]


def connected(daemon: RunnerdProcess) -> RawClient:
    return RawClient(daemon.socket_path, encoding=Encoding.MSGPACK)


def run(client: RawClient, exec_id: str, argv: list[str]) -> dict[str, Any]:
    """Run a command that nobody reads, to its exit."""
    client.call("exec.start", exec_id=exec_id, argv=argv)
    its_exit: dict[str, Any] = client.call("exec.wait", exec_id=exec_id)
    return its_exit


def spool_of(client: RawClient, exec_id: str) -> tuple[str, str | None]:
    info = client.call("exec.inspect", exec_id=exec_id)
    return info["spool"], info["spool_reason"]


def bytes_on_disk(client: RawClient) -> float:
    text = client.call("daemon.metrics")["text"]
    return next(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("runnerd_spool_bytes")
    )


def spool_fd(daemon: RunnerdProcess) -> Path:
    """Return the way to the daemon's unlinked file."""
    for each in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "/spool/#" in str(each.readlink()):
                return each
    raise AssertionError("no spool file is open")


MIB: Final = 1 << 20
SIZE: Final = 420 * 49152  # 20 MB


def test_output_nobody_read_is_all_there_afterwards(runnerd_daemon: RunnerdProcess) -> None:
    with connected(runnerd_daemon) as client:
        its_exit = run(client, "e", counting(SIZE))
        assert its_exit["stdout"]["dropped_bytes"] == 0
        replay = Replay(client, "e").to_end()
        assert (replay.got, replay.lost) == (SIZE, 0)
        assert spool_of(client, "e") == ("on", None)
        assert bytes_on_disk(client) >= SIZE - 256 * 1024
        info = client.call("daemon.info")
        assert info["spool_directory"].endswith("/state/spool")
        assert info["limits"]["spool_bytes"] == 64 * MIB
        assert list(Path(info["spool_directory"]).iterdir()) == []  # it has no name


def test_a_tail_reaches_what_is_on_disk(start_daemon: StartDaemon) -> None:
    """As with hundreds of execs live, where memory keeps no more than a screen of each."""
    daemon = start_daemon("--tail-bytes-max", "16384")
    with connected(daemon) as client:
        run(client, "e", counting(SIZE))
        for asked in (MIB, 100_000, 5000):
            subscription = client.call("exec.attach", exec_id="e", after="tail", tail_bytes=asked)
            got = b""
            while not (note := client.receive(10))["method"].endswith("exited"):
                if note["params"]["subscription"] == subscription["subscription"]:
                    assert note["method"] == "exec.output", note
                    got += note["params"]["data"]
            assert asked - 65536 < len(got) <= asked
            assert got == expected(SIZE - len(got), len(got))


ODD: Final = """
import itertools, os
data = b"".join(b"%015d\\n" % (16 * n) for n in range(4_000_000))
at = 0
for size in itertools.cycle([65536, 4096, 1, 33333, 777, 65535]):
    if at == len(data):
        break
    at += os.write(1, data[at : at + size])
"""


def test_64_million_bytes_are_kept_whole(runnerd_daemon: RunnerdProcess) -> None:
    """A reader that takes nothing is waited for, so that the disk cannot lag on a busy machine."""
    argv = [sys.executable, "-c", ODD]
    with connected(runnerd_daemon) as silent, connected(runnerd_daemon) as client:
        silent.call("exec.start", exec_id="e", argv=argv, attach={"window_bytes": 1000})
        assert client.call("exec.wait", exec_id="e")["code"] == 0
        replay = Replay(client, "e").to_end()
        assert (replay.got, replay.lost) == (64_000_000, 0)
        assert bytes_on_disk(client) <= 64 * MIB


def test_small_outputs_of_finished_execs_move_to_the_disk(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--transcript-total-bytes-max", str(2 * MIB))
    with connected(daemon) as client:
        for at in range(100):
            run(client, f"e{at}", counting(49152))
        assert {Replay(client, f"e{at}").to_end().got for at in range(100)} == {49152}
        assert bytes_on_disk(client) > 0
        with daemon.connect() as looking:
            assert metric(looking, "runnerd_transcript_bytes") <= 2 * MIB


def test_without_its_native_part_the_spool_is_written_in_python(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **planted("""
            from pathlib import Path
            from runnerd.daemon import spool_io
            spool_io.LIBRARY = Path("/nowhere/spool_io.so")
        """)
    )
    with connected(daemon) as client:
        run(client, "e", counting(SIZE))
        assert Replay(client, "e").to_end().lost == 0
        assert spool_of(client, "e") == ("on", None)
    (line,) = log_lines(daemon, "spool_plain")
    assert "/nowhere/spool_io.so" in line["reason"]


def test_short_output_touches_no_disk(runnerd_daemon: RunnerdProcess) -> None:
    with connected(runnerd_daemon) as client:
        for at in range(20):
            run(client, f"e{at}", ["echo", "hello"])
        assert bytes_on_disk(client) == 0
        assert spool_fd(runnerd_daemon).stat().st_size == 0


def test_space_is_given_back_with_the_record(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--finished-execs-max", "1")
    with connected(daemon) as client:
        file = spool_fd(daemon)
        run(client, "big", counting(SIZE))
        assert file.stat().st_blocks * 512 > SIZE - MIB
        run(client, "big2", counting(SIZE // 2))  # "big" is forgotten: a hole in the file
        wait_for(lambda: file.stat().st_blocks * 512 < SIZE * 3 // 4)
        run(client, "small", ["true"])
        wait_for(lambda: file.stat().st_size == 0)
        assert bytes_on_disk(client) == 0


def test_an_exec_goes_round_in_its_share(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--spool-bytes-max", str(16 * SLOT_BYTES))
    with connected(daemon) as client:
        its_exit = run(client, "e", counting(SIZE))
        assert its_exit["stdout"]["kept_bytes"] > 12 * SLOT_BYTES
        assert spool_fd(daemon).stat().st_size <= 16 * SLOT_BYTES
        replay = Replay(client, "e").to_end()
        assert (replay.gaps, replay.lost) == (1, its_exit["stdout"]["dropped_bytes"])


@pytest.mark.parametrize(("options", "has_spool"), [((), False), (("--spool", "any"), True)])
def test_there_is_no_spool_in_memory_unless_asked(
    start_daemon: StartDaemon, tmp_path: Path, options: tuple[str, ...], has_spool: bool
) -> None:
    with mounted(tmp_path, "64m") as state:
        daemon = start_daemon("--state-dir", str(state), *options)
        with connected(daemon) as client:
            info = client.call("daemon.info")
            run(client, "e", counting(SIZE))
            kept = spool_of(client, "e")
            replay = Replay(client, "e").to_end()
        assert daemon.stop() == 0
    assert (info["spool_directory"] is not None) == has_spool
    assert ("is memory" in str(info["spool_reason"])) != has_spool
    assert (info["limits"]["spool_bytes"] > 0) == has_spool
    assert kept == (("on", None) if has_spool else ("off", None))
    assert (replay.lost == 0) == has_spool


def test_the_spool_can_be_left_out(start_daemon: StartDaemon) -> None:
    with connected(start_daemon("--spool", "off")) as client:
        assert client.call("daemon.info")["spool_reason"] == "--spool off"
        assert client.hello["limits"]["spool_total_bytes"] == 0


class mounted:  # noqa: N801  # used as a function
    """A small tmpfs."""

    def __init__(self, directory: Path, size: str) -> None:
        needs.root()
        self._place = directory / "mounted"
        self._size = size

    def __enter__(self) -> Path:
        self._place.mkdir()
        words = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={self._size},mode=0700",
            "tmpfs",
            str(self._place),
        ]
        done = subprocess.run(words, capture_output=True, check=False)
        if done.returncode:
            needs.skip_or_fail(f"cannot mount: {done.stderr.decode()}")
        return self._place

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self._place)], check=True)


def test_a_full_disk_costs_the_spool_and_nothing_else(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    with mounted(tmp_path, "4m") as state:
        daemon = start_daemon("--state-dir", str(state), "--spool", "any")
        with connected(daemon) as client:
            its_exit = run(client, "e", counting(SIZE))
            assert (its_exit["code"], its_exit["stdout"]["total_bytes"]) == (0, SIZE)
            degraded = ("degraded", "cannot write: No space left on device")
            assert spool_of(client, "e") == degraded
            replay = Replay(client, "e").to_end()
            assert replay.lost == its_exit["stdout"]["dropped_bytes"]
            assert 0 < replay.got <= 256 * 1024
            wait_for(lambda: bytes_on_disk(client) == 0)
            wait_for(lambda: spool_fd(daemon).stat().st_blocks == 0)
            run(client, "small", counting(49152 * 20))  # there is room again
            assert Replay(client, "small").to_end().lost == 0
        with daemon.connect() as looking:
            assert metric(looking, "runnerd_spool_degraded_total") == 1
        assert daemon.stop() == 0
    assert "spool_degraded" in daemon.log_path.read_text()


def test_a_limit_on_file_sizes_makes_the_spool_small(start_daemon: StartDaemon) -> None:
    """SIGXFSZ would end the daemon, and a limit met is a write that fails."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, resource.RLIM_INFINITY))

    daemon = start_daemon(prepare=limit)
    with connected(daemon) as client:
        its_exit = run(client, "e", counting(SIZE))
        assert spool_of(client, "e") == ("on", None)
        assert 6 * MIB < its_exit["stdout"]["kept_bytes"] <= 8 * MIB + 256 * 1024
        Replay(client, "e").to_end()


def test_a_limit_that_comes_later_is_a_write_that_fails(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with connected(daemon) as client:
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
        its_exit = run(client, "e", counting(SIZE))
        assert its_exit["stdout"]["total_bytes"] == SIZE
        assert spool_of(client, "e") == ("degraded", "cannot write: File too large")
        Replay(client, "e").to_end()


def test_a_disk_that_gives_back_something_else_is_found_out(
    runnerd_daemon: RunnerdProcess,
) -> None:
    needs.root()
    with connected(runnerd_daemon) as client:
        run(client, "e", counting(SIZE))
        with spool_fd(runnerd_daemon).open("r+b", buffering=0) as file:
            file.seek(3 * SLOT_BYTES + 1000)
            file.write(b"?")
        replay = Replay(client, "e").to_end()
        assert replay.gaps == 1
        assert 0 < replay.got < SIZE
        state, reason = spool_of(client, "e")
        assert (state, "something else" in str(reason)) == ("degraded", True)


def test_a_read_that_fails_is_a_gap(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **planted("""
            import errno, os
            from runnerd.daemon import spool_file
            def pread(*_):
                raise OSError(errno.EIO, "Input/output error")
            spool_file.os = type("Os", (), {**vars(os), "pread": staticmethod(pread)})
        """)
    )
    with connected(daemon) as client:
        run(client, "e", counting(SIZE))
        replay = Replay(client, "e").to_end()
        assert (replay.gaps, 0 < replay.got <= 256 * 1024) == (1, True)
        assert spool_of(client, "e") == ("degraded", "cannot read: Input/output error")
        assert client.call("exec.inspect", exec_id="e")["transcript"] == "partial"


HANGING: Final = """
    import os, time
    from runnerd.daemon.spool_file import SpoolFile
    real = SpoolFile.{method}
    def hang(*args):
        while os.path.exists({path!r}):
            time.sleep(0.01)
        return real(*args)
    SpoolFile.{method} = hang
"""


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Path]:
    """A file: while it is there, the disk hangs."""
    place = tmp_path / "hangs"
    place.touch()
    yield place
    place.unlink(missing_ok=True)


def test_a_write_that_hangs_delays_nobody(start_daemon: StartDaemon, switch: Path) -> None:
    daemon = start_daemon(**planted(HANGING.format(method="write", path=str(switch))))
    with connected(daemon) as client:
        began_s = time.monotonic()
        its_exit = run(client, "big", counting(60 * MIB // 49152 * 49152))
        small = run(client, "small", counting(49152 * 20))
        assert time.monotonic() - began_s < 4.0 * SLACK  # not the 5 s after which it is given up
        assert its_exit["stdout"]["dropped_bytes"] > 0
        assert small["stdout"]["dropped_bytes"] == 0  # it waits in memory
        assert rss_bytes(daemon.pid) < 120 * MIB
        wait_for(lambda: spool_of(client, "small")[0] == "degraded", 8 * SLACK)
        assert spool_of(client, "small")[1] == "the disk does not answer"
        for exec_id in ("big", "small"):
            replay = Replay(client, exec_id).to_end()
            assert (replay.gaps, 0 < replay.got <= 256 * 1024) == (1, True)
        switch.unlink()
        run(client, "later", counting(SIZE))
        assert Replay(client, "later").to_end().lost == 0
        assert bytes_on_disk(client) > 0


def test_a_read_that_hangs_holds_its_reader_alone_and_not_for_good(
    start_daemon: StartDaemon, switch: Path
) -> None:
    daemon = start_daemon(**planted(HANGING.format(method="read", path=str(switch))))
    with connected(daemon) as client, connected(daemon) as other:
        run(client, "e", counting(SIZE))
        began_s = time.monotonic()
        replay = Replay(client, "e")
        waiting = threading.Thread(target=replay.to_end)
        waiting.start()
        for at in range(20):
            other.call("exec.start", exec_id=f"s{at}", argv=["echo", "quick"], attach={})
            other.note("exec.exited", f"s{at}")
        assert time.monotonic() - began_s < 4.0 * SLACK
        waiting.join(20)
        assert time.monotonic() - began_s > 4.0
        assert (replay.gaps, 0 < replay.got <= 256 * 1024) == (1, True)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["kept", "forgotten"])
def test_a_blocking_reader_that_stops_reading_does_not_hold_what_fits_the_spool(
    runnerd_daemon: RunnerdProcess, is_forgotten: bool
) -> None:
    """And everything is there once it goes on, whatever has become of the record."""
    with connected(runnerd_daemon) as client, connected(runnerd_daemon) as other:
        client.call("exec.start", exec_id="e", argv=counting(SIZE), attach={"window_bytes": 1000})
        assert other.call("exec.wait", exec_id="e", until="closed")["code"] == 0
        assert other.call("exec.inspect", exec_id="e")["flow"] == "block"
        if is_forgotten:
            other.call("exec.forget", exec_id="e")
            assert bytes_on_disk(other) > SIZE - MIB
        got, is_over = 0, False
        while not is_over:
            client.receive()
            for note in client.notes:
                is_over = is_over or note["method"] == "exec.exited"
                if note["method"] != "exec.output":
                    continue
                params = note["params"]
                assert params["data"] == expected(got, len(params["data"]))
                got += len(params["data"])
                client.send("exec.ack", subscription=params["subscription"], seq=params["seq"])
            client.notes.clear()
            client.answers.clear()
        assert got == SIZE
        if is_forgotten:
            wait_for(lambda: bytes_on_disk(other) == 0)


def test_a_blocking_reader_holds_the_command_once_the_spool_is_full(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--spool-bytes-max", str(16 * SLOT_BYTES))
    with connected(daemon) as client, connected(daemon) as other:
        client.call("exec.start", exec_id="e", argv=["yes"], attach={"window_bytes": 1})
        last: list[int] = []

        def is_held() -> bool:
            last.append(other.call("exec.inspect", exec_id="e")["last_seq"])
            time.sleep(0.2)
            return len(last) > 1 and last[-1] == last[-2] > 8

        wait_for(is_held)
        info = other.call("exec.inspect", exec_id="e")
        assert (info["first_seq"], info["spool"]) == (1, "on")
        other.call("exec.cancel", exec_id="e", grace_s=0)


def test_fifty_readers_cost_what_one_does(runnerd_daemon: RunnerdProcess) -> None:
    with connected(runnerd_daemon) as client:
        with connected(runnerd_daemon) as one:
            run(one, "e", counting(SIZE))
            Replay(one, "e").to_end()
        before = rss_bytes(runnerd_daemon.pid)
        replays = [Replay(client, "e") for _ in range(50)]
        by_number = {each.number: each for each in replays}
        most = 0
        while not all(each.exit for each in replays):
            client.receive(20)
            for note in client.notes:
                by_number[note["params"]["subscription"]].take(note["method"], note["params"])
                if note["method"] == "exec.exited":
                    most = max(most, rss_bytes(runnerd_daemon.pid))
            client.notes.clear()
        assert {(each.got, each.lost) for each in replays} == {(SIZE, 0)}
        assert most - before < 6 * MIB


def test_a_file_system_without_nameless_files_will_do(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        **planted("""
            import errno, os
            from runnerd.daemon import spool_file
            real = os.open
            def refuse(path, flags, *more, **words):
                if flags & os.O_TMPFILE == os.O_TMPFILE:
                    raise OSError(errno.EOPNOTSUPP, "Operation not supported")
                return real(path, flags, *more, **words)
            spool_file.os = type("Os", (), {**vars(os), "open": staticmethod(refuse)})
        """)
    )
    with connected(daemon) as client:
        run(client, "e", counting(SIZE))
        assert Replay(client, "e").to_end().lost == 0
        assert list(Path(client.call("daemon.info")["spool_directory"]).iterdir()) == []


SLOW_READS: Final = """
    import time
    from runnerd.daemon.spool_file import SpoolFile
    read, reads = SpoolFile.read, []
    def slowly(self, *what):
        reads.append(what)
        with open("{path}", "w") as file:
            file.write(str(len(reads)))
        time.sleep(0.3)
        return read(self, *what)
    SpoolFile.read = slowly
"""


def test_a_block_is_read_once_however_often_its_reader_is_woken(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """A lone reader behind memory, woken by all that is written while it waits for the disk."""
    reads = tmp_path / "reads"
    daemon = start_daemon(**planted(SLOW_READS.format(path=reads)))
    script = "head -c 3000000 /dev/zero; for i in $(seq 200); do echo; sleep 0.005; done"
    with connected(daemon) as client:
        client.call("exec.start", exec_id="e", argv=["sh", "-c", script])
        wait_for(lambda: client.call("exec.inspect", exec_id="e")["output_bytes"] > 3_000_000)
        client.call("exec.attach", exec_id="e")
        its_exit = client.note("exec.exited", "e", 30)["exit"]
        assert its_exit["stdout"]["total_bytes"] == 3_000_200
    # About a dozen blocks of 256 KiB; at 200 wake-ups a second it was a hundred reads.
    assert 5 <= int(reads.read_text()) <= 30


def test_a_stop_waits_for_a_block_on_its_way(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(**planted(SLOW_READS.format(path=tmp_path / "reads")))
    with connected(daemon) as client:
        run(client, "e", counting(20 * 49152))  # a few blocks, so that the stop has the time
        replay = Replay(client, "e")
        wait_for((tmp_path / "reads").exists)
        daemon.process.terminate()
        assert replay.to_end(10).exit["code"] == 0
    assert daemon.process.wait(10) == 0
