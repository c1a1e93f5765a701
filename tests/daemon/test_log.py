"""What the daemon logs: floods held back and told, text on a terminal, who asked it to stop."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.daemon.looking import log_lines, planted
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]


def wrong_hellos(daemon: RunnerdProcess, count: int) -> None:
    for _ in range(count):
        with RawClient(daemon.socket_path, hello=False) as client, pytest.raises(RawError):
            client.call("hello", protocol=[1], token="wrong")


@pytest.fixture
def asks_for_a_token(start_daemon: Start, tmp_path: Path) -> RunnerdProcess:
    secret = tmp_path / "token"
    secret.write_text("x" * 32)
    secret.chmod(0o400)
    return start_daemon(
        "--token-file", str(secret),
        **planted("from runnerd.daemon import service\nservice._SAY_HELD_S = 0.5"),
    )  # fmt: skip


def test_a_flood_of_one_event_is_held_back_and_counted_also_when_it_ends(
    asks_for_a_token: RunnerdProcess,
) -> None:
    wrong_hellos(asks_for_a_token, 60)
    wait_for(lambda: log_lines(asks_for_a_token, "held_back"))  # with no further one of its kind
    lines = log_lines(asks_for_a_token, "token_refused")
    # Ten at once, and one for each second that it took.
    assert 10 <= len(lines) < 40
    held = log_lines(asks_for_a_token, "held_back")
    assert {line["of"] for line in held} == {"token_refused"}
    told = sum(line["held_back"] for line in held)
    assert len(lines) + told + sum(line.get("held_back", 0) for line in lines) == 60


def test_what_is_still_held_back_is_told_before_the_end(
    start_daemon: Start, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("x" * 32)
    secret.chmod(0o400)
    daemon = start_daemon("--token-file", str(secret))
    wrong_hellos(daemon, 30)
    assert daemon.stop() == 0
    events = [line["event"] for line in log_lines(daemon)]
    assert events[-2:] == ["held_back", "stopped"]


def test_on_a_terminal_it_is_text_and_elsewhere_json(tmp_path: Path) -> None:
    for words, is_text in (((), True), (("--log-format", "json"), False)):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*RUNNERD, "serve", "--socket", str(tmp_path / "s"), *words],
            cwd=REPOSITORY, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        said = b""
        while b"ready" not in said or b"\n" not in said.partition(b"ready")[2]:
            assert select.select([ours], [], [], 20)[0]
            said += os.read(ours, 65536)
        process.terminate()
        assert process.wait(10) == 0
        os.close(ours)
        line = next(each for each in said.decode().splitlines() if "ready" in each)
        if is_text:
            assert re.match(r"\d\d:\d\d:\d\d\.\d{3} info    ready socket=/\S+ incarnation=", line)
        else:
            assert line.startswith('{"ts":')


def test_text_can_be_asked_for(start_daemon: Start) -> None:
    daemon = start_daemon("--log-format", "text")
    daemon.stop()
    assert re.search(r"^\S+ info    ready socket=", daemon.log_path.read_text(), re.MULTILINE)


def test_stopping_names_the_sender_of_the_signal(start_daemon: Start) -> None:
    daemon = start_daemon()
    daemon.stop()
    (line,) = log_lines(daemon, "stopping")
    ours = (os.getpid(), os.getuid(), Path("/proc/self/comm").read_text().strip())
    assert (line["sender_pid"], line["sender_uid"], line["sender_comm"]) == ours


def test_a_sender_that_is_gone_is_named_by_its_pid(start_daemon: Start) -> None:
    """A kill that exits at once: its name is read in the handler, or null; never another's."""
    daemon = start_daemon()
    script = f"import os; print(os.getpid(), flush=True); os.kill({daemon.pid}, 15); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", script], capture_output=True, check=True, timeout=20
    )
    daemon.process.wait(10)
    (line,) = log_lines(daemon, "stopping")
    assert line["sender_pid"] == int(done.stdout)
    assert line["sender_uid"] == os.getuid()
    assert line["sender_comm"] is None or line["sender_comm"].startswith("python")


def test_a_stop_that_no_signal_began_has_no_sender(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("daemon.stop")
    daemon.process.wait(10)
    (line,) = log_lines(daemon, "stopping")
    assert (line["cause"], line["sender_pid"], line["sender_comm"]) == ("daemon.stop", None, None)


def test_a_full_pipe_shared_with_another_writer_never_holds_the_daemon_up(tmp_path: Path) -> None:
    """A shell's other child keeps the pipe full, so that it is never sure of room."""
    reader, writer = os.pipe()
    other = subprocess.Popen(["yes"], stdout=writer)
    process = subprocess.Popen(
        [*RUNNERD, "serve", "--socket", str(tmp_path / "s"), "--log-level", "debug"],
        cwd=REPOSITORY, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    try:
        wait_for((tmp_path / "s").exists, 20)
        with RawClient(str(tmp_path / "s")) as client:
            for number in range(40):
                client.call("exec.start", exec_id=f"e{number}", argv=["true"])
                os.read(reader, 4096)  # a little room, for whoever is first
                client.call("exec.wait", exec_id=f"e{number}", until="closed")
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began_s < 5
    finally:
        process.kill()
        process.wait()
        other.kill()
        other.wait()
        os.close(reader)
