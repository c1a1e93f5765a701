"""What a lost connection means for a client: nothing, or exactly what is said. Real daemon."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from runnerd.client import asynchronous
from runnerd.client.blocking import WINDOW_BYTES, connect
from runnerd.client.errors import Ambiguous, DaemonRestarted, StreamLost
from runnerd.client.pending import QUEUE_BYTES_MAX
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import ExecSignal
from tests.harness import REPOSITORY, is_alive, wait_for
from tests.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.harness import RunnerdProcess


@pytest.fixture
def proxy(tmp_path: Path, runnerd_daemon: RunnerdProcess) -> Iterator[Proxy]:
    with Proxy(tmp_path / "proxy.sock", runnerd_daemon.socket_path) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnerd.client.repeating.BACKOFF_FIRST_S", 0.02)


NUMBERS = b"".join(b"%d\n" % n for n in range(1, 200_001))


@pytest.mark.parametrize("window_bytes", [WINDOW_BYTES, 2 * QUEUE_BYTES_MAX])
def test_output_goes_on_where_it_stopped(proxy: Proxy, tmp_path: Path, window_bytes: int) -> None:
    """Cut three times, each time once the client has noticed the one before."""
    lost: list[StreamLost] = []
    go = tmp_path / "go"
    script = f"seq 200000; while [ ! -e {go} ]; do sleep 0.02; done"

    def on_lost(error: StreamLost) -> None:
        lost.append(error)
        if len(lost) == 3:
            go.touch()  # an exit may be in what was read before the last cut, and is no loss then

    with connect(proxy.path, on_lost=on_lost) as client:
        handle = client.start(["sh", "-c", script], window_bytes=window_bytes)
        taken = bytearray()
        cut_at = [100_000, 500_000, 900_000]
        for note in handle.output(30):
            assert isinstance(note, OutputNote)
            taken += note.data
            if cut_at and len(taken) > cut_at[0] and len(lost) == 3 - len(cut_at):
                proxy.cut()
                del cut_at[0]
        assert taken == NUMBERS
        assert handle.exit is not None
        assert handle.exit.code == 0
        assert handle.gap_bytes == 0
    assert len(lost) == 3
    assert lost[0].exec_ids == (handle.exec_id,)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_output_goes_on_in_the_async_client(proxy: Proxy, backend: str) -> None:
    async def main() -> None:
        async with asynchronous.connect(proxy.path) as runner:
            handle = await runner.start(["seq", "200000"])
            taken = bytearray()
            cut_at = [100_000, 500_000, 900_000]
            async for note in handle.output(30):
                assert isinstance(note, OutputNote)
                taken += note.data
                if cut_at and len(taken) > cut_at[0]:
                    proxy.cut()
                    del cut_at[0]
            assert taken == NUMBERS
            assert handle.exit is not None

    anyio.run(main, backend=backend)
    assert proxy.connections >= 3


def test_a_start_whose_answer_is_lost_runs_once_and_is_ours(proxy: Proxy, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with connect(proxy.path) as client:
        proxy.swallows_answers = True

        def cut() -> None:
            wait_for(marker.exists)
            proxy.swallows_answers = False
            proxy.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        with client.start(["sh", "-c", f"echo ran >> {marker}; sleep 60"]) as handle:
            thread.join()
            assert handle.created
            assert handle.pid is not None
            assert is_alive(handle.pid)
        assert handle.exit is not None
        assert handle.exit.reason == "cancelled"
        assert len(client.list_execs()) == 1
    assert marker.read_text() == "ran\n"


def test_a_signal_that_may_have_arrived_is_not_sent_twice(proxy: Proxy) -> None:
    with connect(proxy.path) as client:
        script = "n=0; trap 'n=$((n+1)); echo $n' USR1; echo up; while :; do sleep 0.05; done"
        with client.start(["sh", "-c", script]) as handle:
            output = handle.output(20)
            next(output)
            proxy.swallows_answers = True
            request_id = client.send(
                "exec.signal", ExecSignal(exec_id=handle.exec_id, signal="USR1")
            )
            with connect(proxy._target) as other:
                wait_for(lambda: other.inspect(handle.exec_id).last_seq == 2)
            proxy.swallows_answers = False
            proxy.cut()
            (event,) = client.receive_events(20)
            assert event.request_id == request_id  # type: ignore[union-attr]
            assert isinstance(event.error, Ambiguous)  # type: ignore[union-attr]
            with pytest.raises(Ambiguous):
                raise event.error  # type: ignore[union-attr]
            note = next(output)
            assert isinstance(note, OutputNote)
            assert note.data == b"1\n"
            client.ping()
            assert client.inspect(handle.exec_id).last_seq == 2


def test_stdin_is_taken_once_over_many_cuts(proxy: Proxy) -> None:
    data = bytes(range(256)) * 20_000
    with connect(proxy.path) as client, client.start(["cat"], stdin="pipe") as handle:
        taken = bytearray()
        output = handle.output(30)
        step = 512_000
        for at in range(0, len(data), step):
            handle.write(data[at : at + step])
            proxy.cut()
            while len(taken) < at + step:
                note = next(output)
                assert isinstance(note, OutputNote)
                taken += note.data
        handle.close_stdin()
        assert list(output) == []
        assert taken == data


def test_a_wait_goes_on(proxy: Proxy, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with connect(proxy.path) as client:
        script = f"while [ ! -e {go} ]; do sleep 0.02; done; exit 4"
        handle = client.start(["sh", "-c", script], attach=False)
        proxy.cut()
        go.touch()
        assert handle.wait(20).code == 4


def test_another_incarnation_is_told_and_can_be_looked_at_afresh(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    first = start_daemon(place=place)
    with connect(first.socket_path) as client:
        handle = client.start(["sleep", "60"])
        incarnation = client.hello.incarnation
        first.kill()
        start_daemon(place=place)
        with pytest.raises(DaemonRestarted) as caught:
            list(handle.output(30))
        assert caught.value.exec_ids == (handle.exec_id,)
        assert caught.value.incarnation == incarnation
        assert handle.exit is None
        with pytest.raises(DaemonRestarted):
            client.ping()
    with connect(first.socket_path) as client:
        assert client.run(["echo", "x"]).stdout == b"x\n"


def test_patience_ends(proxy: Proxy) -> None:
    with connect(proxy.path, reconnect_s=0.3) as client:
        handle = client.start(["sleep", "60"])
        proxy.close()
        began_s = time.monotonic()
        with pytest.raises(StreamLost, match="without the exit"):
            list(handle.output())
        assert 0.25 < time.monotonic() - began_s < 5
        assert not client.is_open


def test_a_clients_own_patience_is_kept_while_it_reconnects(proxy: Proxy) -> None:
    with connect(proxy.path) as client:
        proxy.close()
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            client.wait("x", timeout_s=0.2)
        assert time.monotonic() - began_s < 4


def start_ctl(proxy: Proxy, daemon: RunnerdProcess, *words: str) -> subprocess.Popen[bytes]:
    line = [proxy.path if word == daemon.socket_path else word for word in daemon.ctl_words(*words)]
    return subprocess.Popen(
        line,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )


def read(process: subprocess.Popen[bytes], count_bytes: int) -> bytes:
    assert process.stdout is not None
    found = b""
    while len(found) < count_bytes:
        piece = process.stdout.read(count_bytes - len(found))
        assert piece
        found += piece
    return found


def test_runnerctl_run_survives_and_says_so(
    proxy: Proxy, runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f"seq 1 100000; while [ ! -e {go} ]; do sleep 0.02; done; seq 100001 200000; exit 3"
    process = start_ctl(proxy, runnerd_daemon, "run", "--", "sh", "-c", script)
    begin = read(process, 100_000)
    proxy.cut()
    go.touch()
    out, err = process.communicate(timeout=60)
    assert begin + out == NUMBERS
    assert process.returncode == 3
    assert err == b"runnerctl: connection lost; reconnecting\n"


def test_runnerctl_attach_survives(
    proxy: Proxy, runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f"seq 1 10; while [ ! -e {go} ]; do sleep 0.02; done; seq 11 20; kill -9 $$"
    exec_id = runnerd_daemon.ctl("run", "-d", "--", "sh", "-c", script).stdout.decode().strip()
    process = start_ctl(proxy, runnerd_daemon, "attach", exec_id)
    begin = read(process, 4)
    proxy.cut()
    go.touch()
    out, err = process.communicate(timeout=60)
    assert (begin + out).split() == [b"%d" % n for n in range(1, 21)]
    assert process.returncode == 137
    assert err.startswith(b"runnerctl: connection lost; reconnecting\n")


def test_runnerctl_logs_f_survives(
    proxy: Proxy, runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Each record once, over a cut in the middle of what is kept and one in what follows."""
    go, more = tmp_path / "go", tmp_path / "more"
    script = (
        f"seq 1 100000; while [ ! -e {go} ]; do sleep 0.02; done; seq 100001 150000; echo e >&2;"
        f" while [ ! -e {more} ]; do sleep 0.02; done; seq 150001 200000; exit 3"
    )
    exec_id = runnerd_daemon.ctl("run", "-d", "--", "sh", "-c", script).stdout.decode().strip()
    process = start_ctl(proxy, runnerd_daemon, "logs", "-f", exec_id)
    found = read(process, 100_000)
    proxy.cut()
    go.touch()
    found += read(process, NUMBERS.index(b"\n140000\n") - len(found))
    proxy.cut()
    more.touch()
    out, err = process.communicate(timeout=60)
    assert found + out == NUMBERS
    assert process.returncode == 0
    lines = err.splitlines()
    assert lines.count(b"e") == 1
    assert lines.count(b"runnerctl: connection lost; reconnecting") == len(lines) - 1 == 2


@pytest.mark.parametrize("backend", ["blocking", "asyncio", "trio"])
def test_a_connection_that_falls_silent_is_given_up_and_resumed(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Nothing says so, neither a hang-up nor an error: only that heartbeats do not come."""
    monkeypatch.setattr("runnerd.client.wire.SILENCE_S", 1.0)
    go = tmp_path / "go"
    script = f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; echo two"

    def fall_silent() -> None:
        proxy.freeze()
        go.touch()

    async def main() -> bytes:
        async with asynchronous.connect(proxy.path) as runner:
            taken = b""
            async for note in (await runner.start(["sh", "-c", script])).output(30):
                assert isinstance(note, OutputNote)
                taken += note.data
                fall_silent()
            return taken

    if backend == "blocking":
        with connect(proxy.path) as client:
            taken = b""
            for note in client.start(["sh", "-c", script]).output(30):
                assert isinstance(note, OutputNote)
                taken += note.data
                fall_silent()
    else:
        taken = anyio.run(main, backend=backend)
    assert taken == b"one\ntwo\n"
    assert proxy.connections > 1
