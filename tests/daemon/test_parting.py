"""What a client asked for before it closed its connection goes on, whatever met the closed end."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.harness import is_alive, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


def known(witness: RawClient) -> set[str]:
    return {each["exec_id"] for each in witness.call("exec.list")["execs"]}


def test_a_request_is_taken_though_an_answer_before_it_meets_the_closed_socket(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The daemon finds both at once: an exit to tell a client that is gone, and its last word."""
    with RawClient(runnerd_daemon.socket_path) as witness:
        for at in range(10):
            ask_and_part(runnerd_daemon, f"last-{at}")
            wait_for(lambda: f"last-{at}" in known(witness))  # noqa: B023  # waited for at once


def ask_and_part(daemon: RunnerdProcess, exec_id: str) -> None:
    with RawClient(daemon.socket_path) as client:
        begun = client.call("exec.start", argv=["cat"], stdin="pipe")
        client.send("exec.wait", exec_id=begun["exec_id"])
        client.call("ping")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            os.kill(begun["pid"], signal.SIGKILL)
            wait_for(lambda: not is_alive(begun["pid"]))
            client.send("exec.start", exec_id=exec_id, argv=["true"])
            client.sock.close()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
