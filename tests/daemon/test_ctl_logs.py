"""runnerctl logs, forget and run -d: an exec looked at from outside, while it lives and after."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.harness import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness import RunnerdProcess


def detached(daemon: RunnerdProcess, script: str, *options: str) -> str:
    done = daemon.ctl("run", "-d", *options, "--", "sh", "-c", script)
    assert done.returncode == 0
    return done.stdout.decode().strip()


def test_what_is_kept_is_printed_each_stream_to_its_own(runnerd_daemon: RunnerdProcess) -> None:
    exec_id = detached(runnerd_daemon, "echo out; echo err >&2; exit 3")
    assert runnerd_daemon.ctl("wait", exec_id).returncode == 3
    done = runnerd_daemon.ctl("logs", exec_id)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", b"err\n")


def test_logs_of_a_live_exec_end_without_f_and_go_on_with_it(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    exec_id = detached(
        runnerd_daemon, f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; echo two"
    )
    with runnerd_daemon.connect() as client:
        wait_for(lambda: client.inspect(exec_id).last_seq)
    assert runnerd_daemon.ctl("logs", exec_id).stdout == b"one\n"
    follower = runnerd_daemon.start_ctl("logs", "-f", exec_id)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"one\n"
    go.touch()
    out, err = follower.communicate(timeout=30)
    assert (follower.returncode, out, err) == (0, b"two\n", b"")


def test_after_and_tail_choose(runnerd_daemon: RunnerdProcess) -> None:
    exec_id = detached(
        runnerd_daemon, "echo first; sleep 0.3; echo second >&2; sleep 0.3; echo third"
    )
    assert runnerd_daemon.ctl("wait", exec_id).returncode == 0
    done = runnerd_daemon.ctl("logs", "--after", "1", exec_id)
    assert (done.stdout, done.stderr) == (b"third\n", b"second\n")
    done = runnerd_daemon.ctl("logs", "--tail", "9", exec_id)
    assert (done.stdout, done.stderr) == (b"third\n", b"nd\n")
    assert runnerd_daemon.ctl("logs", "--tail", "0", exec_id).stdout == b""
    assert runnerd_daemon.ctl("logs", "--tail", "999", exec_id).stdout == b"first\nthird\n"
    assert runnerd_daemon.ctl("logs", "--tail", "-1", exec_id).returncode == 125


def test_a_gap_is_named_on_standard_error(start_daemon: Callable[..., RunnerdProcess]) -> None:
    daemon = start_daemon("--tail-bytes-max", "65536", "--spool-bytes-max", "65536")
    exec_id = detached(daemon, "head -c 1000000 /dev/zero | tr '\\0' x")
    assert daemon.ctl("wait", exec_id).returncode == 0
    done = daemon.ctl("logs", exec_id)
    assert done.returncode == 0
    lost = int(done.stderr.split()[1])
    assert b"bytes of stdout can no longer be shown" in done.stderr
    assert len(done.stdout) + lost == 1_000_000


def test_a_detached_command_never_waits_for_a_reader(runnerd_daemon: RunnerdProcess) -> None:
    exec_id = detached(runnerd_daemon, "head -c 3000000 /dev/zero", "--id", "big")
    assert exec_id == "big"
    assert runnerd_daemon.ctl("wait", "--timeout", "20", exec_id).returncode == 0


def test_forget_lets_go_of_the_output_and_keeps_the_exit(runnerd_daemon: RunnerdProcess) -> None:
    exec_id = detached(runnerd_daemon, "echo x; exit 5")
    assert runnerd_daemon.ctl("wait", "--until", "closed", exec_id).returncode == 5
    assert runnerd_daemon.ctl("forget", exec_id).returncode == 0
    gone = runnerd_daemon.ctl("logs", exec_id)
    assert gone.returncode == 125
    assert b"exit is in" in gone.stderr
    assert runnerd_daemon.ctl("wait", exec_id).returncode == 5


@pytest.mark.parametrize("words", [("logs", "nope"), ("forget", "nope")])
def test_an_unknown_id_is_said(runnerd_daemon: RunnerdProcess, words: tuple[str, ...]) -> None:
    done = runnerd_daemon.ctl(*words)
    assert done.returncode == 125
    assert b"nope" in done.stderr


def test_forget_of_several_tells_of_each_that_it_refused_and_of_nothing_else(
    runnerd_daemon: RunnerdProcess,
) -> None:
    exec_ids = [detached(runnerd_daemon, "true") for _ in range(2)]
    for exec_id in exec_ids:
        runnerd_daemon.ctl("wait", "--until", "closed", exec_id)
    done = runnerd_daemon.ctl("forget", exec_ids[0], "nope", exec_ids[1])
    assert (done.returncode, done.stderr) == (125, b"runnerctl: there is no exec 'nope'\n")
    for exec_id in exec_ids:
        assert (
            json.loads(runnerd_daemon.ctl("inspect", exec_id).stdout)["transcript"] == "forgotten"
        )


def test_forget_of_a_live_exec_is_refused(runnerd_daemon: RunnerdProcess) -> None:
    exec_id = detached(runnerd_daemon, "sleep 60")
    done = runnerd_daemon.ctl("forget", exec_id)
    assert done.returncode == 125
    assert runnerd_daemon.ctl("inspect", exec_id).returncode == 0
