"""A daemon that reads nothing or is gone, and the shim under the sanitizers and valgrind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.job import JobUser
from runnerd.protocol.shimwire import Empty, Exited, Signalled
from tests.shim.harness import Shim, is_alive, job, proc_field, shim_of, spawn_shim, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.shim.conftest import Start


def fill(shim: Shim) -> None:
    """Make the shim answer until its answers fill the socket nobody reads."""
    shim.control.setblocking(False)
    refused_at: float | None = None
    while refused_at is None or time.monotonic() < refused_at + 0.3:
        try:
            shim.signal(64, "tree")
        except BlockingIOError:
            refused_at = refused_at or time.monotonic()
            time.sleep(0.01)
        if refused_at is None and shim.heard(Signalled):
            raise AssertionError
        if unread(shim) > 300:
            break
    shim.control.setblocking(True)


def unread(shim: Shim) -> int:
    """How many answers can be waiting: the shim reads ours only while it can send its own."""
    return int(shim.control.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == 0)


def test_a_full_socket_does_not_stop_the_end(start: Start) -> None:
    shim = start()
    pid = shim.start(job("sh", "-c", "trap '' RTMAX TERM; echo; exec sleep 99")).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep")
    fill(shim)
    began = time.monotonic()
    shim.lifeline.close()
    wait_until(lambda: not is_alive(pid))
    assert time.monotonic() - began < 1.5 + 0.6
    assert shim.wait() == 0
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL  # left unreaped, for its parent to see


def test_the_exit_waits_for_a_slow_reader(start: Start) -> None:
    shim = start()
    pid = shim.start(job("sh", "-c", "trap '' RTMAX; echo; exec sleep 99")).pid
    wait_until(lambda: proc_field(pid, "Name") == "sleep")
    fill(shim)
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: not is_alive(pid))
    exited = shim.wait_for(Exited)
    assert (exited.kind, exited.value) == ("kill", signal.SIGINT)
    shim.wait_for(Empty)


def test_a_gone_daemon_ends_the_tree_though_its_mail_was_unread(start: Start) -> None:
    shim = start()
    pid = shim.start(job("sleep", "99")).pid
    for _ in range(10):
        shim.signal(signal.SIGCONT, "tree")
    shim.control.close()
    assert shim.wait() == 0
    assert not is_alive(pid)


def scenarios(program: Path, env: dict[str, str] | None = None) -> None:
    """A life of each kind, for builds that look at the memory."""
    nobody = JobUser(uid=65534, gid=65534, groups=(1, 2, 3)) if os.geteuid() == 0 else None
    rich = job(
        "true", user=nobody, oom_score_adj=900, nice=1, rlimits=((resource.RLIMIT_CORE, 0, 0),)
    )
    for good in (rich, job("sh", "-c", "exit 3")):
        with shim_of(program, env=env) as shim:
            shim.start(good)
            shim.wait_for(Exited)
            shim.wait_for(Empty)
            assert shim.wait() == 0
    ours, theirs = os.openpty()
    with shim_of(program, env=env) as shim:
        shim.start(job("sh", "-c", "echo >/dev/tty", user=nobody, ctty=True), [theirs] * 3)
        assert os.read(ours, 2) == b"\r\n"
        shim.wait_for(Empty)
        assert shim.wait() == 0
    os.close(ours)
    with shim_of(program, env=env) as shim:
        shim.fail(job("true", ctty=True), [theirs] * 3)
        assert shim.wait() == 0
    os.close(theirs)
    for bad in (job("none", env=[]), job("true", cwd=b"/none"), job("true", ctty=True)):
        with shim_of(program, env=env) as shim:
            shim.fail(bad)
            assert shim.wait() == 0
    with shim_of(program, env=env) as shim:
        shim.start(job("sh", "-c", "sleep 99 & setsid sleep 99 & trap '' TERM; sleep 99"))
        shim.signal(signal.SIGCONT, "tree")
        shim.signal(signal.SIGCONT, "group")
        shim.end(300)
        shim.wait_for(Empty)
        assert shim.wait() == 0
    ends: list[Callable[[Shim], object]] = [
        lambda shim: shim.end(0),
        lambda shim: shim.control.close(),
        lambda shim: shim.lifeline.close(),
    ]
    for end in ends:
        with shim_of(program, env=env) as shim:
            end(shim)
            assert shim.wait() == 0


def test_sanitizers_find_nothing(sanitized: Path, tmp_path: Path) -> None:
    options = f"log_path={tmp_path}/san:detect_leaks=0:exitcode=99"
    scenarios(sanitized, {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options})
    assert not list(tmp_path.glob("san*"))


def test_valgrind_finds_nothing(debug: Path, valgrind: str, tmp_path: Path) -> None:
    wrapper = tmp_path / "shim-in-valgrind"
    wrapper.write_text(
        f"#!/bin/sh\nexec {valgrind} -q --error-exitcode=99 --leak-check=full "
        f"--log-file={tmp_path}/vg.%p {debug}\n"
    )
    wrapper.chmod(0o755)
    scenarios(wrapper, {"PATH": "/usr/bin:/bin"})
    logs = [log.read_text().splitlines() for log in tmp_path.glob("vg.*")]
    assert len(logs) >= 9
    # "--": it does not know pidfd_open() and says ENOSYS; "==" is what it has found.
    assert [line for log in logs for line in log if not line.startswith("--")] == []


@pytest.mark.parametrize("count", [50])
def test_many_at_once(shim_program: Path, count: int) -> None:
    shims = [spawn_shim(shim_program) for _ in range(count)]
    try:
        for n, shim in enumerate(shims):
            shim.next()
            shim.start(job("sh", "-c", f"exit {n}"))
        assert [shim.wait_for(Exited).value for shim in shims] == list(range(count))
    finally:
        for shim in shims:
            shim.close()
