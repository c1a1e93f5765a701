"""The stop: whatever asks for it, everything ends in time and with the intended code."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.daemon.looking import (
    TREE,
    last_words,
    living,
    log_lines,
    planted,
    seconds,
    shim_of,
    shims,
    tree_of,
)
from tests.harness import REPOSITORY, RUNNERD, RunnerdProcess, wait_for
from tests.raw import ClosedError, RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

SLACK: Final = 3 if os.environ.get("CI") else 2  # other tests may use the same two cores
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
STUBBORN: Final = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 9; done"]
LOUD_AT_STOP: Final = ("warning", "error")

HOLD: Final = """
from runnerd.daemon import methods
def hold(call, params):
    {how}
methods.HANDLERS['daemon.undrain'] = hold
"""
HOLDS: Final = {
    "a busy loop": "while True: pass",
    "a regex with the GIL": "import re; re.match(r'(a*)*b', 'a' * 64)",
}


def quiet(daemon: RunnerdProcess) -> None:
    """A stop that goes well says nothing that an operator would have to look at."""
    assert [line for line in log_lines(daemon) if line["level"] in LOUD_AT_STOP] == []


@pytest.mark.parametrize("cause", [*SIGNALS, "daemon.stop"], ids=str)
def test_whoever_asks_for_it_a_stop_ends_everything_and_tells(
    start_daemon: Start, tmp_path: Path, cause: signal.Signals | str
) -> None:
    daemon = start_daemon("--state-dir", str(tmp_path))
    with RawClient(daemon.socket_path) as client, RawClient(daemon.socket_path) as other:
        pid = client.call("exec.start", exec_id="e", argv=TREE, attach={})["pid"]
        tree = tree_of(pid)
        waiting = other.send("exec.wait", exec_id="e")
        if isinstance(cause, signal.Signals):
            daemon.process.send_signal(cause)
        else:
            other.call("daemon.stop")
        took_s, code = seconds(lambda: daemon.process.wait(10))
        print(f"{cause}: gone after {took_s:.3f} s")
        assert code == 0
        assert took_s < 0.3 * SLACK
        assert living(tree) == set()
        name = cause.name if isinstance(cause, signal.Signals) else cause
        for each in (client, other):
            with contextlib.suppress(ClosedError):
                while True:
                    each.receive(5)
            (note,) = [note for note in each.notes if note["method"] == "daemon.stopping"]
            assert note["params"] == {"cause": name, "deadline_s": 2.0}
        its_exit = other.answers.pop(waiting)["result"]
        assert (its_exit["reason"], its_exit["signal"]) == ("stopped", signal.SIGTERM)
        assert client.note("exec.exited", "e")["exit"] == its_exit
        client.note("exec.closed", "e")
    assert not Path(daemon.socket_path).exists()
    words = last_words(tmp_path)
    assert (words["cause"], words["code"]) == (name, 0)
    assert (words["live_execs"], words["live_total"]) == (["e"], 1)
    assert words["started_at"] <= words["ready_at"] <= words["stopping_at"] <= words["stopped_at"]
    quiet(daemon)


def test_the_first_cause_wins_and_new_work_is_refused(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon("--state-dir", str(tmp_path))
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=STUBBORN, attach={})
        client.note("exec.output", "e")
        began_s = time.monotonic()
        daemon.process.send_signal(signal.SIGQUIT)
        wait_for(lambda: log_lines(daemon, "stopping"))
        with pytest.raises(RawError) as caught:
            client.call("exec.start", argv=["true"])
        assert caught.value.kind == "stopping"
        for number in SIGNALS:
            daemon.process.send_signal(number)
        client.call("daemon.stop")
        with pytest.raises(OSError, match=r"refused|No such"):
            RawClient(daemon.socket_path)
        assert daemon.process.wait(10) == 0
        assert time.monotonic() - began_s < 2.2 * SLACK
        its_exit = client.note("exec.exited", "e")["exit"]
        assert (its_exit["reason"], its_exit["forced"]) == ("stopped", True)
    assert len(log_lines(daemon, "stopping")) == 1
    assert last_words(tmp_path)["cause"] == "SIGQUIT"


def test_twenty_commands_that_heed_term_are_gone_within_0_3_s(start_daemon: Start) -> None:
    figures = []
    for _ in range(5):
        daemon = start_daemon()
        with RawClient(daemon.socket_path) as client:
            trees = set()
            for number in range(20):
                pid = client.call("exec.start", exec_id=f"e{number}", argv=["sleep", "900"])["pid"]
                trees.add(pid)
            took_s, code = seconds(daemon.stop)
            assert code == 0
            assert living(trees) == set()
        quiet(daemon)
        figures.append(took_s)
    print("20 cooperating commands:", " ".join(f"{took_s:.3f}" for took_s in figures), "s")
    assert statistics.median(figures) < 0.3 * SLACK


def test_commands_that_ignore_term_are_gone_by_the_deadline(start_daemon: Start) -> None:
    figures = []
    for _ in range(3):
        daemon = start_daemon()
        with RawClient(daemon.socket_path) as client:
            for number in range(3):
                client.call("exec.start", exec_id=f"e{number}", argv=STUBBORN, attach={})
                client.note("exec.output", f"e{number}")
            trees = {pid for shim in shims(daemon) for pid in tree_of(shim, 1)}
            took_s, code = seconds(daemon.stop)
            assert code == 0
            assert living(trees) == set()
            for number in range(3):
                its_exit = client.note("exec.exited", f"e{number}")["exit"]
                assert (its_exit["signal"], its_exit["forced"]) == (signal.SIGKILL, True)
        quiet(daemon)
        figures.append(took_s)
    print("commands that ignore TERM:", " ".join(f"{took_s:.3f}" for took_s in figures), "s")
    assert min(figures) > 1.4
    assert max(figures) < 2.1 + 0.1 * SLACK


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("stubborn", [False, True], ids=["heeding TERM", "ignoring TERM"])
def test_whatever_python_does_the_daemon_and_its_commands_are_gone_at_2_s(
    start_daemon: Start, tmp_path: Path, how: str, stubborn: bool
) -> None:
    daemon = start_daemon(
        "--state-dir", str(tmp_path / "state"), **planted(HOLD.format(how=HOLDS[how]))
    )
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=STUBBORN if stubborn else TREE, attach={})
        client.note("exec.output", "e")
        pid = client.call("exec.inspect", exec_id="e")["pid"]
        tree = tree_of(pid, 2 if stubborn else 4)
        client.send("daemon.undrain")
        wait_for(lambda: is_busy(daemon.pid))
        time.sleep(0.2)
        began_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        if not stubborn:
            wait_for(lambda: living(tree) == set(), 1)  # the lifeline ends at once, not at 2 s
        code = daemon.process.wait(10)
        took_s = time.monotonic() - began_s
        print(f"{how}: gone after {took_s:.3f} s")
        assert code == 0
        assert 1.9 < took_s < 2.1 + 0.1 * SLACK
        wait_for(lambda: living(tree) == set(), 0.5)
    words = last_words(tmp_path / "state")
    assert words["ready_at"]
    assert words["stopping_at"] is None  # nobody was there to write it; the next one tells
    again = start_daemon("--state-dir", str(tmp_path / "state"), place=daemon.log_path.parent)
    (line,) = log_lines(again, "died_before")
    assert line["pid"] == daemon.pid


def is_busy(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "R"


def test_the_twin_without_the_native_guard_ends_late_and_with_the_wrong_code(
    start_daemon: Start,
) -> None:
    """The stand-in is what a busy interpreter delays: that the tests above can fail."""
    code = "from runnerd.daemon import guard\nguard.NativeGuard.__init__ = missing\n"
    daemon = start_daemon(
        **planted(
            "def missing(self): raise OSError('not here')\n"
            + code
            + HOLD.format(how=HOLDS["a regex with the GIL"])
        )
    )
    with RawClient(daemon.socket_path) as client:
        info = client.call("daemon.info")
        assert info["guard"] == "fallback: not here"
        assert any("stand-in" in warning for warning in info["warnings"])
        pid = client.call("exec.start", argv=TREE)["pid"]
        client.send("daemon.undrain")
        wait_for(lambda: is_busy(daemon.pid))
        time.sleep(0.2)
        tree = tree_of(pid)
        assert daemon.stop() == -signal.SIGALRM  # its thread never got the GIL
        wait_for(lambda: living(tree) == set(), 2)


def test_the_stand_in_stops_as_well_where_python_is_free(start_daemon: Start) -> None:
    daemon = start_daemon(
        **planted("""
            from runnerd.daemon import guard
            def missing(self):
                raise OSError('not here')
            guard.NativeGuard.__init__ = missing
        """)
    )
    with RawClient(daemon.socket_path) as client:
        tree = tree_of(client.call("exec.start", argv=TREE)["pid"])
        took_s, code = seconds(lambda: daemon.stop(signal.SIGINT))
        assert code == 0
        assert took_s < 0.3 * SLACK
        assert living(tree) == set()


def test_a_loop_that_hears_of_it_late_still_leaves_by_itself(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(
        "--state-dir", str(tmp_path), **planted(HOLD.format(how="import time; time.sleep(0.8)"))
    )
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", exec_id="e", argv=STUBBORN, attach={})
        client.note("exec.output", "e")
        client.send("daemon.undrain")
        time.sleep(0.2)
        took_s, code = seconds(daemon.stop)
        assert code == 0
        assert took_s < 2.0 + 0.1 * SLACK
    assert not Path(daemon.socket_path).exists()
    assert last_words(tmp_path)["stopped_at"]


def test_a_client_that_reads_nothing_holds_the_stop_no_longer_than_1_8_s(
    start_daemon: Start,
) -> None:
    daemon = start_daemon("--spool", "off")  # else `yes` runs on, and the other one does not read
    with RawClient(daemon.socket_path) as stuck, RawClient(daemon.socket_path) as other:
        stuck.call("exec.start", exec_id="e", argv=["sh", "-c", "yes; :"], attach={}, flow="block")
        time.sleep(0.3)  # its socket is full by now
        other.call("exec.attach", exec_id="e", after="tail")
        pid = other.call("exec.inspect", exec_id="e")["pid"]
        took_s, code = seconds(daemon.stop)
        print(f"a stuck client: gone after {took_s:.3f} s")
        assert code == 0
        assert took_s < 1.95 + 0.1 * SLACK
        assert living({pid}) == set()
        assert other.note("exec.exited", "e")["exit"]["reason"] == "stopped"


def test_a_killed_daemon_leaves_no_tree_and_the_next_one_tells(
    start_daemon: Start, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    daemon = start_daemon("--state-dir", str(state))
    with RawClient(daemon.socket_path) as client:
        trees: set[int] = set()
        for _ in range(3):
            trees |= tree_of(client.call("exec.start", argv=TREE)["pid"])
        client.call("exec.start", exec_id="e", argv=STUBBORN, attach={})
        client.note("exec.output", "e")
        stubborn = tree_of(client.call("exec.inspect", exec_id="e")["pid"], 2)
        all_shims = shims(daemon)
        began_s = time.monotonic()
        daemon.kill()
        wait_for(lambda: living(trees) == set(), 1)
        wait_for(lambda: living(stubborn | all_shims) == set(), 3)
        print(f"killed: all gone after {time.monotonic() - began_s:.3f} s")
    assert Path(daemon.socket_path).exists()  # stale; the next one replaces it
    again = start_daemon("--state-dir", str(state), place=daemon.log_path.parent)
    (line,) = log_lines(again, "died_before")
    assert (line["pid"], line["stopping_at"]) == (daemon.pid, None)
    with RawClient(again.socket_path) as client:
        assert client.call("ping") == {}
    again.stop()
    assert last_words(state)["pid"] == again.pid
    third = start_daemon("--state-dir", str(state), place=daemon.log_path.parent)
    assert log_lines(third, "died_before") == []  # the one before it was asked to stop


def test_a_start_in_flight_does_not_hold_the_stop(start_daemon: Start) -> None:
    """What fails to start because of the stop ends it as well as what ran."""
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        client.call("exec.start", argv=["true"])
        for each in shims(daemon):
            with contextlib.suppress(ProcessLookupError):  # the one of `true` is about to leave
                os.kill(each, signal.SIGSTOP)
        client.send("ping")
        for number in range(6):
            client.send("exec.start", exec_id=f"e{number}", argv=["sleep", "900"])
        daemon.process.send_signal(signal.SIGTERM)
        took_s, code = seconds(lambda: daemon.process.wait(10))
        assert code == 0
        assert took_s < 1.0 * SLACK


def test_a_term_of_an_own_descendant_is_logged_counted_and_not_obeyed(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        senders = (["sh", "-c"], ["setsid", "sh", "-c"], ["sh", "-c", '(sh -c "$0" &)'])
        total = 0
        for name in ("TERM", "INT", "HUP", "QUIT"):
            for sender in senders:
                argv = [*sender, f"kill -{name} {daemon.pid}; sleep 9"]
                client.call("exec.start", argv=argv)
                total += 1
                assert wait_for(functools.partial(is_refused, client, total))
        line = log_lines(daemon, "signal_refused")[-1]
        assert line["signal"] == signal.SIGQUIT
        assert daemon.process.poll() is None
        assert daemon.stop() == 0
    assert log_lines(daemon, "stopping")[0]["cause"] == "SIGTERM"


def is_refused(client: RawClient, total: int) -> bool:
    return refused(client) == total


def refused(client: RawClient) -> int:
    text = client.call("daemon.metrics")["text"]
    found = re.search(r"^runnerd_signals_refused_total (\S+)", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_fifty_stops_end_with_the_intended_code(tmp_path: Path) -> None:
    """At any moment of its life, boot included; the code is 0 and nothing else."""
    figures = []
    for number in range(50):
        place = tmp_path / str(number)
        place.mkdir()
        daemon = RunnerdProcess(place)
        try:
            with RawClient(daemon.socket_path) as client:
                for _ in range(number % 4):
                    client.send("exec.start", argv=["sleep", "900"])
                took_s, code = seconds(functools.partial(daemon.stop, SIGNALS[number % 4]))
        finally:
            daemon.kill()
        figures.append(took_s)
        assert code == 0, f"stop {number}"
        assert not Path(daemon.socket_path).exists()
    print(f"50 stops: median {statistics.median(figures):.3f}, most {max(figures):.3f} s")
    assert max(figures) < 2.1 * SLACK


def test_a_stop_during_boot_is_one_too(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / f"s{number}"
        process = subprocess.Popen(
            [*RUNNERD, "serve", "--socket", str(path), "--log-level", "error"], cwd=REPOSITORY
        )
        # From the moment on when it has the name that the guard's set-up is followed by.
        wait_for(functools.partial(catches_term, process.pid))
        time.sleep(0.02 * number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not path.exists()


def catches_term(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\S+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


EXITS: Final = {
    "bad usage": (["serve", "--no-such-option"], {}, 64),
    "no command": ([], {}, 64),
    "a bad number": (["serve", "--connections-max", "many"], {}, 64),
    "a bad number in a variable": (["serve"], {"RUNNERD_CONNECTIONS_MAX": "many"}, 78),
    "a limit of 0": (["serve", "--connections-max", "0"], {}, 78),
    "a token in the environment": (["serve"], {"RUNNERD_TOKEN": "x"}, 78),
    "no such user": (["serve", "--user", "no-such-user"], {}, 78),
    "a bad mode": (["serve", "--socket-mode", "rw"], {}, 78),
    "a relative directory": (["serve", "--cwd", "here"], {}, 78),
    "no shim": (["serve", "--shim", "/nonexistent"], {}, 78),
    "no such directory": (["serve", "--socket", "/nonexistent/a/b"], {}, 73),
    "a path too long": (["serve", "--socket", "/tmp/" + "x" * 110], {}, 73),
    "no such owner": (["serve", "--socket-owner", "no-such-user"], {}, 73),
    "help": (["serve", "--help"], {}, 0),
    "version": (["--version"], {}, 0),
}


@pytest.mark.parametrize("what", EXITS)
def test_each_way_not_to_serve_has_its_exit_code(tmp_path: Path, what: str) -> None:
    words, env, code = EXITS[what]
    if words[:1] == ["serve"] and "--socket" not in words:
        words = [*words, "--socket", str(tmp_path / "s")]
    done = subprocess.run(
        [sys.executable, "-m", "runnerd.daemon.main", *words],
        cwd=REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.splitlines()[0].startswith("runnerd: ")
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_shim_is_woken_for_the_stop(start_daemon: Start) -> None:
    daemon = start_daemon()
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=TREE)["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGSTOP)
        took_s, code = seconds(daemon.stop)
        assert code == 0
        assert took_s < 0.3 * SLACK
        assert living(tree) == set()
