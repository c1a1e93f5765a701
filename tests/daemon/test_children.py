"""Whose child is whose: by the kernel's lists or, where it was built without, by all of /proc."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.daemon import procfs
from tests.daemon.looking import TREE, living, planted, shim_of, tree_of
from tests.harness import RunnerdProcess, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., RunnerdProcess]

FAMILY: Final = """
import subprocess, sys, threading, time
def bear():
    subprocess.Popen(["sh", "-c", "sleep 900 & setsid sleep 900 & wait"])
    time.sleep(900)
for _ in range(2):
    threading.Thread(target=bear).start()
"""
WITHOUT_LISTS: Final = """
    from runnerd.daemon import procfs
    procfs.lists_children = lambda: False
"""


@pytest.fixture(params=[True, False], ids=["lists", "scan"])
def lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    assert procfs.lists_children(), "this kernel has none"
    monkeypatch.setattr(procfs, "lists_children", lambda: request.param)
    return bool(request.param)


@pytest.fixture
def family() -> Iterator[int]:
    """A process with children of two threads, each with two of its own."""
    with subprocess.Popen([sys.executable, "-I", "-c", FAMILY]) as process:
        try:
            yield process.pid
        finally:
            for pid in tree_of(process.pid, 1):
                os.kill(pid, signal.SIGKILL)


def test_a_real_tree(family: int, lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree_of(family, 7)
    scans = []
    scan = procfs._scan

    def counted() -> dict[int, list[int]]:
        scans.append(1)
        return scan()

    monkeypatch.setattr(procfs, "_scan", counted)
    assert {stat.pid for stat in procfs.tree(family)} == whole - {family}
    assert len(scans) == (0 if lists else 1)
    parents = [stat.ppid for stat in procfs.tree(family)]
    found = [stat.pid for stat in procfs.tree(family)]
    assert parents[0] == family
    assert all(ppid in [family, *found[:place]] for place, ppid in enumerate(parents))
    assert len(procfs.children(family)) == 2
    assert family in procfs.children(os.getpid())
    assert procfs.children(2**22 + 1) == []


@pytest.mark.usefixtures("lists")
def test_who_goes_meanwhile_is_no_error(family: int) -> None:
    """Processes come and go between the list of all and the look at each."""
    is_over = threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            subprocess.run(["true"], check=True)

    whole = tree_of(family, 7)
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            assert {stat.pid for stat in procfs.tree(family)} == whole - {family}
    finally:
        is_over.set()
        thread.join()


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN])
def test_who_cannot_look_does_not_say_that_nobody_is_there(
    family: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tree_of(family, 7)

    def fail(_fd: int, _count: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        procfs.tree(family)
    assert procfs.tree_use(family) is None
    monkeypatch.undo()


def test_a_daemon_without_the_lists(start_daemon: Start) -> None:
    """It sees what a command uses, and adopts what a lost shim left."""
    daemon = start_daemon("--cgroups", "off", **planted(WITHOUT_LISTS))
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=TREE, attach={})["pid"]
        tree = tree_of(pid)
        info = client.call("exec.inspect", exec_id="e", usage=True, tree=True)
        assert info["usage"]["processes"] == len(tree)
        assert {each["pid"] for each in info["processes"]} == tree
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        its_exit = client.note("exec.exited", "e")["exit"]
        assert (its_exit["reason"], its_exit["signal"]) == ("internal", signal.SIGTERM)
        client.note("exec.closed", "e")
        assert living(tree) == set()
        assert client.call("daemon.info")["stray_failures"] == 0


def test_who_computes_has_not_stalled_without_the_lists(start_daemon: Start) -> None:
    daemon = start_daemon("--cgroups", "off", **planted(WITHOUT_LISTS))
    with RawClient(daemon.socket_path) as client:
        argv = ["sh", "-c", "end=$(($(date +%s) + 3)); while [ $(date +%s) -lt $end ]; do :; done"]
        client.call("exec.start", exec_id="e", argv=argv, stall_s=1.0, grace_s=0.0)
        its_exit = client.call("exec.wait", exec_id="e")
        assert (its_exit["code"], its_exit["reason"]) == (0, "exited")


def test_a_child_of_the_script_that_became_us_is_seen_without_the_lists(
    start_daemon: Start,
) -> None:
    """So that its orphans are not taken for an exec's."""
    script = 'sleep 900 & echo $! >&2; exec "$@"'
    daemon = start_daemon(
        "--cgroups",
        "off",
        wrapper=["sh", "-c", script, "sh"],
        **planted(WITHOUT_LISTS),
    )
    others = {pid for pid in tree_of(daemon.pid, 1) if procfs.command_name(pid) == "sleep"}
    assert others
    with RawClient(daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="e", argv=TREE, attach={})["pid"]
        tree = tree_of(pid)
        os.kill(shim_of(daemon, pid), signal.SIGKILL)
        client.note("exec.closed", "e")
        wait_for(lambda: not living(tree))
        assert living(others) == others
    for each in others:
        os.kill(each, signal.SIGKILL)
