"""A daemon killed at any moment: the next one tells the truth, and nothing runs twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.daemon.looking import planted
from tests.harness import RunnerdProcess, is_alive, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

ROUNDS: Final = 100
STARTS: Final = 12  # a round, over two connections
SEED: Final = 20261129
RUN_S: Final = 0.06
# A start that waited too long for the journal runs without it, and says so. On a busy machine that
# would happen here as well; what is tested is what the journal promises.
PATIENT: Final = "from runnerd.daemon import starting; starting.JOURNAL_WAIT_S = 60"


class Sent:
    """One start, and what was seen of it.

    Attributes:
        code: What its command exits with.
        seen: The exit as the daemon that ran it told it, or None.
    """

    def __init__(self, name: str, folder: Path, code: int, *, lasts: bool, horizon: int) -> None:
        self.code = code
        self.marker = folder / name
        self.seen: dict[str, Any] | None = None
        script = 'echo x >> "$0"; ' + ("sleep 900; " if lasts else "") + 'exit "$1"'
        self.params: dict[str, Any] = {
            "exec_id": name,
            "nonce": f"n-{name}",
            "horizon": horizon,
            "argv": ["sh", "-c", script, str(self.marker), str(code)],
        }

    def runs(self) -> int:
        """How often its command ran."""
        with contextlib.suppress(FileNotFoundError):
            return len(self.marker.read_text().splitlines())
        return 0


def send_until_killed(path: str, starts: list[Sent]) -> None:
    """Send all of them at once, and take what comes until the connection ends."""
    with contextlib.suppress(ClosedError, OSError), RawClient(path) as client:
        waits: dict[int, Sent] = {}
        for each in starts:
            client.send("exec.start", **each.params)
            waits[client.send("exec.wait", exec_id=each.params["exec_id"])] = each
        while True:
            client.receive()
            for request_id, each in waits.items():
                answer = client.answers.get(request_id, {})
                each.seen = answer.get("result", each.seen)


def ask(client: RawClient, method: str, **params: object) -> tuple[str, dict[str, Any]]:
    """Return the kind of an error, or `ok`, and the answer."""
    try:
        return "ok", client.call(method, **params)
    except RawError as error:
        return error.kind, {}


def check(client: RawClient, each: Sent) -> str:
    """What the next daemon says of it, which must be so; returns that in one word."""
    kind, its_exit = ask(client, "exec.wait", exec_id=each.params["exec_id"])
    if kind == "exec_lost":
        return kind
    if kind == "exec_unknown":
        assert not each.runs(), "it ran, and nobody knows of it"
        assert each.seen is None
        return kind
    assert kind == "ok"
    assert (its_exit["code"], its_exit["reason"]) == (each.code, "exited")
    assert each.seen in (None, its_exit)
    assert each.runs() == 1
    return "exited"


def send_again(client: RawClient, each: Sent, known: str) -> None:
    """Send the same start to the next daemon: it runs there only if nothing is known of it."""
    kind, answer = ask(client, "exec.start", **each.params)
    if known == "exec_lost":
        assert kind == "exec_lost"
        return
    assert (kind, answer["created"]) == ("ok", known == "exec_unknown")
    if not answer["created"]:
        return
    if "sleep 900" in each.params["argv"][2]:
        wait_for(each.runs)
        client.call("exec.cancel", exec_id=each.params["exec_id"], grace_s=0)
    else:
        client.call("exec.wait", exec_id=each.params["exec_id"], until="closed")


@pytest.mark.slow
def test_killed_at_a_hundred_moments_it_is_truthful_and_runs_nothing_twice(
    start_daemon: Start, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    place, folder = tmp_path / "place", tmp_path / "markers"
    place.mkdir()
    folder.mkdir()
    found: dict[str, int] = {}
    daemon = start_daemon(place=place, **planted(PATIENT))
    horizon = 0
    for at in range(ROUNDS):
        sent = [
            Sent(
                f"r{at}-{n}",
                folder,
                chance.randrange(256),
                lasts=chance.random() < 0.2,
                horizon=horizon,
            )
            for n in range(STARTS)
        ]
        threads = [
            threading.Thread(target=send_until_killed, args=(daemon.socket_path, half))
            for half in (sent[::2], sent[1::2])
        ]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * RUN_S)  # the moment is what is tested
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait(10)
        for thread in threads:
            thread.join(10)
        daemon = start_daemon(place=place, **planted(PATIENT))
        with RawClient(daemon.socket_path) as client:
            assert client.hello["journal"]
            for each in sent:
                known = check(client, each)
                found[known] = found.get(known, 0) + 1
                send_again(client, each, known)
            for each in sent:
                assert each.runs() <= 1, each.params
            horizon = client.call("daemon.info")["starts"]
    print(f"\nafter {ROUNDS} kills: {found}")
    # Every moment was met: before a start was written, while it ran, and after its exit.
    assert min(found[each] for each in ("exec_unknown", "exec_lost", "exited")) >= ROUNDS // 5


def test_what_a_killed_daemon_ran_ends_with_it(start_daemon: Start, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    daemon = start_daemon(place=place)
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=["sleep", "900"])["pid"]
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait(10)
    wait_for(lambda: not is_alive(pid))
    with RawClient(start_daemon(place=place).socket_path) as client:
        assert client.call("exec.list")["execs"][0]["transcript"] == "lost"
