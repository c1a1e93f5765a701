"""An OOM kill is told to who watches, before the exit of the command that met it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.containers.test_memory import eat, inside, memory_group
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness import RunnerdProcess

    Start = Callable[..., RunnerdProcess]
    MakeGroup = Callable[[str, dict[str, str]], Path]


def test_an_oom_kill_is_told_before_the_exit_it_caused(
    start_daemon: Start, make_group: MakeGroup
) -> None:
    daemon = start_daemon("--oom-score", "keep", prepare=inside(memory_group(make_group), 500))
    with RawClient(daemon.socket_path) as client:
        client.call("events.subscribe")
        for exec_id in ("e0", "e1"):
            eat(client, exec_id)
            client.call("exec.wait", exec_id=exec_id, until="closed", timeout_s=60)
        client.call("ping")
        told = [each["params"] for each in client.notes if each["method"] == "event"]
        kinds = ["exec_started", "oom_kill", "exec_exited", "exec_closed"]
        assert [each["kind"] for each in told if each["kind"] in kinds] == kinds * 2
        assert [each["kills"] for each in told if each["kind"] == "oom_kill"] == [1, 1]
        exits = [each for each in told if each["kind"] == "exec_exited"]
        assert [(each["signal"], each["oom"]) for each in exits] == [(9, "killed")] * 2
    assert daemon.stop() == 0
