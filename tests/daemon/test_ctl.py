"""runnerctl against a real daemon: what a user of `docker exec` expects, and a little more."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import is_alive, wait_for, with_default_signals

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_bytes_pass_straight_through_on_both_streams(runnerd_daemon: RunnerdProcess) -> None:
    done = runnerd_daemon.ctl("run", "--", "sh", "-c", "printf 'a\\0\\377\\n'; printf e >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a\0\xff\n", b"e")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["/nonexistent"], 127),
        (["no-such-program-anywhere"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
    ],
)
def test_the_exit_code_is_the_commands_own(
    runnerd_daemon: RunnerdProcess, words: list[str], expected: int
) -> None:
    done = runnerd_daemon.ctl("run", "--", *words)
    assert done.returncode == expected
    if expected in (126, 127):
        lines = done.stderr.decode().splitlines()
        assert lines[0].startswith("runnerctl: ")
        assert "nothing ran" in lines[0]


def test_a_refusal_is_125_and_says_what_and_what_to_do(runnerd_daemon: RunnerdProcess) -> None:
    done = runnerd_daemon.ctl("run", "-w", "/nonexistent", "--", "true")
    assert done.returncode == 125
    assert b"/nonexistent" in done.stderr
    assert b"\nhint: " in done.stderr


@pytest.mark.parametrize("options", [[], ["-d"]])
def test_a_start_larger_than_a_frame_is_125_and_says_so(
    runnerd_daemon: RunnerdProcess, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "env").write_text("BIG=" + 5_000_000 * "x")
    done = runnerd_daemon.ctl("run", *options, "--env-file", str(tmp_path / "env"), "--", "true")
    assert done.returncode == 125
    first, hint = done.stderr.decode().splitlines()
    assert "exec.start makes a frame of 5000" in first
    assert "the most is 4194304" in first
    assert hint.startswith("hint: split the request")


def test_a_missing_socket_names_the_path_tried(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    done = subprocess.run(
        [sys.executable, "-m", "runnerd.ctl.main", "run", "--", "true"],
        env={**os.environ, "RUNNERD_SOCKET": path},
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 125
    assert path.encode() in done.stderr
    assert b"hint: " in done.stderr


def test_standard_input_is_passed_with_i_and_empty_without(runnerd_daemon: RunnerdProcess) -> None:
    assert runnerd_daemon.ctl("run", "-i", "--", "cat", input=b"in\0\xff").stdout == b"in\0\xff"
    assert runnerd_daemon.ctl("run", "--", "cat", input=b"in").stdout == b""


def test_a_large_input_goes_round_while_output_flows(runnerd_daemon: RunnerdProcess) -> None:
    data = os.urandom(1 << 20) * 24
    done = runnerd_daemon.ctl("run", "-i", "--", "cat", input=data)
    assert done.returncode == 0
    assert done.stdout == data


def test_an_input_the_command_does_not_read_holds_nothing_up(
    runnerd_daemon: RunnerdProcess,
) -> None:
    done = runnerd_daemon.ctl("run", "-i", "--", "true", input=bytes(8 << 20))
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_open_input_does_not_hold_up_the_end(runnerd_daemon: RunnerdProcess) -> None:
    process = runnerd_daemon.start_ctl("run", "-i", "--", "true", stdin=subprocess.PIPE)
    assert process.wait(20) == 0
    finish(process)


def test_a_conversation_goes_back_and_forth(runnerd_daemon: RunnerdProcess) -> None:
    process = runnerd_daemon.start_ctl("run", "-i", "--", "cat", stdin=subprocess.PIPE)
    assert process.stdin is not None
    for word in (b"one\n", b"two\n"):
        process.stdin.write(word)
        process.stdin.flush()
        assert read_line(process) == word
    assert finish(process) == (0, b"", b"")


def test_runnerctl_returns_at_the_exit_whatever_was_left_running(
    runnerd_daemon: RunnerdProcess,
) -> None:
    began_s = time.monotonic()
    done = runnerd_daemon.ctl("run", "--", "sh", "-c", "sleep 60 & echo $!")
    assert time.monotonic() - began_s < 20
    assert done.returncode == 0
    assert is_alive(int(done.stdout))


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_a_signal_is_passed_on_to_the_group(runnerd_daemon: RunnerdProcess, name: str) -> None:
    script = f"trap 'echo got; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    process = runnerd_daemon.start_ctl("run", "--", "sh", "-c", script)
    assert read_line(process) == b"ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    # The shell's own word about the sleep that died of it goes to stderr.
    assert finish(process)[:2] == (9, b"got\n")


def test_a_signal_the_command_dies_of_is_the_exit_code(runnerd_daemon: RunnerdProcess) -> None:
    process = runnerd_daemon.start_ctl("run", "--", "sh", "-c", "echo ready; exec sleep 60")
    read_line(process)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, b"", b"")


def test_a_second_ctrl_c_cancels_and_a_third_kills(runnerd_daemon: RunnerdProcess) -> None:
    script = "trap 'echo int' INT; trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done"
    process = runnerd_daemon.start_ctl("run", "--grace", "60", "--", "sh", "-c", script)
    assert read_line(process) == b"ready\n"
    for said in (b"int\n", b"term\n"):
        process.send_signal(signal.SIGINT)
        assert read_line(process) == said
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 137
    assert b"ended by a cancel (signal 9)" in err


def test_a_signal_reaches_the_command_while_our_reader_does_not_read(
    runnerd_daemon: RunnerdProcess,
) -> None:
    process = runnerd_daemon.start_ctl("run", "--", "yes")
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    # Everything between yes and here is full now, and runnerctl blocks in its write.
    wait_for(lambda: blocked_in_a_pipe(process.pid))
    process.send_signal(signal.SIGTERM)
    with runnerd_daemon.connect() as client:
        wait_for(lambda: all(each.exit is not None for each in client.list_execs()))
    assert finish(process)[0] == 143


def blocked_in_a_pipe(pid: int) -> bool:
    # write(2) to descriptor 1; source: proc_pid_syscall(5), x86-64 numbers
    return Path(f"/proc/{pid}/syscall").read_text().startswith("1 0x1 ")


def test_a_signal_we_were_told_to_ignore_is_not_passed_on(runnerd_daemon: RunnerdProcess) -> None:
    def ignoring_hup() -> None:
        with_default_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    script = (
        "trap 'echo hup' HUP; trap 'echo term; exit' TERM; echo ready; while :; do sleep 0.05; done"
    )
    process = runnerd_daemon.start_ctl("run", "--", "sh", "-c", script, preexec_fn=ignoring_hup)
    read_line(process)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[1] == b"term\n"


def test_a_reader_that_goes_away_ends_the_command_as_in_a_pipe(
    runnerd_daemon: RunnerdProcess,
) -> None:
    process = runnerd_daemon.start_ctl("run", "--", "yes")
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_command_that_ignores_the_broken_pipe_is_cancelled(
    runnerd_daemon: RunnerdProcess,
) -> None:
    script = "trap '' PIPE; while :; do echo x; sleep 0.05; done"
    process = runnerd_daemon.start_ctl("run", "--grace", "0.1", "--", "sh", "-c", script)
    read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr is not None
    process.stderr.close()


def test_a_full_disk_is_said_and_is_125(runnerd_daemon: RunnerdProcess) -> None:
    with Path("/dev/full").open("wb") as full:
        done = runnerd_daemon.ctl(
            "run", "--", "echo", "x", capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 125
    assert b"cannot write standard output" in done.stderr


def test_closed_standard_streams_are_no_way_into_the_connection(
    runnerd_daemon: RunnerdProcess,
) -> None:
    def closing() -> None:
        with_default_signals()
        for descriptor in (0, 1):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    done = runnerd_daemon.ctl("run", "--", "echo", "x", preexec_fn=closing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_deadline_is_said_unless_quiet(runnerd_daemon: RunnerdProcess) -> None:
    words = ("--deadline", "0.2", "--", "sleep", "60")
    done = runnerd_daemon.ctl("run", *words)
    assert done.returncode == 143
    assert done.stderr == b"runnerctl: ended by its deadline (signal 15)\n"
    assert runnerd_daemon.ctl("run", "-q", *words).stderr == b""


def test_a_stopped_daemon_is_said(runnerd_daemon: RunnerdProcess) -> None:
    process = runnerd_daemon.start_ctl("run", "--", "sh", "-c", "echo ready; exec sleep 60")
    read_line(process)
    runnerd_daemon.stop()
    code, _, err = finish(process)
    assert (code, err) == (143, b"runnerctl: ended because runnerd stopped (signal 15)\n")


def test_a_killed_daemon_is_a_stream_lost_for_good(runnerd_daemon: RunnerdProcess) -> None:
    process = runnerd_daemon.start_ctl("run", "--", "sh", "-c", "echo ready; exec sleep 60")
    read_line(process)
    runnerd_daemon.kill()
    code, _, err = finish(process)
    assert code == 125
    assert b"stream ended without the exit of " in err


def test_variables_users_and_directories_reach_the_command(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    (tmp_path / "env").write_text("FILE=f\n")
    done = runnerd_daemon.ctl(
        *("run", "-e", "A=b c", "-e", "MINE", "--env-file", str(tmp_path / "env")),
        *("-w", str(tmp_path), "--umask", "077", "--rlimit", "nofile=77:99"),
        *("--", "sh", "-c", 'echo "$A|$MINE|$FILE|$(pwd -P)|$(umask)|$(ulimit -n)"'),
        env={**os.environ, "MINE": "m"},
    )
    assert done.stdout.decode() == f"b c|m|f|{tmp_path.resolve()}|0077|77\n"


def test_env_replace_gives_nothing_else(runnerd_daemon: RunnerdProcess) -> None:
    done = runnerd_daemon.ctl("run", "--env-replace", "-e", "A=1", "--", "/usr/bin/env")
    assert done.stdout == b"A=1\n"


def test_merged_streams_keep_their_order(runnerd_daemon: RunnerdProcess) -> None:
    script = "for n in 1 2 3; do echo o$n; echo e$n >&2; done"
    done = runnerd_daemon.ctl("run", "--merge", "--", "sh", "-c", script)
    assert done.stdout == b"o1\ne1\no2\ne2\no3\ne3\n"


def test_the_life_of_a_detached_exec(runnerd_daemon: RunnerdProcess) -> None:
    script = "echo hello; trap 'exit 5' USR1; while :; do sleep 0.05; done"
    words = ("--id", "web", "--label", "job=42")
    assert runnerd_daemon.ctl("run", "-d", *words, "--", "sh", "-c", script).stdout == b"web\n"
    again = runnerd_daemon.ctl("run", "-d", *words, "--", "true")
    assert again.returncode == 125
    listed = runnerd_daemon.ctl("ps", "--label", "job=42").stdout.decode().splitlines()
    assert listed[0].split() == ["ID", "STATE", "PID", "AGE", "EXIT", "COMMAND"]
    assert listed[1].split()[:2] == ["web", "running"]
    assert len(runnerd_daemon.ctl("ps", "--label", "job=1").stdout.splitlines()) == 1
    known = json.loads(runnerd_daemon.ctl("inspect", "web", "--usage").stdout)
    assert (known["exec_id"], known["labels"]) == ("web", {"job": "42"})
    assert runnerd_daemon.ctl("wait", "web", "--timeout", "0.1").returncode == 125
    attached = runnerd_daemon.start_ctl("attach", "web")
    assert read_line(attached) == b"hello\n"
    assert runnerd_daemon.ctl("signal", "web", "USR1", "--to", "group").returncode == 0
    assert finish(attached)[0] == 5
    assert runnerd_daemon.ctl("wait", "web").returncode == 5
    exit = json.loads(runnerd_daemon.ctl("wait", "web", "--json").stdout)
    assert (exit["code"], exit["reason"]) == (5, "exited")
    assert runnerd_daemon.ctl("attach", "web").stdout == b"hello\n"
    assert "web" not in runnerd_daemon.ctl("ps").stdout.decode().split()
    assert "web" in runnerd_daemon.ctl("ps", "--all").stdout.decode().split()


def test_leaving_attach_leaves_the_exec_alone(runnerd_daemon: RunnerdProcess) -> None:
    runnerd_daemon.ctl("run", "-d", "--id", "x", "--", "sh", "-c", "echo ready; exec sleep 60")
    process = runnerd_daemon.start_ctl("attach", "x")
    read_line(process)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    with runnerd_daemon.connect() as client:
        assert client.inspect("x").state == "running"


def test_a_cancel_prints_its_receipt(runnerd_daemon: RunnerdProcess) -> None:
    runnerd_daemon.ctl("run", "-d", "--id", "x", "--", "sh", "-c", "sleep 60 & sleep 60")
    done = runnerd_daemon.ctl("cancel", "x")
    assert done.returncode == 0
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "x ended, its command's exit: SIGTERM"
    assert "TERM to 3 processes" in done.stdout.decode()
    again = json.loads(runnerd_daemon.ctl("cancel", "x", "--json").stdout)
    assert again["outcome"] == "already_ended"


@pytest.mark.parametrize(
    "words", [["attach", "no"], ["signal", "no", "TERM"], ["wait", "no"], ["inspect", "no"]]
)
def test_an_exec_nobody_knows_is_125(runnerd_daemon: RunnerdProcess, words: list[str]) -> None:
    done = runnerd_daemon.ctl(*words)
    assert done.returncode == 125
    assert done.stderr.startswith(b"runnerctl: ")


def test_info_and_metrics_are_for_people_and_machines(runnerd_daemon: RunnerdProcess) -> None:
    text = runnerd_daemon.ctl("info").stdout.decode()
    assert f"pid {runnerd_daemon.pid}" in text
    assert json.loads(runnerd_daemon.ctl("info", "--json").stdout)["pid"] == runnerd_daemon.pid
    assert b"# TYPE runnerd_" in runnerd_daemon.ctl("metrics").stdout
    assert runnerd_daemon.ctl("metrics", "--format", "openmetrics").stdout.endswith(b"# EOF\n")


def test_draining_refuses_new_work_until_undrained(runnerd_daemon: RunnerdProcess) -> None:
    assert runnerd_daemon.ctl("drain").returncode == 0
    refused = runnerd_daemon.ctl("run", "--", "true")
    assert refused.returncode == 125
    assert b"nothing ran" in refused.stderr
    assert runnerd_daemon.ctl("undrain").returncode == 0
    assert runnerd_daemon.ctl("run", "--", "true").returncode == 0


def test_stop_returns_when_the_daemon_has_gone(runnerd_daemon: RunnerdProcess) -> None:
    assert runnerd_daemon.ctl("stop").returncode == 0
    assert runnerd_daemon.process.wait(2) == 0


def test_our_own_reader_that_goes_away_is_no_traceback(runnerd_daemon: RunnerdProcess) -> None:
    words = shlex.join(runnerd_daemon.ctl_words("schema"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -c 1"],
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.parametrize("words", [["health"], ["ps"], ["info", "--json"], ["--version"]])
def test_a_closed_output_changes_no_exit_code(
    runnerd_daemon: RunnerdProcess, words: list[str]
) -> None:
    def closing() -> None:
        with_default_signals()
        os.close(1)

    done = runnerd_daemon.ctl(*words, preexec_fn=closing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", [["health"], ["info"], ["schema"], ["--version"], ["--help"], ["run", "--help"]]
)
def test_our_own_output_that_cannot_be_written_is_said(
    runnerd_daemon: RunnerdProcess, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long, before and after a daemon is asked; a full disk, and a reader that left."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # argparse drops what write() says
    with Path("/dev/full").open("wb") as full:
        done = runnerd_daemon.ctl(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    said = b"runnerctl: cannot write standard output: no space left on device\n"
    assert (done.returncode, done.stderr) == (125, said)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = runnerd_daemon.ctl(*words, capture_output=False, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")
