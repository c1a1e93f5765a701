"""Cases of the group `signals`: who gets which signal, and who is said to have ended a command.

The silence of C92 is shortened from 75 s to 33 s, which is past every period in the daemon (hello
10 s, a stuck reader's and the expiry's 30 s).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import ClientTimeout
from runnerd.protocol.framing import Encoding
from tests import needs
from tests.cases.field import (
    ROOM,
    STOP_ROOM_S,
    STOP_S,
    arguments,
    cgroup,
    entering,
    is_stopped,
    mark,
    marked,
    output_of,
    read_until,
    rounds,
    status_field,
    timed,
)
from tests.harness import is_alive, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]


def test_c81_a_stopped_command_sees_the_term(runnerd_daemon: RunnerdProcess) -> None:
    """TERM is followed by CONT, so that a command stopped by itself can still clean up."""
    script = 'trap "echo bye; exit 3" TERM; kill -STOP $$; while :; do sleep 0.05; done'
    with runnerd_daemon.connect() as client:
        handle = client.start(["bash", "-c", script])
        pid = handle.pid
        assert pid is not None
        wait_for(lambda: is_stopped(pid))
        took_s, answer = timed(lambda: handle.cancel(2 * ROOM))
        assert answer.outcome == "ended"
        assert took_s < 1.0 * ROOM
        assert output_of(handle) == (b"bye\n", b"")
        assert answer.exit is not None
        assert (answer.exit.code, answer.exit.reason, answer.exit.forced) == (3, "cancelled", False)


def test_c81_so_does_a_stopped_child_of_another_session(runnerd_daemon: RunnerdProcess) -> None:
    """Every member of the tree gets its CONT, wherever it has gone."""
    child = 'trap "echo child; exit 0" TERM; kill -STOP $$; while :; do sleep 0.05; done'
    script = (
        f"setsid bash -c '{child}' & trap 'wait; echo leader; exit 4' TERM;"
        "echo $!; while :; do sleep 0.05; done"
    )
    with runnerd_daemon.connect() as client:
        handle = client.start(["bash", "-c", script])
        pid = int(read_until(handle, b"\n"))
        wait_for(lambda: is_stopped(pid))
        answer = handle.cancel(2 * ROOM)
        assert answer.outcome == "ended"
        assert output_of(handle)[0] == b"child\nleader\n"
        assert answer.receipt is not None
        assert answer.receipt.killed_total == 0
        assert answer.exit is not None
        assert (answer.exit.code, answer.exit.reason) == (4, "cancelled")


def test_c81_a_plain_signal_is_just_that(runnerd_daemon: RunnerdProcess) -> None:
    """exec.signal 15 sends no CONT: a stopped command stays stopped, with the TERM pending."""
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", "kill -STOP $$; sleep 60"])
        pid = handle.pid
        assert pid is not None
        wait_for(lambda: is_stopped(pid))
        assert handle.signal(15).signalled == 1
        pending = 1 << (signal.SIGTERM - 1)
        wait_for(lambda: int(status_field(pid, "ShdPnd"), 16) & pending)
        client.ping()
        assert is_stopped(pid)
        assert handle.signal("CONT").signalled == 1
        its_exit = handle.wait(5)
        assert (its_exit.signal, its_exit.reason) == (15, "exited")


def test_c82_the_reason_is_who_acted_first(runnerd_daemon: RunnerdProcess) -> None:
    """Signal 9 by the deadline's KILL and by the command itself are two different ends."""
    script = "trap '' TERM; while :; do sleep 1; done"
    with runnerd_daemon.connect() as client:
        its_exit = client.run(["sh", "-c", script], deadline_s=1, grace_s=1, timeout_s=10).exit
        assert (its_exit.signal, its_exit.reason, its_exit.forced) == (9, "deadline", True)
        assert its_exit.oom.verdict in ("none", "unknown")
        its_exit = client.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit
        assert (its_exit.signal, its_exit.reason, its_exit.forced) == (9, "exited", False)
        assert its_exit.oom.verdict in ("none", "unknown")


def test_c82_only_a_counter_that_rose_makes_an_oom(start_daemon: Daemons) -> None:
    """The same signal 9 is an OOM kill where the cgroup counted one, and else is none."""
    eater = "b=bytearray(400<<20)"
    with cgroup("memory", "c82") as folder:
        (folder / "memory.limit_in_bytes").write_text(str(128 << 20))
        daemon = start_daemon(wrapper=entering(folder))
        with daemon.connect() as client:
            its_exit = client.run([sys.executable, "-c", eater], timeout_s=30).exit
            assert (its_exit.signal, its_exit.reason, its_exit.forced) == (9, "exited", False)
            assert (its_exit.oom.verdict, its_exit.oom.kills) == ("killed", 1)
            its_exit = client.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit
            assert (its_exit.signal, its_exit.oom.verdict) == (9, "none")
        assert daemon.stop() == 0


def test_c85_what_cannot_be_killed_is_told_and_holds_nobody_up(start_daemon: Daemons) -> None:
    """A command KILL does not reach: cancel names it, all else goes on, the stop keeps its time.

    The process sits in a frozen cgroup (version 1), where KILL waits for the thaw: as stuck as
    one in a hung file system, and it can be let go.
    """
    word = mark(1010)
    daemon = start_daemon()
    with cgroup("freezer", "c85") as folder, daemon.connect() as client:
        state = folder / "freezer.state"
        handle = client.start(["sleep", word], exec_id="stuck", attach=False)
        assert handle.pid is not None
        (folder / "cgroup.procs").write_text(str(handle.pid))
        state.write_text("FROZEN")
        wait_for(lambda: state.read_text() == "FROZEN\n")
        try:
            took_s, answer = timed(lambda: handle.cancel(0.5))
            assert answer.outcome == "survivors"
            assert took_s < 0.5 + 1.0 * ROOM
            assert answer.receipt is not None
            assert [each.pid for each in answer.receipt.survivors] == [handle.pid]
            (info,) = client.list_execs()
            assert (info.state, info.ending) == ("running", "cancelled")
            assert [(each.pid, each.command) for each in info.survivors] == [(handle.pid, "sleep")]
            took_s, _ = timed(lambda: _expect_timeout(client, 1.0))
            assert took_s < 1.0 * ROOM
            with daemon.connect() as other:
                took_s, done = timed(lambda: other.run(["true"]))
                assert done.exit.code == 0
                assert took_s < 1.0 * ROOM
            took_s, code = timed(daemon.stop)
            assert code == 0
            assert took_s < STOP_S + STOP_ROOM_S
            assert is_alive(handle.pid)
        finally:
            state.write_text("THAWED")
        wait_for(lambda: not marked(word), 1 * ROOM)


def test_c85_a_survivor_that_comes_loose_is_ended_and_told(runnerd_daemon: RunnerdProcess) -> None:
    """KILL stays sent: once the kernel lets the command go it ends, and its exit says by whom."""
    word = mark(1010)
    with cgroup("freezer", "c85b") as folder, runnerd_daemon.connect() as client:
        state = folder / "freezer.state"
        handle = client.start(["sleep", word], attach=False)
        (folder / "cgroup.procs").write_text(str(handle.pid))
        state.write_text("FROZEN")
        wait_for(lambda: state.read_text() == "FROZEN\n")
        assert handle.cancel(0).outcome == "survivors"
        again = handle.cancel(0)
        assert again.outcome == "survivors"
        state.write_text("THAWED")
        its_exit = handle.wait_closed(1 * ROOM)
        assert (its_exit.signal, its_exit.reason, its_exit.forced) == (9, "cancelled", True)
        info = handle.inspect()
        assert (info.state, info.survivors) == ("closed", [])
        assert client.cancel(handle.exec_id).outcome == "already_ended"


def _expect_timeout(client: Any, timeout_s: float) -> None:
    with pytest.raises(ClientTimeout):
        client.wait("stuck", timeout_s=timeout_s)


BAD_DEADLINES = ["0", "-1", "1e18", "1e400", "NaN", '"5"', "true"]


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("deadline_s", value) for value in BAD_DEADLINES), ("grace_s", "-1"), ("grace_s", "1e12")],
)
def test_c86_a_duration_that_is_none_is_refused(
    runnerd_daemon: RunnerdProcess, field: str, value: str
) -> None:
    """0, negative, endless, not a number, text, a truth value: refused before anything runs.

    JSON has no words for NaN and 1e400, so there the frame is refused and names no field.
    """
    params = f'{{"exec_id": "bad", "argv": ["sh", "-c", "sleep 0.2; echo ok"], "{field}": {value}}}'
    with RawClient(runnerd_daemon.socket_path) as client:
        message = f'{{"jsonrpc": "2.0", "id": 77, "method": "exec.start", "params": {params}}}\n'
        client.sock.sendall(message.encode())
        wait_for(lambda: client.receive() and (client.answers or client.errors_without_id))
        error = [*client.errors_without_id, *client.answers.values()][0]
        if value not in ("NaN", "1e400"):
            assert error["error"]["data"]["kind"] == "invalid_params"
            assert field in error["error"]["data"].get("field", "")
        assert client.call("daemon.info")["starts"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0])
@pytest.mark.parametrize("field", ["deadline_s", "grace_s"])
def test_c86_messagepack_can_say_nan_and_is_refused_it(
    runnerd_daemon: RunnerdProcess, field: str, value: float
) -> None:
    """What only a binary encoding can carry is refused by name too; a grace of 0 is one."""
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        if field == "grace_s" and value == 0:
            client.call("exec.start", argv=["true"], grace_s=value)
            return
        with pytest.raises(RawError) as refused:
            client.call("exec.start", argv=["true"], **{field: value})
        assert refused.value.kind == "invalid_params"
        assert refused.value.data["field"] == field
        assert client.call("daemon.info")["starts"] == 0


def test_c86_a_duration_that_is_one_is_taken(runnerd_daemon: RunnerdProcess) -> None:
    """Absent and null mean none; the largest does not wrap round; the smallest says deadline."""
    argv = ["sh", "-c", "sleep 0.2; echo ok"]
    with RawClient(runnerd_daemon.socket_path) as client:
        for number, value in enumerate([None, 1e9, 1e8, 30]):
            exec_id = f"c86-{number}"
            client.call("exec.start", exec_id=exec_id, argv=argv, deadline_s=value, attach={})
            its_exit = client.note("exec.exited", exec_id)["exit"]
            assert (its_exit["code"], its_exit["reason"]) == (0, "exited"), value
            assert client.output(exec_id) == b"ok\n"
        client.call("exec.start", exec_id="soon", argv=argv, deadline_s=1e-9, attach={})
        its_exit = client.note("exec.exited", "soon")["exit"]
        assert (its_exit["signal"], its_exit["reason"]) == (15, "deadline")


def test_c87_what_was_printed_before_the_end_is_delivered(runnerd_daemon: RunnerdProcess) -> None:
    """Output before the deadline and output during the grace both come before the exit."""
    script = "echo before; echo err >&2; sleep 100; echo after"
    clean_up = (
        "import signal,sys,time\n"
        "def end(*_):\n print('cleanup'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('buffered')\n"
        "time.sleep(100)"
    )
    with runnerd_daemon.connect() as client:
        done = client.run(["sh", "-c", script], deadline_s=1, timeout_s=10)
        assert (done.stdout, done.stderr) == (b"before\n", b"err\n")
        assert (done.exit.signal, done.exit.reason) == (15, "deadline")
        done = client.run([sys.executable, "-c", clean_up], deadline_s=1 * ROOM, timeout_s=20)
        assert done.stdout == b"buffered\ncleanup\n"
        assert (done.exit.code, done.exit.reason) == (0, "deadline")


PYTHON_ON_USR1 = (
    "import os,signal,sys,time\n"
    "def end(*_):\n print('got'); sys.exit(9)\n"
    "signal.signal(signal.SIGUSR1, end)\n"
    "print(os.getpid(), flush=True)\n"
    "while True: time.sleep(0.05)"
)
SHELL_ON_USR1 = 'trap "echo got; exit 9" USR1; echo $$; while :; do sleep 0.05; done'


@pytest.mark.parametrize(
    ("argv", "user"),
    [
        (["sh", "-c", SHELL_ON_USR1], None),
        (["sh", "-c", SHELL_ON_USR1], "nobody"),
        ([sys.executable, "-c", PYTHON_ON_USR1], None),
    ],
)
def test_c88_the_pid_is_the_commands_own(
    runnerd_daemon: RunnerdProcess, argv: list[str], user: str | None
) -> None:
    """The pid in the answer is the command's and not the shim's; its cmdline is the user's argv."""
    if user is not None:
        needs.root()
    with runnerd_daemon.connect() as client:
        handle = client.start(argv, user=user)
        pid = int(read_until(handle, b"\n"))
        assert pid == handle.pid
        assert arguments(pid) == [word.encode() for word in argv]
        took_s, answer = timed(lambda: handle.signal(10))
        assert answer.signalled == 1
        assert output_of(handle, 0.5 * ROOM) == (b"got\n", b"")
        assert handle.exit is not None
        assert (handle.exit.code, handle.exit.reason) == (9, "exited")
        assert took_s < 0.5 * ROOM


def _start_at_a_barrier(client: RawClient, fifo: Path, count: int) -> list[str]:
    """Start commands that end in the same instant: when somebody opens the pipe to write."""
    ids = [f"c91-{number}" for number in range(count)]
    for first in range(0, count, 100):
        sent = [
            client.send("exec.start", exec_id=each, argv=["cat", str(fifo)], attach={})
            for each in ids[first : first + 100]
        ]
        for request_id in sent:
            client.answer(request_id)
    return ids


def _open_barrier(fifo: Path) -> None:
    # Not blocking: it is there for the taking only once a reader waits, which all of them do.
    os.close(wait_for(lambda: _try_open(fifo)))


def _try_open(fifo: Path) -> int | None:
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_c91_300_ends_in_one_instant_are_300_exits(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """One SIGCHLD may stand for many deaths; each gets its exit."""
    fifo = tmp_path / "barrier"
    os.mkfifo(fifo)
    with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
        ids = _start_at_a_barrier(client, fifo, 300)
        _wait_for_readers(ids, client)
        _open_barrier(fifo)
        for each in ids:
            its_exit = client.note("exec.exited", each)["exit"]
            assert (its_exit["code"], its_exit["reason"]) == (0, "exited")
            client.note("exec.closed", each)
        assert client.call("daemon.info")["live_execs"] == 0


def _wait_for_readers(ids: list[str], client: RawClient) -> None:
    """Wait until every cat sleeps in its open(2) of the pipe."""
    pids = [client.call("exec.inspect", exec_id=each)["pid"] for each in ids]

    def is_in_open(pid: int) -> bool:
        return status_field(pid, "State").startswith("S") and arguments(pid)[:1] == [b"cat"]

    wait_for(lambda: all(map(is_in_open, pids)), 20)


def test_c91_and_with_a_term_in_that_instant_too(start_daemon: Daemons, tmp_path: Path) -> None:
    """300 ends and the daemon's SIGTERM at once: gone within 2 s, and every exit is told."""
    for turn in range(rounds(20, 5)):
        fifo = tmp_path / f"barrier{turn}"
        os.mkfifo(fifo)
        daemon = start_daemon()
        with RawClient(daemon.socket_path, encoding=Encoding.MSGPACK) as client:
            ids = _start_at_a_barrier(client, fifo, 300)
            _wait_for_readers(ids, client)
            _open_barrier(fifo)
            daemon.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            _read_to_the_end(client)
            assert daemon.process.wait(10) == 0
            assert time.monotonic() - began_s < STOP_S + STOP_ROOM_S
            exits = {
                note["params"]["exec_id"]: note["params"]["exit"]
                for note in client.notes
                if note["method"] == "exec.exited"
            }
            assert exits.keys() == set(ids)
            kinds = {(each["code"], each["signal"], each["reason"]) for each in exits.values()}
            assert kinds <= {(0, None, "exited"), (0, None, "stopped"), (None, 15, "stopped")}


def _read_to_the_end(client: RawClient) -> None:
    with contextlib.suppress(ClosedError):
        while client.receive(10):
            pass


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_c92_silence_ends_nothing(runnerd_daemon: RunnerdProcess) -> None:
    """A command and a client that say nothing for long are left alone, together and apart.

    All that is heard of a silent one are heartbeats. 75 s are 33 unless RUNNERD_CASES_FULL is set.
    """
    long_s = rounds(75, 33)
    loop = f"for i in $(seq {2 * long_s}); do echo $i; sleep 0.5; done; echo done; exit 4"
    silent = f"sleep {long_s}; echo done; exit 4"
    commands = {"silent": silent, "printing": loop, "terminal": silent}
    clients = {name: RawClient(runnerd_daemon.socket_path) for name in commands}
    try:
        for name, script in commands.items():
            start = {"exec_id": name, "argv": ["sh", "-c", script], "attach": {}}
            clients[name].call("exec.start", **start, **({"pty": {}} if name == "terminal" else {}))
        began_s = time.monotonic()
        beats = 0
        while (note := clients["silent"].receive(60))["method"] == "exec.heartbeat":
            beats += 1
        assert time.monotonic() - began_s > long_s - 1
        assert note["method"] == "exec.output"
        assert long_s // 6 - 1 <= beats <= long_s // 5
        for name, client in clients.items():
            its_exit = client.note("exec.exited", name, 60)["exit"]
            assert (its_exit["code"], its_exit["reason"]) == (4, "exited")
            assert client.output(name).endswith((b"done\n", b"done\r\n"))
            told = {note["method"] for note in client.notes}
            assert told <= {"exec.output", "exec.heartbeat", "exec.exited", "exec.closed"}
    finally:
        for client in clients.values():
            client.sock.close()
