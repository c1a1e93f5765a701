"""The daemon outlives its own mistakes, or ends honestly.

Each fault is planted in the real daemon from outside (planted.py). A stray one costs the request,
connection or exec it met; an uncaught one takes the stop path and ends in exit code 70.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.daemon.looking import (
    PLANTED,
    TREE,
    command_name,
    last_words,
    living,
    log_lines,
    planted,
    refusal,
    seconds,
    shim_of,
    tree_of,
)
from tests.harness import REPOSITORY, RunnerdProcess, descendants, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

EX_SOFTWARE: Final = 70
STOP_S: Final = 2.0

FAIL_FOR_BAD: Final = """
from runnerd.core import execs, registry
from runnerd.daemon import observing, output_pump, readers, running, stdin_pump, tree
times = {times}
def of(thing):
    for name in ('exec', '_exec'):
        thing = getattr(thing, name, thing)
    return getattr(thing, 'exec_id', None)
original = {where}
def failing(*args, **named):
    global times
    if times and any(of(arg) == 'bad' for arg in args):
        times -= 1
        raise ValueError('planted')
    return original(*args, **named)
{where} = failing
"""

ON_ASKING: Final = """
from runnerd.daemon import methods
from runnerd.protocol.answers import Empty
def asked(call, params):
    call.answer(Empty())
    {what}
methods.HANDLERS['daemon.metrics'] = asked
"""


def strays(daemon: RunnerdProcess) -> list[dict[str, Any]]:
    return log_lines(daemon, "stray_failure")


def check_one_stray(daemon: RunnerdProcess, client: RawClient, task: str) -> None:
    """Logged once, with its traceback, counted, and the daemon serves on."""
    (line,) = strays(daemon)
    assert line["task"] == task
    assert "ValueError" in line["traceback"]
    assert "planted" in line["error"]
    assert line["level"] == "error"
    assert client.call("daemon.info")["stray_failures"] == 1
    text = metrics(client)
    assert f'runnerd_stray_failures_total{{task="{task}"}} 1.0' in text
    assert not log_lines(daemon, "uncaught_error")


def metrics(client: RawClient) -> str:
    return str(client.call("daemon.metrics")["text"])


def check_still_works(daemon: RunnerdProcess) -> None:
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="after", argv=["sh", "-c", "exit 7"])
        assert client.call("exec.wait", exec_id="after")["code"] == 7


# ---------------------------------------------------------------------------- stray failures


def test_a_handler_that_fails_costs_its_request_alone(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import methods
            def failing(call, params):
                raise ValueError('planted')
            methods.HANDLERS['exec.list'] = failing
        """)
    )
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        waiting = other.send("exec.start", argv=["sleep", "0.3"], exec_id="e")
        with pytest.raises(RawError) as caught:
            client.call("exec.list")
        assert caught.value.error["code"] == -32603
        assert caught.value.kind == "internal"
        assert set(caught.value.data) >= {"layer", "preserved", "hint", "retryable"}
        assert client.call("ping") == {}
        other.answer(waiting)
        assert other.call("exec.wait", exec_id="e")["code"] == 0
        check_one_stray(daemon, client, "request")
    check_still_works(daemon)


LATE: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "a wait": ("ends.Waiting._finish", "exec.wait", {}),
    "a cancel": ("ends._cancel_answer", "exec.cancel", {"grace_s": 0}),
    "a signal": ("methods.SignalAnswer", "exec.signal", {"signal": "URG"}),
}


@pytest.mark.parametrize("what", LATE)
def test_an_answer_that_comes_later_fails_alone(start_daemon: Start, what: str) -> None:
    """What a request leaves with an exec is not the exec's: it and other waiters go on."""
    where, method, params = LATE[what]
    daemon = start_daemon(
        **planted(f"""
            from runnerd.daemon import ends, methods
            original, times = {where}, 1
            def failing(*args, **named):
                global times
                if times:
                    times = 0
                    raise ValueError('planted')
                return original(*args, **named)
            {where} = failing
        """)
    )
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        other.call("exec.start", exec_id="e", argv=["sleep", "0.4"])
        failing = client.send(method, exec_id="e", **params)
        time.sleep(0.05)
        waiting = other.send("exec.wait", exec_id="e", until="closed")
        with pytest.raises(RawError) as caught:
            client.answer(failing, 10)
        assert caught.value.kind == "internal"
        ended = other.answer(waiting, 10)
        assert ended["reason"] == ("cancelled" if what == "a cancel" else "exited")
        check_one_stray(daemon, client, "request")


EDGES: Final = {
    "reading its output": ("output_pump.OutputPump._read", 10**9),
    "at its pipes' readiness": ("output_pump.OutputPump._readable", 10**9),
    "keeping its output": ("execs.Exec.output", 10**9),
    "draining": ("output_pump.OutputPump.drain", 10**9),
    "taking its exit": ("running.Running._exited", 1),
    "deciding on its exit": ("execs.Exec.exited", 1),
    "deciding that it has drained": ("execs.Exec.drained", 1),
    "counting its exit": ("observing.Observer.exited", 10**9),
    "telling its subscribers": ("readers.Readers.wake", 10**9),
    "counting its end": ("observing.Observer.closed", 10**9),
    "its deadline": ("running.Running._clock_ended", 10**9),
    "asking the shim to end it": ("running.Running._send_end", 10**9),
    "deciding to end it": ("execs.Exec.end", 1),
}


@pytest.mark.parametrize("what", EDGES)
def test_a_handler_of_one_exec_that_fails_ends_that_exec(start_daemon: Start, what: str) -> None:
    where, times = EDGES[what]
    daemon = start_daemon(**planted(FAIL_FOR_BAD.format(where=where, times=times)))
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        other.call("exec.start", exec_id="good", argv=TREE, attach={})
        good_pid = other.call("exec.inspect", exec_id="good")["pid"]
        good = tree_of(good_pid)
        pid = client.call(
            "exec.start", exec_id="bad", argv=["sh", "-c", "sleep 9 & echo up; sleep 0.4; exit 9"],
            attach={}, deadline_s=0.3 if "deadline" in what or "end it" in what else 5,
        )["pid"]  # fmt: skip
        bad = {pid, *descendants(pid)}
        its_exit = other.call("exec.wait", exec_id="bad")
        if what not in ("counting its exit", "counting its end", "telling its subscribers"):
            assert its_exit["reason"] == "internal", its_exit
        other.send("exec.cancel", exec_id="bad", grace_s=0)
        other.call("exec.wait", exec_id="bad", until="closed", timeout_s=5)
        bad |= {pid for pid in commands_of(daemon) if pid not in good}
        assert living(bad) == set()
        # Told as everybody else is; only the fault itself may have kept it from that.
        if what != "telling its subscribers":
            assert client.note("exec.exited", "bad")["exit"]["reason"] == its_exit["reason"]
            client.note("exec.closed", "bad")
        assert living(good) == good
        assert other.call("exec.inspect", exec_id="good")["state"] == "running"
        assert client.call("daemon.info")["live_execs"] == 1
        other.call("exec.cancel", exec_id="good", grace_s=0)
        assert not log_lines(daemon, "uncaught_error")
        first = strays(daemon)[0]
        assert first["task"] == "exec"
        assert first["exec_id"] == "bad"
        assert "planted" in first["traceback"]
        assert len(strays(daemon)) <= 4, strays(daemon)
    check_still_works(daemon)
    assert daemon.stop() == 0


@pytest.mark.parametrize("where", ["running.Running._started", "execs.Exec.started"])
def test_a_start_that_fails_inside_leaves_nothing(start_daemon: Start, where: str) -> None:
    daemon = start_daemon(**planted(FAIL_FOR_BAD.format(where=where, times=1)))
    with RawClient(daemon.socket_path) as client:
        with pytest.raises(RawError) as caught:
            client.call("exec.start", exec_id="bad", argv=TREE)
        assert caught.value.kind == "internal"
        check_one_stray(daemon, client, "exec")
        assert client.call("daemon.info")["live_execs"] == 0
        # The id is free, and nothing of the first one runs beside the second.
        pid = client.call("exec.start", exec_id="bad", argv=TREE)["pid"]
        tree = tree_of(pid)
        others = wait_for(lambda: len(commands_of(daemon)) == len(tree))
        assert others
        client.call("exec.cancel", exec_id="bad", grace_s=0)


def commands_of(daemon: RunnerdProcess) -> set[int]:
    return {
        pid
        for pid in living(descendants(daemon.pid))
        if command_name(pid) not in ("runnerd-shim", "")
    }


@pytest.mark.parametrize("where", ["tree.ShimEnder", "execs.Exec.spawned"])
def test_a_start_that_fails_between_shim_and_answer_leaves_nothing(
    start_daemon: Start, where: str
) -> None:
    daemon = start_daemon(**planted(FAIL_FOR_BAD.format(where=where, times=1)))
    with RawClient(daemon.socket_path) as client:
        with pytest.raises(RawError) as caught:
            client.call("exec.start", exec_id="bad", argv=["sleep", "900"])
        assert caught.value.kind == "internal"
        wait_for(lambda: not commands_of(daemon))
        assert client.call("daemon.info")["live_execs"] == 0
        assert client.call("exec.start", exec_id="bad", argv=["true"])["created"]


def test_a_connection_that_fails_is_closed_and_its_exec_goes_on(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import outgoing
            original = outgoing.Outgoing._take_turn
            def failing(self, subscription, running, batch):
                if running.exec.exec_id == 'bad' and self._number == 2:
                    raise ValueError('planted')
                return original(self, subscription, running, batch)
            outgoing.Outgoing._take_turn = failing
        """)
    )
    with RawClient(daemon.socket_path) as other, RawClient(daemon.socket_path) as client:
        client.send("exec.start", exec_id="bad", argv=["sh", "-c", "echo hi; sleep 0.3"], attach={})
        wait_for(lambda: strays(daemon))
        other.call("exec.attach", exec_id="bad")
        assert other.note("exec.exited", "bad")["exit"]["code"] == 0
        assert other.output("bad") == b"hi\n"
        info = other.call("daemon.info")
        assert info["connections"] == 1
        wait_for(lambda: other.call("daemon.info")["subscriptions"] == 0)
        (line,) = strays(daemon)
        assert line["task"] == "connection"
        assert "planted" in line["traceback"]
    check_still_works(daemon)


def test_a_peer_that_cannot_be_looked_at_is_refused_and_costs_nobody_else(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import server
            original, times = server.check_peer, 1
            def failing(*args):
                global times
                if times:
                    times = 0
                    raise ValueError('planted')
                original(*args)
            server.check_peer = failing
        """)
    )
    assert refusal(daemon.socket_path)["data"]["kind"] == "internal"
    with RawClient(daemon.socket_path) as client:
        check_one_stray(daemon, client, "access")


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ("unraisable", "type('Bad', (), {'__del__': lambda self: int('planted')})()"),
        ("thread", "import threading; threading.Thread(target=lambda: int('planted')).start()"),
    ],
)
def test_what_python_would_only_print_is_logged_and_counted(
    start_daemon: Start, task: str, what: str
) -> None:
    daemon = start_daemon(**planted(ON_ASKING.format(what=what).replace("metrics", "undrain")))
    with RawClient(daemon.socket_path) as client:
        client.call("daemon.undrain")
        wait_for(lambda: strays(daemon))
        check_one_stray(daemon, client, task)


def test_a_timer_of_the_daemon_that_fails_is_survived_and_comes_again(start_daemon: Start) -> None:
    daemon = start_daemon(
        "--finished-s-max", "0.2",
        **planted("""
            from runnerd.core import registry
            from runnerd.daemon import service
            service._EXPIRE_EVERY_S = 0.1
            original, calls = registry.Registry.expire, 0
            def failing(self, now_s):
                global calls
                calls += 1
                if calls == 3:  # the first two are the boot's
                    raise ValueError('planted')
                original(self, now_s)
            registry.Registry.expire = failing
        """),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        wait_for(lambda: strays(daemon))
        client.call("exec.start", exec_id="e", argv=["true"])
        client.call("exec.wait", exec_id="e")
        wait_for(lambda: not client.call("exec.list")["execs"])
        check_one_stray(daemon, client, "timer")


def test_a_refill_that_fails_costs_no_start(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import shims
            original, calls = shims.ShimPool._spawn, 0
            def failing(self):
                global calls
                calls += 1
                if calls == 4:
                    raise ValueError('planted')
                return original(self)
            shims.ShimPool._spawn = failing
        """)
    )
    with RawClient(daemon.socket_path) as client:
        for number in range(4):
            client.call("exec.start", exec_id=f"e{number}", argv=["true"])
            assert client.call("exec.wait", exec_id=f"e{number}")["code"] == 0
        wait_for(lambda: client.call("daemon.info")["parked_shims"] == 3)
        check_one_stray(daemon, client, "shim_pool")


def test_what_an_exec_makes_of_an_adopted_status_is_not_the_reapers_failure(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(
        **planted(FAIL_FOR_BAD.format(where="tree.Tree._adopted_exited", times=1))
    )
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="bad", argv=TREE)["pid"]
        tree = tree_of(pid)
        shim = shim_of(daemon, pid)
        os.kill(shim, signal.SIGKILL)
        its_exit = client.call("exec.wait", exec_id="bad", until="closed", timeout_s=10)
        assert its_exit["reason"] == "internal"
        assert living(tree) == set()
        check_one_stray(daemon, client, "exec")
    check_still_works(daemon)


def test_an_exec_that_cannot_be_ended_is_an_uncaught_error(start_daemon: Start) -> None:
    """Where the core itself fails again and again the state is unknown: 70, and all trees gone."""
    daemon = start_daemon(
        **planted(FAIL_FOR_BAD.format(where="execs.Exec.exited", times=10**9)),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        good = tree_of(client.call("exec.start", exec_id="good", argv=TREE)["pid"])
        bad = tree_of(client.call("exec.start", exec_id="bad", argv=TREE)["pid"])
        client.send("exec.cancel", exec_id="bad", grace_s=0)
        assert daemon.process.wait(10) == EX_SOFTWARE
        wait_for(lambda: living(good | bad) == set())


# --------------------------------------------------------------------------- uncaught errors

UNCAUGHT: Final = {
    "accept": """
from runnerd.daemon import server
original = server.Server._admit
def failing(self, sock, nursery):
    if FLAG:
        raise ValueError('planted')
    original(self, sock, nursery)
server.Server._admit = failing
""",
    "poller": """
from runnerd.daemon import poller
original = poller.Poller._run_timers
def failing(self):
    if FLAG:
        FLAG.clear()
        raise ValueError('planted')
    original(self)
poller.Poller._run_timers = failing
""",
    "poller, every time": """
from runnerd.daemon import poller
original = poller.Poller._run_timers
def failing(self):
    if FLAG:
        raise ValueError('planted')
    original(self)
poller.Poller._run_timers = failing
""",
    "reaper": """
from runnerd.daemon import reaper
original = reaper.Reaper.reap
def failing(self):
    if FLAG:
        FLAG.clear()
        raise ValueError('planted')
    return original(self)
reaper.Reaper.reap = failing
""",
    "guard": """
from runnerd.daemon import guard
original = guard.NativeGuard.refused
def failing(self):
    if FLAG:
        FLAG.clear()
        raise ValueError('planted')
    return original(self)
guard.NativeGuard.refused = failing
""",
    "loop": """
from runnerd.daemon import poller
original = poller.Poller._run_timers
class PlantedExit(BaseException):
    pass
def failing(self):
    if FLAG:
        raise PlantedExit('planted')
    original(self)
poller.Poller._run_timers = failing
""",
    "loop, inside trio": "def asked_more():\n"
    "    trio.lowlevel.current_trio_token().run_sync_soon(int, 'planted')\n",
}

TRIGGER: Final = """
import os
import trio
from runnerd.daemon import methods
from runnerd.protocol.answers import Empty
FLAG = []
def asked_more():
    pass
def asked(call, params):
    call.answer(Empty())
    FLAG.append(1)
    asked_more()
methods.HANDLERS['daemon.undrain'] = asked
"""


def provoke(daemon: RunnerdProcess, client: RawClient, what: str) -> None:
    client.call("daemon.undrain")
    if what == "accept":
        RawClient(daemon.socket_path, hello=False).sock.close()
    elif what == "guard":
        client.send("exec.start", argv=["sh", "-c", f"kill -TERM {daemon.pid}; sleep 9"])
    else:
        with contextlib.suppress(BrokenPipeError):  # it may be too late for that
            client.send("exec.start", argv=["true"])


@pytest.mark.parametrize("what", UNCAUGHT)
def test_an_uncaught_error_takes_the_stop_path_and_exits_70(
    start_daemon: Start, tmp_path: Path, what: str
) -> None:
    state = tmp_path / "state"
    daemon = start_daemon("--state-dir", str(state), **planted(TRIGGER + UNCAUGHT[what]))
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as watcher:
        pid = watcher.call("exec.start", exec_id="e", argv=TREE, attach={})["pid"]
        tree = tree_of(pid)
        provoke(daemon, client, what)
        took_s, code = seconds(lambda: daemon.process.wait(10))
        print(f"{what}: gone after {took_s:.3f} s")
        assert code == EX_SOFTWARE
        assert took_s < STOP_S + 0.3
        wait_for(lambda: living(tree) == set(), 2)
        assert not Path(daemon.socket_path).exists()
        assert not Path(daemon.socket_path + ".lock").exists()
        if not what.startswith("loop") and what != "poller, every time":
            with contextlib.suppress(ClosedError):  # all it was told, in whatever order
                while True:
                    watcher.receive(5)
            assert watcher.note("exec.exited", "e", 5)["exit"]["reason"] == "stopped"
            assert [note["params"]["cause"] for note in watcher.notes
                    if note["method"] == "daemon.stopping"] == ["error"]  # fmt: skip
    first, *more = log_lines(daemon, "uncaught_error")
    assert first["where"] == what.partition(",")[0]
    assert first["first"] is True
    assert "planted" in first["traceback"]
    assert not any(line["first"] for line in more)
    if not what.startswith("loop"):
        (stopping,) = log_lines(daemon, "stopping")
        assert stopping["cause"] == "error"
        assert stopping["code"] == EX_SOFTWARE
    words = last_words(state)
    assert words["cause"] == "error"
    assert words["code"] == EX_SOFTWARE
    assert "e" in words["live_execs"]
    assert words["stopped_at"] >= words["stopping_at"] >= words["ready_at"]


def test_a_second_error_or_signal_during_the_stop_starts_nothing_new(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(
        "--state-dir", str(tmp_path), **planted(TRIGGER + UNCAUGHT["poller, every time"])
    )
    stubborn = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"]
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=stubborn, attach={})
        client.note("exec.output", "e")
        client.call("daemon.undrain")
        client.send("exec.start", argv=["true"])
        began_s = time.monotonic()
        wait_for(lambda: log_lines(daemon, "stopping"))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            daemon.process.send_signal(number)
            time.sleep(0.1)
        assert daemon.process.wait(10) == EX_SOFTWARE
        assert time.monotonic() - began_s < STOP_S + 0.3
    assert len(log_lines(daemon, "stopping")) == 1
    assert len(log_lines(daemon, "uncaught_error")) >= 2
    assert last_words(tmp_path)["cause"] == "error"


def test_an_error_during_a_stop_does_not_change_its_code(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(
        "--state-dir", str(tmp_path),
        **planted("""
            from runnerd.daemon import run
            async def failing(*args):
                raise ValueError('planted')
            run.stop = failing
        """),
    )  # fmt: skip
    with RawClient(daemon.socket_path) as client:
        tree = tree_of(client.call("exec.start", exec_id="e", argv=TREE)["pid"])
        took_s, code = seconds(daemon.stop)
        assert code == 0
        assert took_s < STOP_S + 0.3
        wait_for(lambda: living(tree) == set(), 2)
    (line,) = log_lines(daemon, "uncaught_error")
    assert line["first"] is False
    assert last_words(tmp_path)["cause"] == "SIGTERM"


def test_an_error_before_the_loop_runs_exits_70_and_leaves_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    done = subprocess.run(
        [*PLANTED, "serve", "--socket", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "PLANTED": "import runnerd.daemon.run as r\nr.Reaper = None"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == EX_SOFTWARE
    assert b"uncaught_error" in done.stderr
    assert list(tmp_path.iterdir()) == []
