"""run(input=…) ends, whatever becomes of its input, also where the command says nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from runnerd.client import asynchronous, blocking
from runnerd.client.errors import RemoteError
from runnerd.protocol.answers import WriteAnswer
from runnerd.protocol.errors import RequestError
from runnerd.protocol.requests import ExecWrite
from tests.unit.fake_daemon import FakeDaemon, Peer, make_exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runnerd.client.requesting import Completed
    from runnerd.protocol.fields import Params

    Run = Callable[[str, bytes], Completed]

Id = int | str | None

PIECES = 3 * 256 * 1024


@pytest.fixture(params=["blocking", "asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a command with input over a connection of its own, within half a minute."""

    def with_blocking(path: str, data: bytes) -> Completed:
        with blocking.connect(path) as client:
            return client.run(["x"], input=data, timeout_s=30)

    def with_async(path: str, data: bytes) -> Completed:
        async def main() -> Completed:
            with anyio.fail_after(30):
                async with asynchronous.connect(path) as client:
                    return await client.run(["x"], input=data)

        return anyio.run(main, backend=request.param)

    return with_blocking if request.param == "blocking" else with_async


def start(peer: Peer, request_id: Id, params: Params) -> None:
    peer.started(request_id)


def test_input_that_is_refused_half_way_is_said_though_the_command_says_nothing(
    tmp_path: Path, run: Run
) -> None:
    def write(peer: Peer, request_id: Id, params: Params) -> None:
        assert isinstance(params, ExecWrite)
        if params.offset:
            peer.fail(request_id, RequestError("fenced", "another owner"))
        else:
            peer.answer(request_id, WriteAnswer(accepted_bytes=len(params.data), room_bytes=0))

    def cancel(peer: Peer, request_id: Id, params: Params) -> None:
        peer.fail(request_id, RequestError("fenced", "another owner"))

    script = {"exec.start": start, "exec.write": write, "exec.cancel": cancel}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        with pytest.raises(RemoteError) as caught:
            run(daemon.path, bytes(PIECES))
        assert caught.value.kind == "fenced"
        methods = [method for method, _ in daemon.asked]
    assert "exec.cancel" in methods
    assert "exec.detach" in methods


class BusyStdin:
    """Takes writes, but for the first three: those are to be repeated 0.05 s later."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self.retried_after_s: list[float] = []
        self._refused_at_s: list[float] = []

    def write(self, peer: Peer, request_id: Id, params: Params) -> None:
        assert isinstance(params, ExecWrite)
        if len(self._refused_at_s) > len(self.retried_after_s):
            self.retried_after_s.append(time.monotonic() - self._refused_at_s[-1])
        if len(self._refused_at_s) < 3:
            self._refused_at_s.append(time.monotonic())
            peer.fail(request_id, RequestError("busy", "full", retry_after_s=0.05))
            return
        assert params.offset == len(self.taken)
        self.taken.extend(params.data)
        peer.answer(request_id, WriteAnswer(accepted_bytes=len(self.taken), room_bytes=0))
        if params.eof:
            peer.exited(1, make_exit())

    def check(self, data: bytes) -> None:
        assert self.taken == data
        assert len(self.retried_after_s) == 3
        assert min(self.retried_after_s) >= 0.05


def test_a_daemon_that_is_busy_is_asked_again_when_it_said(tmp_path: Path, run: Run) -> None:
    stdin = BusyStdin()
    data = bytes(range(256)) * (PIECES // 256)
    with FakeDaemon(tmp_path / "s", {"exec.start": start, "exec.write": stdin.write}) as daemon:
        assert run(daemon.path, data).exit.code == 0
    stdin.check(data)


def test_runnerctl_run_asks_a_busy_daemon_again_too(tmp_path: Path) -> None:
    stdin = BusyStdin()
    data = b"typed\n" * 1000
    with FakeDaemon(tmp_path / "s", {"exec.start": start, "exec.write": stdin.write}) as daemon:
        runnerctl = [sys.executable, "-m", "runnerd.ctl.main", "--socket", daemon.path]
        words = [*runnerctl, "run", "-i", "x"]
        done = subprocess.run(words, input=data, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    stdin.check(data)
