"""A start that is cancelled is undone before the async client closes its connection."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from runnerd.client.asynchronous import connect
from runnerd.protocol.answers import CancelAnswer
from tests.unit.fake_daemon import FakeDaemon, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from runnerd.protocol.fields import Params

Id = int | str | None


def ignore(peer: Peer, request_id: Id, params: Params) -> None:
    """Never answer."""


async def start_and_give_up(path: str) -> None:
    with anyio.fail_after(20):
        async with connect(path) as runner:
            with anyio.move_on_after(0.05):
                await runner.start(["x"])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_connection_is_kept_until_the_undoing_was_answered(
    tmp_path: Path, backend: str
) -> None:
    is_over = threading.Event()
    was_over: list[bool] = []

    def cancel(peer: Peer, request_id: Id, params: Params) -> None:
        was_over.append(is_over.wait(0.2))
        peer.answer(request_id, CancelAnswer(outcome="ending"))

    script = {"exec.start": ignore, "exec.cancel": cancel}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        anyio.run(start_and_give_up, daemon.path, backend=backend)
        is_over.set()
    assert was_over == [False]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_daemon_that_does_not_answer_holds_nobody_for_ever(tmp_path: Path, backend: str) -> None:
    script = {"exec.start": ignore, "exec.cancel": ignore}
    with FakeDaemon(tmp_path / "s", script) as daemon:
        anyio.run(start_and_give_up, daemon.path, backend=backend)
