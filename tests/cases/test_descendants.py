"""Cases of the group `descendants`: whatever a command starts is found, and nothing else is hit."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.client.errors import RemoteError
from runnerd.protocol.framing import Encoding
from tests import needs
from tests.cases.field import (
    ROOM,
    cpu_s,
    mark,
    marked,
    open_fds,
    output_of,
    read_until,
    status_field,
    timed,
    zombies,
)
from tests.harness import children, descendants, is_alive, wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess


def _has(word: str, least: int) -> bool:
    return len(marked(word)) >= least


def test_c13_a_deadline_ends_the_whole_pipeline(runnerd_daemon: RunnerdProcess) -> None:
    """A pipeline is ended at its deadline, all of it, and the exit says deadline."""
    with runnerd_daemon.connect() as client:
        word = mark(300)
        handle = client.start(["sh", "-c", f"sleep {word} | cat | cat"], deadline_s=1, grace_s=0.5)
        pid = handle.pid
        assert pid is not None
        tree = wait_for(lambda: len(found := descendants(pid)) == 3 and found | {pid})
        its_exit = handle.wait(10)
        wait_for(lambda: not any(map(is_alive, tree)), 0.5 * ROOM)
    assert its_exit.reason == "deadline"
    assert its_exit.wall_s is not None
    assert 1.0 <= its_exit.wall_s <= 2.0 * ROOM


def test_c14_cancel_reaches_those_who_left_the_session(runnerd_daemon: RunnerdProcess) -> None:
    """Children in sessions of their own are gone when the cancel has been answered."""
    one, two = mark(1001), mark(1002)
    script = f"for i in 1 2 3; do setsid sleep {one} & done; exec sleep {two}"
    with runnerd_daemon.connect() as client:
        handle = client.start(["bash", "-c", script])
        wait_for(lambda: len(marked(one)) == 3 and len(marked(two)) == 1)
        answer = handle.cancel(0.5)
        assert (answer.outcome, marked(one), marked(two)) == ("ended", set(), set())
        assert answer.receipt is not None
        assert answer.receipt.termed_total == 4
        assert sorted(each.place for each in answer.receipt.termed) == ["group"] + ["outside"] * 3


def test_c17_kill_catches_up_with_a_tree_that_forks(runnerd_daemon: RunnerdProcess) -> None:
    """A tree that keeps forking into new sessions is killed to the last process, 20 of 20.

    Each round ends with an empty scan; all marks are scanned together for 2 s at the end.
    """
    words = [mark(1004) for _ in range(20)]
    with runnerd_daemon.connect() as client:
        for word in words:
            loop = f'setsid sh -c "sleep {word} & sleep {word}" & sleep 0.005'
            handle = client.start(["bash", "-c", f"while :; do {loop}; done"])
            wait_for(functools.partial(_has, word, 20), 20)
            took_s, answer = timed(functools.partial(handle.cancel, 0))
            assert answer.outcome == "ended", answer
            assert took_s < 2.0 * ROOM
            assert not marked(word)
        before_s = cpu_s(runnerd_daemon.pid)
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            assert not any(marked(word) for word in words)
            time.sleep(0.1)
        assert cpu_s(runnerd_daemon.pid) - before_s < 0.2  # it is at rest again


def test_c18_escalation_follows_the_set_and_not_the_leader(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """A leader that obeys TERM exits by its own code; a child that ignores it is killed."""
    word = mark(1005)
    script = f"(trap '' TERM; exec sleep {word}) & trap 'exit 0' TERM; echo ready; wait"
    with runnerd_daemon.connect() as client:
        handle = client.start(["bash", "-c", script])
        read_until(handle, b"ready")
        (child,) = wait_for(lambda: marked(word))
        ignored = int(wait_for(lambda: status_field(child, "SigIgn")), 16)
        assert ignored >> (signal.SIGTERM - 1) & 1
        began_s = time.monotonic()
        answer = client.cancel(handle.exec_id, grace_s=1, wait=False)
        assert answer.outcome == "ending"
        its_exit = handle.wait(5)
        assert (its_exit.code, its_exit.signal, its_exit.reason) == (0, None, "cancelled")
        client.wait(handle.exec_id, until="closed", timeout_s=1 * ROOM)
        assert time.monotonic() - began_s >= 1.0
        answer = client.cancel(handle.exec_id)
        assert answer.outcome == "already_ended"
        assert not marked(word)


def test_c18_the_receipt_names_who_had_to_be_killed(runnerd_daemon: RunnerdProcess) -> None:
    """TERM to both, KILL to the one that ignored it."""
    word = mark(1005)
    script = f"(trap '' TERM; exec sleep {word}) & trap 'exit 0' TERM; echo ready; wait"
    with runnerd_daemon.connect() as client:
        handle = client.start(["bash", "-c", script])
        read_until(handle, b"ready")
        (child,) = wait_for(lambda: marked(word))
        answer = handle.cancel(0.2)
        assert answer.outcome == "ended"
        assert answer.receipt is not None
        assert {each.pid for each in answer.receipt.termed} == {child, handle.pid}
        assert [each.pid for each in answer.receipt.killed] == [child]


def test_c19_no_zombie_is_left_by_anybody(start_daemon: Callable[..., RunnerdProcess]) -> None:
    """Background processes that outlive their command become nobody's zombie."""
    tini = needs.program("tini")
    outer = start_daemon(wrapper=[tini, "-s", "--"])
    with outer.connect() as client:
        handles = [
            client.start(["sh", "-c", "sleep 1 & sleep 2 & exit 0"], attach=False)
            for _ in range(200)
        ]
        for handle in handles:
            assert handle.wait_closed(3 * ROOM).code == 0
        inner = client.info().pid

        def left() -> int:
            return sum(map(zombies, [outer.pid, inner, *children(inner)]))

        wait_for(lambda: left() == 0, 1)
        assert len(children(inner)) == client.info().parked_shims


def test_c20_a_leader_killed_from_outside_leaves_its_children_to_the_exec(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """The exit says signal 9; the orphans stay the exec's and go with a cancel, or the stop."""
    daemon = start_daemon()
    with daemon.connect() as client:
        words = [mark(1006), mark(1006)]
        handles = []
        for word in words:
            handle = client.start(["bash", "-c", f"sleep {word} & sleep {word} & wait"])
            wait_for(functools.partial(_has, word, 2))
            assert handle.pid is not None
            os.kill(handle.pid, signal.SIGKILL)
            its_exit = handle.wait(5)
            assert (its_exit.signal, its_exit.reason, its_exit.forced) == (9, "exited", False)
            info = handle.inspect(usage=True)
            assert info.state == "lingering"
            assert info.usage is not None
            assert info.usage.processes == 2
            handles.append(handle)
        assert {each.exec_id for each in client.list_execs()} == {
            handle.exec_id for handle in handles
        }
        assert handles[0].cancel(1).outcome == "ended"
        assert not marked(words[0])
        assert len(marked(words[1])) == 2
    assert daemon.stop() == 0
    wait_for(lambda: not marked(words[1]), 1)


@pytest.mark.parametrize("leftovers", ["keep", "kill"])
def test_c21_a_server_left_behind_lives_on_only_where_asked(
    runnerd_daemon: RunnerdProcess, leftovers: Any
) -> None:
    """A dev server started with & serves the next exec under keep, and is ended under kill."""
    word = mark(8123)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 -d / >/dev/null 2>&1"
    # The mark is a second process of the same leftovers, so that they can be found.
    script = f"nohup {serve} & nohup sleep {word} >/dev/null 2>&1 & echo started"
    ask = f"import urllib.request as u;print(u.urlopen('http://127.0.0.1:{port}').status)"
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh", "-c", script], leftovers=leftovers, grace_s=1)
        assert output_of(handle) == (b"started\n", b"")
        if leftovers == "kill":
            handle.wait_closed(1 * ROOM)
            assert not marked(word)
            assert client.run([sys.executable, "-c", ask]).exit.code == 1
            return

        def is_served() -> bool:
            return client.run([sys.executable, "-c", ask]).stdout == b"200\n"

        wait_for(is_served, 10)
        assert handle.inspect().state == "lingering"
        assert handle.cancel(1).outcome == "ended"
        assert not marked(word)
        assert not is_served()


def test_c23_nothing_is_signalled_for_an_exec_that_is_no_more(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """Signals and cancels of finished, failed, unknown and just reaped execs hit nobody."""
    needs.root()
    strace = needs.program("strace")
    trace = tmp_path / "trace"
    calls = "trace=kill,tkill,tgkill,pidfd_send_signal,rt_sigqueueinfo"
    tracer = subprocess.Popen(
        [strace, "-f", "-qq", "-e", calls, "-o", str(trace), "-p", str(runnerd_daemon.pid)],
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(lambda: status_field(runnerd_daemon.pid, "TracerPid") == str(tracer.pid))
        with runnerd_daemon.connect() as client:
            bystander = client.start(["sleep", "60"], attach=False)
            finished = client.run(["true"]).exit.exec_id
            with pytest.raises(RemoteError):
                client.start(["no-such-program-anywhere"], exec_id="never")
            for _ in range(200):
                reaped = client.run(["true"]).exit.exec_id
                for exec_id in (finished, "never", "unknown", reaped):
                    _expect_nobody(client, exec_id)
            client.ping()
            assert bystander.pid is not None
            assert is_alive(bystander.pid)
            bystander.cancel(0)
    finally:
        tracer.terminate()
        tracer.communicate(timeout=10)
    sent = re.findall(r"\b(?:kill|tkill|tgkill)\((-?\d+)", trace.read_text())
    assert sent, "strace saw not even the CONT before the last cancel"
    assert [pid for pid in sent if int(pid) <= 1] == []


def _expect_nobody(client: Any, exec_id: str) -> None:
    for number in (15, 9):
        with pytest.raises(RemoteError) as refused:
            client.signal(exec_id, number)
        assert refused.value.kind in ("exec_unknown", "exec_ended")
    try:
        outcome = client.cancel(exec_id, tombstone=False).outcome
    except RemoteError as error:
        outcome = error.kind
    assert outcome in ("already_ended", "exec_unknown")


@pytest.mark.parametrize("more", [{}, {"pty": {}}], ids=["pipes", "pty"])
def test_c24_a_cancel_sent_with_the_start_is_not_lost(
    runnerd_daemon: RunnerdProcess, more: dict[str, object]
) -> None:
    """Start and cancel in one write, 1000 times: refused as cancelled or killed, none is left."""
    word = mark(60)
    cancelled = killed = 0
    with RawClient(runnerd_daemon.socket_path) as client:
        before = open_fds(runnerd_daemon.pid)
        for number in range(1000):
            exec_id = f"c24-{number}"
            start, cancel = 10_000 + 2 * number, 10_001 + 2 * number
            client.sock.sendall(
                client.encode(
                    "exec.start", {"exec_id": exec_id, "argv": ["sleep", word], **more}, start
                )
                + client.encode("exec.cancel", {"exec_id": exec_id, "grace_s": 0}, cancel)
            )
            assert client.answer(cancel)["outcome"] == "ended"
            refusal = _refusal(client, start)
            if refusal is not None:
                assert refusal == "cancelled"
                cancelled += 1
                continue
            its_exit = client.call("exec.wait", exec_id=exec_id)
            assert (its_exit["signal"], its_exit["reason"]) == (9, "cancelled")
            killed += 1
        assert cancelled + killed == 1000
        assert not marked(word)
        assert client.call("daemon.info")["pid"] == runnerd_daemon.pid
        wait_for(lambda: open_fds(runnerd_daemon.pid) <= before + 5, 2)


def _refusal(client: RawClient, request_id: int) -> str | None:
    try:
        client.answer(request_id)
    except RawError as error:
        return error.kind
    return None


def test_c25_a_deadline_that_meets_the_exit_hits_nobody_else(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Deadlines within 5 ms of the exit: one exit each, either its own or the deadline's."""
    outside = subprocess.Popen(["sleep", "600"])
    try:
        with RawClient(runnerd_daemon.socket_path, encoding=Encoding.MSGPACK) as client:
            canary = client.call("exec.start", argv=["sleep", "600"])
            waiting: list[str] = []
            for number in range(1000):
                exec_id = f"c25-{number}"
                client.send(
                    "exec.start",
                    exec_id=exec_id,
                    argv=["sleep", "0.1"],
                    deadline_s=0.095 + 0.01 * (number * 37 % 100) / 100,
                    attach={},
                )
                waiting.append(exec_id)
                if len(waiting) == 20:
                    client.note("exec.closed", waiting.pop(0))
            for exec_id in waiting:
                client.note("exec.closed", exec_id)
            exits = [
                note["params"]["exit"] for note in client.notes if note["method"] == "exec.exited"
            ]
            assert len(exits) == len({each["exec_id"] for each in exits}) == 1000
            kinds = {(each["code"], each["signal"], each["reason"]) for each in exits}
            assert kinds <= {(0, None, "exited"), (None, 15, "deadline")}
            assert is_alive(canary["pid"])
            assert outside.poll() is None
            assert client.call("daemon.info")["pid"] == runnerd_daemon.pid
    finally:
        outside.kill()
        outside.wait()


@pytest.mark.parametrize("user", [None, "nobody"])
def test_c27_a_killed_daemon_takes_its_commands_along(
    start_daemon: Callable[..., RunnerdProcess], user: str | None
) -> None:
    """With the daemon killed outright, its shims end their trees, whoever the command runs as."""
    if user is not None:
        needs.root()
    word = mark(1007)
    daemon = start_daemon()
    with daemon.connect() as client:
        client.start(["bash", "-c", f"sleep {word} & exec sleep {word}"], user=user, attach=False)
        wait_for(lambda: len(marked(word)) == 2)
        daemon.kill()
        wait_for(lambda: not marked(word), 2 * ROOM)


def test_c27_under_tini_the_container_ends_with_the_daemon(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    """In a pid namespace under tini a killed daemon is the container's end, with 137."""
    needs.root()
    unshare = [needs.program("unshare"), "--pid", "--fork", "--mount-proc", "--kill-child"]
    word = mark(1007)
    container = start_daemon(wrapper=[*unshare, needs.program("tini"), "--"])
    with container.connect() as client:
        client.start(["bash", "-c", f"sleep {word} & exec sleep {word}"], attach=False)
        wait_for(lambda: len(marked(word)) == 2)
        (tini,) = children(container.pid)
        (daemon,) = children(tini)
        os.kill(daemon, signal.SIGKILL)
        assert container.process.wait(2 * ROOM) == 137
        wait_for(lambda: not marked(word), 1)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["sh", "-c", "kill -TERM 0; sleep 5"], (None, 15)),
        (["bash", "-c", "trap '' TERM; kill -TERM -- -$$; exit 3"], (3, None)),
        (["bash", "-c", "kill -9 -$(ps -o pgid= -p $$ | tr -d ' ')"], (None, 9)),
    ],
)
def test_c29_a_command_that_signals_its_group_hits_its_own(
    runnerd_daemon: RunnerdProcess, argv: list[str], expected: tuple[int | None, int | None]
) -> None:
    """Each command has a group of its own; neither daemon nor other execs are in it."""
    needs.program("ps", "procps")
    with runnerd_daemon.connect() as client:
        canary = client.start(["sleep", "60"], attach=False)
        its_exit = client.run(argv, timeout_s=10).exit
        assert (its_exit.code, its_exit.signal, its_exit.reason) == (*expected, "exited")
        assert canary.inspect().state == "running"
        assert client.info().pid == runnerd_daemon.pid
