"""What an exit says that a command used, and where its time went."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests import needs
from tests.cases.field import mark
from tests.daemon.looking import TREE, TREE_SIZE, planted, shim_of, tree_of
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]

PHASES = ("queued", "spawned", "started", "first_byte", "exited", "drained")
USED = ("cpu_user_s", "cpu_system_s", "peak_rss_bytes", "minor_faults", "major_faults",
        "block_reads", "block_writes")  # fmt: skip


def exit_of(client: RawClient, exec_id: str) -> dict[str, Any]:
    return client.call("exec.wait", exec_id=exec_id)


def test_the_phases_are_all_there_and_in_their_order(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        script = "sleep 0.2; echo x; sleep 0.2"
        client.call("exec.start", exec_id="p", argv=["sh", "-c", script])
        phases = exit_of(client, "p")["phases"]
    times = [phases[f"{name}_ms"] for name in PHASES]
    assert times == sorted(times)
    assert times[0] >= 0
    assert phases.keys() == {f"{name}_ms" for name in PHASES}
    assert 200 <= phases["first_byte_ms"] - phases["started_ms"] < 2000
    assert 200 <= phases["exited_ms"] - phases["first_byte_ms"] < 2000


def test_a_phase_that_did_not_happen_has_no_time(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="p", argv=["true"])
        assert exit_of(client, "p")["phases"]["first_byte_ms"] is None


@pytest.mark.parametrize("is_shim_killed", [False, True])
def test_what_was_used_is_the_kernels_figures(
    runnerd_daemon: RunnerdProcess, is_shim_killed: bool
) -> None:
    """Of the command and the children it waited for, also where the daemon itself reaped it."""
    block = "bytearray(80 << 20)"
    script = f"import os, time; x = {block}; os.wait() if os.fork() else x.copy() and os._exit(0)"
    spin = "\nwhile time.process_time() < 0.3: pass"
    argv = ["python3", "-c", script + spin + "\nprint(flush=True); time.sleep(60)"]
    with RawClient(runnerd_daemon.socket_path) as client:
        started = client.call("exec.start", exec_id="u", argv=argv, attach={}, grace_s=0)
        client.note("exec.output", "u")
        if is_shim_killed:
            os.kill(shim_of(runnerd_daemon, started["pid"]), signal.SIGKILL)
        else:
            os.kill(started["pid"], signal.SIGKILL)
        its_exit = exit_of(client, "u")
    assert its_exit["signal"] == signal.SIGKILL
    assert all(its_exit[name] is not None for name in USED)
    assert its_exit["cpu_user_s"] + its_exit["cpu_system_s"] >= 0.3
    assert 160 << 20 < its_exit["peak_rss_bytes"] < 400 << 20
    assert its_exit["minor_faults"] > 1000
    assert its_exit["wall_s"] >= 0.3


def test_the_most_processes_are_of_who_looked(runnerd_daemon: RunnerdProcess) -> None:
    """Null where nobody looked; what was seen is kept after those processes are gone."""
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="none", argv=["sh", "-c", "true & true & wait"])
        assert exit_of(client, "none")["peak_processes"] is None
        word = mark()
        script = f"sleep {word} & a=$!; sleep {word} & b=$!; read line; kill $a $b; wait"
        started = client.call(
            "exec.start", exec_id="seen", argv=["sh", "-c", script], stdin="pipe", stderr="null"
        )
        tree_of(started["pid"], 3)
        assert client.call("exec.inspect", exec_id="seen", usage=True)["usage"]["processes"] == 3
        client.call("exec.write", exec_id="seen", data="Cg==")
        assert exit_of(client, "seen")["peak_processes"] == 3


def test_what_its_cgroup_has_counted_is_told_as_such(start_daemon: Daemons) -> None:
    """Threads, so a number of its own; a leaf of this machine may have no pids controller."""
    daemon = start_daemon(
        **planted("""
        from runnerd.daemon import cgroup
        cgroup.Leaf.peak_tasks = lambda leaf: 41
        """)
    )
    with RawClient(daemon.socket_path) as client:
        if not client.call("daemon.info")["kill_leaves"]:
            needs.skip_or_fail("needs a cgroup v2 to make leaves in")
        client.call("exec.start", exec_id="c", argv=["true"])
        its_exit = exit_of(client, "c")
        assert (its_exit["peak_tasks"], its_exit["peak_processes"]) == (41, None)
    with RawClient(start_daemon("--cgroups", "off").socket_path) as client:
        client.call("exec.start", exec_id="c", argv=["true"])
        assert exit_of(client, "c")["peak_tasks"] is None


def test_an_ending_looks(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        started = client.call("exec.start", exec_id="e", argv=TREE)
        tree_of(started["pid"])
        client.call("exec.cancel", exec_id="e")
        assert exit_of(client, "e")["peak_processes"] == TREE_SIZE


def test_a_silence_looks(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        script = "trap '' TERM; sleep 60 & (sleep 61; :) & wait"
        client.call("exec.start", exec_id="s", argv=["sh", "-c", script], stall_s=0.5, grace_s=0)
        its_exit = exit_of(client, "s")
    assert (its_exit["reason"], its_exit["peak_processes"]) == ("stalled", 4)
