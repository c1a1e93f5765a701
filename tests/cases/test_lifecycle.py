"""Cases of the group `lifecycle`: starting, stopping in time, and what a stop does to all else."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.protocol.framing import Encoding
from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.field import (
    ROOM,
    STOP_ROOM_S,
    STOP_S,
    is_stopped,
    mark,
    marked,
    open_fds,
    rounds,
    timed,
)
from tests.harness import (
    REPOSITORY,
    RunnerdProcess,
    children,
    is_alive,
    wait_for,
    with_default_signals,
)
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Daemons = Callable[..., RunnerdProcess]


def test_c135_a_term_at_any_moment_of_the_start(tmp_path: Path) -> None:
    """TERM 0 to 300 ms after the start, to tini or to the daemon: gone in time, nothing left.

    143 only where the signal came before anybody could have a handler for it.
    """
    tini = needs.program("tini")
    word = mark(1011)
    count = rounds(300, 60)
    for number in range(count):
        folder = tmp_path / f"r{number}"
        folder.mkdir()
        path = folder / "runnerd.sock"
        words = [tini, "-s", "--", sys.executable, "-m", "runnerd.daemon.main", "serve"]
        outer = subprocess.Popen(
            [*words, "--socket", str(path), "--state-dir", str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=with_default_signals,  # noqa: PLW1509  # see the harness
        )
        over = threading.Event()
        early = threading.Thread(target=_early_client, args=(str(path), word, over))
        early.start()
        time.sleep(0.3 * number / count)  # the case itself: every moment of the start in turn
        target = outer.pid
        if number % 2:
            (target,) = wait_for(functools.partial(children, outer.pid))
        began_s = time.monotonic()
        os.kill(target, signal.SIGTERM)
        code = outer.wait(10)
        took_s = time.monotonic() - began_s
        over.set()
        early.join()
        _, stderr = outer.communicate()
        assert code in (0, 143, -signal.SIGTERM), (code, stderr)
        assert took_s < STOP_S + STOP_ROOM_S
        assert b"Traceback" not in stderr, stderr
        if code == 0:
            assert [each.name for each in folder.iterdir() if "sock" in each.name] == []
    wait_for(lambda: not marked(word), STOP_S)


def _early_client(path: str, word: str, over: threading.Event) -> None:
    while not over.wait(0.005):
        with (
            contextlib.suppress(OSError, ClosedError, RawError),
            RawClient(path) as client,
        ):
            while True:
                client.call("exec.start", argv=["sleep", word])


@pytest.mark.parametrize(
    "repeats",
    [
        [signal.SIGTERM],
        [signal.SIGINT],
        [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT] * 50,
    ],
)
def test_c136_a_repeated_signal_changes_nothing(
    start_daemon: Daemons, repeats: list[signal.Signals]
) -> None:
    """A second TERM neither restarts nor shortens the stop; what is said meanwhile arrives."""
    script = 'trap "sleep 1; echo bye; exit 0" TERM; echo up; while :; do sleep 0.05; done'
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="c136", argv=["bash", "-c", script], attach={})
        client.note("exec.output", "c136")
        began_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        while client.receive(5)["method"] != "daemon.stopping":
            pass  # the shell may have a word to say about the sleep that TERM has ended
        time.sleep(max(0.0, 0.1 - (time.monotonic() - began_s)))
        for number in repeats:
            daemon.process.send_signal(number)
        its_exit = client.note("exec.exited", "c136")["exit"]
        assert (its_exit["code"], its_exit["reason"]) == (0, "stopped")
        assert client.output("c136") == b"up\nbye\n"
        assert daemon.process.wait(10) == 0
        took_s = time.monotonic() - began_s
    assert 1.0 <= took_s < STOP_S + STOP_ROOM_S
    log = daemon.log_path.read_text()
    assert "Traceback" not in log
    assert log.count('"stopping"') == 1


def test_c138_starts_that_meet_the_stop_are_refused_or_ended(start_daemon: Daemons) -> None:
    """20 clients start commands all through the stop: no command outlives it."""
    word = mark(1000)
    for _ in range(rounds(50, 8)):
        daemon = start_daemon()
        refusals: list[str] = []
        threads = [
            threading.Thread(target=_start_till_closed, args=(daemon.socket_path, word, refusals))
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(marked(word)) >= 20, 20)
        took_s, code = timed(daemon.stop)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert code == 0
        assert took_s < STOP_S + STOP_ROOM_S
        assert set(refusals) <= {"stopping", "cancelled", "busy"}, set(refusals)
        wait_for(lambda: not marked(word), 0.5)


def _start_till_closed(path: str, word: str, refusals: list[str]) -> None:
    with (
        contextlib.suppress(ClosedError, OSError),
        RawClient(path, encoding=Encoding.MSGPACK) as client,
    ):
        while True:
            try:
                client.call("exec.start", argv=["sleep", word])
            except RawError as error:
                refusals.append(error.kind)
                time.sleep(0.01)  # refused: no reason to be quicker than the daemon's others


@pytest.mark.parametrize(
    ("script", "count", "within_s"),
    [
        ("", 0, 0.3),
        ("exec sleep 1000", 5, 0.5),
        ('trap "sleep 0.3; exit 0" TERM; echo up; while :; do sleep 0.05; done', 5, 0.8),
    ],
)
def test_c139_a_stop_takes_no_longer_than_it_must(
    start_daemon: Daemons, script: str, count: int, within_s: float
) -> None:
    """The two seconds are a limit and no sleep: the daemon leaves once all are gone."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        for number in range(count):
            client.call("exec.start", exec_id=f"{number}", argv=["bash", "-c", script], attach={})
            if "up" in script:
                client.note("exec.output", f"{number}")
        took_s, code = timed(daemon.stop)
    assert code == 0
    assert took_s < within_s * ROOM
    assert took_s < STOP_S


IGNORING = "trap '' TERM HUP INT;"
STOP_SLEEP = "until grep -q sleep /proc/$!/comm; do :; done; kill -STOP $!;"


def test_c141_trees_that_ignore_everything_do_not_hold_the_stop_up(start_daemon: Daemons) -> None:
    """Deaf trees of every shape and a client that never reads: 2.0 s, all gone, all told."""
    word = mark(1012)
    scripts = {
        "member": f"{IGNORING} sleep {word} & sleep {word}; :",
        "setsid": f"{IGNORING} setsid sleep {word} & sleep {word}; :",
        "forked": f"{IGNORING} (setsid sh -c '(sleep {word}; :) & sleep 0') & sleep {word}; :",
        "stopped": f"{IGNORING} sleep {word} & {STOP_SLEEP} kill -STOP $$; sleep {word}",
        "terminal": f"{IGNORING} sleep {word} & sleep {word}; :",
        "talking": f"{IGNORING} sleep {word} & yes",
    }
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as deaf:
        for name, script in scripts.items():
            argv = ["bash", "-c", script]
            if name == "talking":
                # Attached by a client that never reads again, so that the command waits too.
                deaf.call("exec.start", exec_id=name, argv=argv, attach={})
                continue
            more: dict[str, Any] = {"pty": {}} if name == "terminal" else {}
            client.call("exec.start", exec_id=name, argv=argv, attach={}, **more)
        wait_for(lambda: len(marked(word)) == 10)
        pid = client.call("exec.inspect", exec_id="stopped")["pid"]
        wait_for(lambda: is_stopped(pid))
        began_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        for name in scripts:
            if name != "talking":
                its_exit = client.note("exec.exited", name, 5)["exit"]
                assert (its_exit["signal"], its_exit["reason"]) == (9, "stopped"), name
                assert its_exit["forced"]
        assert daemon.process.wait(10) == 0
        took_s = time.monotonic() - began_s
        assert 1.5 <= took_s < STOP_S + STOP_ROOM_S
        assert not marked(word)
    last = daemon.log_path.read_text().splitlines()[-1]
    assert '"stopped"' in last
    assert '"forced":6' in last.replace(" ", "")


BUSY = """
import hashlib, importlib, logging, sys, threading, time
def work():
    while True:
        hashlib.sha256(b'x' * 4096).hexdigest()
        logging.getLogger('busy').debug('x')
        importlib.import_module('json.decoder')
        time.sleep(0.01)
for _ in range(50):
    threading.Thread(target=work, daemon=True).start()
sys.argv = ['runnerd'] + sys.argv[1:]
from runnerd.daemon.main import main
main()
"""


def test_c142_busy_threads_in_the_daemon_hold_no_start_up(start_daemon: Daemons) -> None:
    """Starts with everything set, beside 50 threads that hash, log and import: none is slow."""
    needs.root()
    # The wrapper takes the place of `python -m runnerd.daemon.main` and keeps its arguments.
    shift = f'shift 3; exec "{sys.executable}" -c "$BUSY" "$@"'
    daemon = start_daemon(env={"BUSY": BUSY}, wrapper=["sh", "-c", shift, "sh"])
    assert len([*Path(f"/proc/{daemon.pid}/task").iterdir()]) > 50
    slowest_s = 0.0
    with daemon.connect() as client:
        for _ in range(rounds(3000, 600)):
            took_s, handle = timed(
                lambda: client.start(
                    ["true"],
                    user="nobody",
                    cwd="/tmp",
                    umask=0o077,
                    oom_score_adj=950,
                    pty=Pty(),
                )
            )
            slowest_s = max(slowest_s, took_s)
            assert handle.wait(10).code == 0
    assert slowest_s < 1.0 * ROOM


def _grandchildren(pid: int) -> set[int]:
    return set[int]().union(*map(children, children(pid)))


_SEIZE, _INTERRUPT, _WALL = 0x4206, 0x4207, 0x40000000  # ptrace(2), wait(2)


def _hold(pid: int) -> None:
    """Have a process of others stand still, CONT or not, by tracing it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (_SEIZE, _INTERRUPT):
        arguments = (ctypes.c_long(each) for each in (request, pid, 0, 0))
        assert libc.ptrace(*arguments) == 0, os.strerror(ctypes.get_errno())
    assert os.WIFSTOPPED(os.waitpid(pid, _WALL)[1])


def test_c142_a_shim_that_hangs_is_given_up_after_five_seconds(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """Half-made commands that never reach execve: start_timeout, killed, and nobody waits."""
    needs.root()
    daemon = runnerd_daemon
    with RawClient(daemon.socket_path) as client, daemon.connect() as other:
        wait_for(lambda: other.info().parked_shims == 3)
        shims = children(daemon.pid)
        parked = wait_for(
            lambda: len(found := set[int]().union(*map(children, shims))) == 3 and found
        )
        fds = open_fds(daemon.pid)
        for pid in parked:
            _hold(pid)
        began_s = time.monotonic()
        start = {"argv": ["true"], "admission": "skip"}  # the last one parked too
        sent = [client.send("exec.start", exec_id=f"{n}", **start) for n in range(3)]
        took_s, _ = timed(other.ping)
        assert took_s < 0.2 * ROOM
        wait_for(lambda: len(other.list_execs()) == 3)
        took_s, done = timed(lambda: other.run(["true"]))
        assert done.exit.code == 0
        assert took_s < 1.0 * ROOM
        for request_id in sent:
            with pytest.raises(RawError) as refused:
                client.answer(request_id)
            assert refused.value.kind == "start_timeout"
        assert 4.9 < time.monotonic() - began_s < 5.0 + 0.5 * ROOM
        for pid in parked:  # a tracer is told of the death first
            assert os.WTERMSIG(os.waitpid(pid, _WALL)[1]) == signal.SIGKILL
        wait_for(lambda: not any(map(is_alive, parked | shims)))
        wait_for(lambda: open_fds(daemon.pid) <= fds)
        assert other.info().live_execs == 0
        assert client.call("exec.start", exec_id="0", argv=["true"])["created"]  # the id is free


def test_c142_nothing_of_ours_uses_preexec_fn() -> None:
    """The daemon starts processes by posix_spawn alone."""
    for source in (REPOSITORY / "runnerd").rglob("*.py"):
        assert "preexec_fn" not in source.read_text(), source
