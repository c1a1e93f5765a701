"""Who waits is told, whatever happens to who waits beside: at the end, over days, at a loss."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from runnerd.client import asynchronous
from runnerd.client.async_link import Bells
from runnerd.client.blocking import connect
from runnerd.client.errors import Ambiguous, ClientError, ClientTimeout, StreamLost
from runnerd.client.link import Link
from runnerd.client.session import Failure
from runnerd.protocol.answers import Empty, WriteAnswer
from runnerd.protocol.daemon_requests import Ping
from runnerd.protocol.events import EventNote, EventsAnswer
from runnerd.protocol.requests import ExecSignal, ExecWrite
from tests.unit.fake_daemon import FakeDaemon, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from runnerd.client.async_watches import AsyncWatch
    from runnerd.protocol.fields import Params

Id = int | str | None


def subscribed(peer: Peer, request_id: Id, params: Params) -> None:
    answer = EventsAnswer(
        subscription=1, number=10, at=5.0, state="serving", pressure=None, pressure_source=None
    )
    peer.answer(request_id, answer)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("leaves", ["served", "in time"])
def test_the_end_reaches_who_still_waits_after_another_left(
    tmp_path: Path, backend: str, leaves: str
) -> None:
    told: list[str] = []
    has_left = Bells()

    async def wait(watch: AsyncWatch, timeout_s: float | None = None) -> None:
        try:
            told.append((await watch.next(timeout_s)).kind)
        except (StreamLost, ClientTimeout) as error:
            told.append(type(error).__name__)
        has_left.ring()

    async def main(daemon: FakeDaemon) -> None:
        with anyio.fail_after(30):
            async with (
                asynchronous.connect(daemon.path, reconnect_s=0) as runner,
                anyio.create_task_group() as tasks,
            ):
                watch = await runner.events()
                tasks.start_soon(wait, watch)
                tasks.start_soon(wait, watch, 0.01 if leaves == "in time" else None)
                await anyio.wait_all_tasks_blocked()
                (peer,) = daemon.peers
                if leaves == "served":
                    note = EventNote(subscription=1, number=11, at=1.0, kind="draining")
                    peer.note("event", note)
                await has_left.wait(lambda: told)
                peer.hang_up()

    with FakeDaemon(tmp_path / "s", {"events.subscribe": subscribed}) as daemon:
        anyio.run(main, daemon, backend=backend)
    assert told == ["draining" if leaves == "served" else "ClientTimeout", "StreamLost"]


@pytest.mark.parametrize("timeout_s", [1e7, 1e9, float("inf")])
def test_a_wait_may_be_longer_than_one_poll(
    tmp_path: Path, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting = threading.Event()
    wait = Link._wait

    def seen(link: Link, wait_s: float | None) -> None:
        is_waiting.set()
        wait(link, wait_s)

    def answer(peer: Peer, request_id: Id, params: Params) -> None:
        assert is_waiting.wait(10)
        peer.answer(request_id, Empty())

    with FakeDaemon(tmp_path / "s", {"ping": answer}) as daemon, connect(daemon.path) as client:
        monkeypatch.setattr(Link, "_wait", seen)
        client.call("ping", Ping(), timeout_s=timeout_s)


def test_an_on_lost_that_raises_keeps_no_answer_back(tmp_path: Path) -> None:
    def hang_up(peer: Peer, request_id: Id, params: Params) -> None:
        peer.hang_up()

    def lost(_lost: StreamLost) -> None:
        raise KeyError("the caller's own")

    with (
        FakeDaemon(tmp_path / "s", {"exec.signal": hang_up}) as daemon,
        connect(daemon.path, on_lost=lost) as client,
    ):
        sent = client.send("exec.signal", ExecSignal(exec_id="x", signal=15))
        with pytest.raises(KeyError, match="own"):
            client.receive_events(timeout_s=30)
        (failure,) = client.receive_events(timeout_s=0)
        assert isinstance(failure, Failure)
        assert failure.request_id == sent
        assert isinstance(failure.error, Ambiguous)


def test_an_interrupted_write_is_the_last_of_its_handle(tmp_path: Path) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    taken = bytearray()

    def write(peer: Peer, request_id: Id, params: Params) -> None:
        # The first is taken, and its answer comes after whoever waited for it was interrupted.
        assert isinstance(params, ExecWrite)
        assert params.offset is not None
        is_first = not taken
        taken[params.offset :] = taken[params.offset :] or params.data
        if is_first:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        else:
            peer.answer(request_id, WriteAnswer(accepted_bytes=len(taken), room_bytes=1))

    before = signal.signal(signal.SIGUSR1, interrupt)
    script = {"exec.start": lambda peer, number, _: peer.started(number), "exec.write": write}
    try:
        with FakeDaemon(tmp_path / "s", script) as daemon, connect(daemon.path) as client:
            handle = client.start(["x"], stdin="pipe")
            with pytest.raises(KeyboardInterrupt):
                handle.write(b"hello\n")
            with pytest.raises(ClientError, match="broken off half-way"):
                handle.write(b"quit\n")
            assert taken == b"hello\n"
    finally:
        signal.signal(signal.SIGUSR1, before)
