"""Both clients by a command instead of a path: the same calls, losses and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import pytest

from runnerd.client import asynchronous
from runnerd.client.blocking import Client, connect_command
from runnerd.client.errors import ConnectFailed, DaemonRestarted, StreamLost
from runnerd.protocol.notes import OutputNote
from runnerd.protocol.requests import ExecCancel
from tests.cases.field import mark, marked
from tests.harness import RunnerdProcess, children, is_alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS: Final = ["blocking", "asyncio", "trio"]
NUMBERS: Final = b"".join(b"%d\n" % n for n in range(1, 600_001))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnerd.client.repeating.BACKOFF_FIRST_S", 0.02)
    # The command is runnerctl, from this checkout.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = children() | set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    yield
    assert children() | set(map(int, os.listdir("/proc/self/fd"))) <= before  # noqa: PTH208


def the_bridge(daemon: RunnerdProcess) -> int:
    """Find the one bridge to it that runs."""
    marks = (b"bridge", daemon.socket_path.encode())
    found: list[int] = wait_for(
        lambda: [
            pid for pid in children() - {daemon.pid} if all(mark in _cmdline(pid) for mark in marks)
        ]
    )
    assert len(found) == 1
    return found[0]


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def words(daemon: RunnerdProcess) -> list[str]:
    return daemon.ctl_words("bridge")


def kill_bridge(daemon: RunnerdProcess) -> None:
    os.kill(the_bridge(daemon), signal.SIGKILL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_bridge_is_a_lost_connection(runnerd_daemon: RunnerdProcess, backend: str) -> None:
    """Killed three times in a stream: it goes on where it stopped."""
    lost: list[StreamLost] = []
    taken = bytearray()
    kill_at = [100_000, 800_000, 1_500_000]  # of 4 MB, so that much is still to come

    def take(note: object) -> None:
        assert isinstance(note, OutputNote)
        taken.extend(note.data)
        if kill_at and len(taken) > kill_at[0]:
            kill_bridge(runnerd_daemon)
            del kill_at[0]

    async def main() -> None:
        async with (
            asynchronous.connect_command(words(runnerd_daemon), on_lost=lost.append) as client,
            await client.start(["seq", "600000"]) as handle,
        ):
            async for note in handle.output(30):
                take(note)
            assert handle.exit is not None
            assert handle.exit.code == 0

    if backend == "blocking":
        with connect_command(words(runnerd_daemon), on_lost=lost.append) as client:
            handle = client.start(["seq", "600000"])
            for note in handle.output(30):
                take(note)
            assert handle.exit is not None
            assert handle.exit.code == 0
    else:
        anyio.run(main, backend=backend)
    assert taken == NUMBERS
    assert len(lost) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_is_gone_after_close(runnerd_daemon: RunnerdProcess, backend: str) -> None:
    """The bridge too, and not by a kill; what was asked for last arrives all the same."""
    with runnerd_daemon.connect() as looking:
        handle = looking.start(["sleep", "900"], attach=False)
        cancel = ExecCancel(exec_id=handle.exec_id, grace_s=0, wait=False)
        pids: list[int] = []

        async def main() -> None:
            async with asynchronous.connect_command(words(runnerd_daemon)) as client:
                pids.append(the_bridge(runnerd_daemon))
                client._router.request("exec.cancel", cancel)

        if backend == "blocking":
            with connect_command(words(runnerd_daemon)) as client:
                pids.append(the_bridge(runnerd_daemon))
                client.send("exec.cancel", cancel)
        else:
            anyio.run(main, backend=backend)
        assert not is_alive(pids[0])
        assert looking.wait(handle.exec_id, timeout_s=10).reason == "cancelled"
        wait_for(lambda: looking.info().connections == 1)


def connects(backend: str, command: list[str]) -> Callable[[], None]:
    """Return what connects, and raises what comes of it."""

    async def main() -> None:
        async with asynchronous.connect_command(command, timeout_s=20):
            pass

    def blocking() -> None:
        connect_command(command, timeout_s=20).close()

    return blocking if backend == "blocking" else partial(anyio.run, main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bridge_without_a_daemon_fails_at_once_with_its_words(
    tmp_path: Path, backend: str
) -> None:
    start = "from runnerd.ctl.main import script; script()"
    path = str(tmp_path / "none.sock")
    command = [sys.executable, "-c", start, "--socket", path, "bridge"]
    began_s = time.monotonic()
    with pytest.raises(ConnectFailed) as caught:
        connects(backend, command)()
    assert time.monotonic() - began_s < 10
    assert f"no runnerd socket at '{path}'" in caught.value.message
    assert caught.value.preserved == "nothing was sent"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/nothing/here"], "cannot run '/nothing/here': no such file or directory"),
        (["sh", "-c", "echo No such container: x >&2; exit 1"], "No such container: x"),
        (["true"], "'true' ended without reaching a daemon: no word"),
        (["sh", "-c", "yes >&2 & sleep 0.1; kill $!"], "ended without reaching a daemon: y"),
        ([], "cannot run '': no program is named"),
        (["a\0b"], r"cannot run 'a\x00b': embedded null byte"),
        (["echo", "\ud800"], "cannot run 'echo': 'utf-8' codec can't encode"),
    ],
)
def test_a_command_that_does_not_connect(command: list[str], text: str, backend: str) -> None:
    with pytest.raises(ConnectFailed) as caught:
        connects(backend, command)()
    assert text in caught.value.message


def test_a_command_that_goes_on_talking_to_nobody_does_not_block(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """A bridge whose wrapper fills standard error for ever; and what is left of it is ended."""
    word = mark()
    line = ["sh", "-c", f'yes {word} >&2 & exec "$@"', "sh", *words(runnerd_daemon)]
    with connect_command(line) as client:
        for _ in range(20):
            assert client.run(["echo", "x"]).stdout == b"x\n"
    wait_for(lambda: not marked(word))


def test_a_command_that_does_not_end_is_killed() -> None:
    word = mark()
    with pytest.raises(TimeoutError):
        connect_command(["sh", "-c", "trap '' TERM HUP; sleep 900; :", word], timeout_s=0.2)
    assert not marked(word)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_incarnation_is_told(
    start_daemon: Callable[..., RunnerdProcess], tmp_path: Path, backend: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    first = start_daemon(place=place)

    async def main() -> None:
        async with asynchronous.connect_command(words(first)) as client:
            await client.ping()
            first.kill()
            start_daemon(place=place)
            with pytest.raises(DaemonRestarted):
                await client.wait("x", timeout_s=30)

    if backend == "blocking":
        with connect_command(words(first)) as client:
            client.ping()
            first.kill()
            start_daemon(place=place)
            with pytest.raises(DaemonRestarted):
                client.wait("x", timeout_s=30)
    else:
        anyio.run(main, backend=backend)


def test_patience_ends_with_the_commands_words(runnerd_daemon: RunnerdProcess) -> None:
    with connect_command(words(runnerd_daemon), reconnect_s=2.0) as client:
        handle = client.start(["sleep", "900"])
        runnerd_daemon.kill()
        with pytest.raises(StreamLost) as caught:
            list(handle.output(30))
        assert runnerd_daemon.socket_path in caught.value.hint
        assert not client.is_open


def test_ctrl_c_does_not_reach_it(runnerd_daemon: RunnerdProcess) -> None:
    with connect_command(words(runnerd_daemon)) as client:
        bridge = the_bridge(runnerd_daemon)
        assert os.getsid(bridge) == bridge
        assert os.getpgid(bridge) == bridge
        assert isinstance(client, Client)


def test_big_transfers_through_it(runnerd_daemon: RunnerdProcess) -> None:
    data = os.urandom(16 << 20)
    with connect_command(words(runnerd_daemon)) as client:
        done = client.run(["cat"], input=data, timeout_s=60)
    assert done.stdout == data
