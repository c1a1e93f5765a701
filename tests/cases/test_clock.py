"""Cases of the group `clock-freeze`: a clock that jumps and a daemon that stands still."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests import needs
from tests.cases.field import ROOM, is_stopped, timed
from tests.harness import descendants, wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]

FAKETIME = [
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib").glob("faketime/libfaketimeMT.so.1"),
]


def test_c145_a_jump_of_the_date_changes_no_duration(start_daemon: Daemons, tmp_path: Path) -> None:
    """A day ahead, a day back, 1970: nothing ends early, durations stay, timestamps may jump.

    The daemon's date is faked by a preloaded library, so that the machine's own stays as it is;
    its monotonic clock is the real one.
    """
    if not FAKETIME:
        needs.skip_or_fail("libfaketime is not here (Debian: apt-get install libfaketime)")
    date = tmp_path / "date"
    date.write_text("+0d\n")
    faking = {
        "LD_PRELOAD": str(FAKETIME[0]),
        "FAKETIME_TIMESTAMP_FILE": str(date),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    # By env(1), so that only the daemon and not the test's own children are faked.
    daemon = start_daemon(wrapper=["env", *(f"{key}={value}" for key, value in faking.items())])
    with RawClient(daemon.socket_path) as client:
        before = client.call("exec.start", exec_id="kept", argv=["true"], env_mode="replace")
        assert before["created"]
        client.call("exec.wait", exec_id="kept", until="closed")
        began_s = time.monotonic()
        client.call(
            "exec.start",
            exec_id="c145",
            argv=["sleep", "3"],
            env_mode="replace",
            env={"PATH": os.environ["PATH"]},
            deadline_s=10,
            attach={},
        )
        stamps: list[float] = []
        for jump in ("+1d", "-1d", "@1970-01-02 00:00:00"):
            date.write_text(f"{jump}\n")
            client.call(
                "exec.start", exec_id=f"at{len(stamps)}", argv=["true"], env={"LD_PRELOAD": ""}
            )
            stamps.append(client.call("exec.inspect", exec_id=f"at{len(stamps)}")["accepted_at"])
        assert stamps[0] - stamps[1] > 86400
        assert stamps[2] < 10 * 86400  # the clock that is faked is the one the daemon reads
        its_exit = client.note("exec.exited", "c145")["exit"]
        assert time.monotonic() - began_s < 3 * ROOM
        assert (its_exit["code"], its_exit["reason"]) == (0, "exited")
        assert 2.9 < its_exit["wall_s"] < 3 * ROOM
        phases = [
            its_exit["phases"][f"{name}_ms"] for name in ("queued", "spawned", "started", "exited")
        ]
        assert phases == sorted(phases)
        assert phases[0] >= 0
        assert 2900 < phases[3] < 3000 * ROOM
        kept = client.call("exec.inspect", exec_id="kept")
        assert (kept["state"], kept["transcript"]) == ("closed", "kept")
        assert 3 < kept["age_s"] < 60
        info = client.call("daemon.info")
        assert 3 < info["uptime_s"] < 60
        text = client.call("daemon.metrics")["text"]
        sums = [line for line in text.splitlines() if "_seconds_sum" in line]
        assert sums
        assert all(0 <= float(line.split()[1]) < 60 for line in sums)
        numbers = [
            note["params"]["seq"]
            for note in client.notes
            if note["params"].get("exec_id") == "c145"
        ]
        assert numbers == sorted(numbers)
    assert daemon.stop() == 0


def test_c147_a_freeze_is_survived_with_its_dead_client(runnerd_daemon: RunnerdProcess) -> None:
    """Daemon and commands stopped for a while, a client lost meanwhile: all goes on after it.

    Shortened from 60 s to 6 s, past every heartbeat and sweep; the pause is SIGSTOP to the daemon
    and everything below it, which is what a freezer looks like from inside.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = [sys.executable, "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", "/"]
    watcher = RawClient(runnerd_daemon.socket_path)
    watcher.call("exec.start", exec_id="c147", argv=serve, attach={})
    wait_for(lambda: _is_served(port), 20)
    frozen = {runnerd_daemon.pid, *descendants(runnerd_daemon.pid)}
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: all(map(is_stopped, frozen)))
        watcher.sock.close()
        time.sleep(6)  # the case itself: the length of the freeze
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    with runnerd_daemon.connect() as client:
        (info,) = client.list_execs()
        assert (info.exec_id, info.state) == ("c147", "running")
        took_s, handle = timed(lambda: client.attach("c147"))
        assert took_s < 1.0 * ROOM
        assert _is_served(port)
        wait_for(lambda: client.info().subscriptions == 1, 1 * ROOM)
        assert b"Serving HTTP" in b"".join(
            getattr(note, "data", b"") for note in handle.take_output(time.monotonic() + 5)
        )
        took_s, answer = timed(lambda: handle.cancel(1))
        assert answer.outcome == "ended"
        assert took_s < 2.0 * ROOM
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def _is_served(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(2)
        if sock.connect_ex(("127.0.0.1", port)):
            return False
        sock.sendall(b"GET /nothing-here HTTP/1.0\r\n\r\n")
        try:
            return sock.recv(100).startswith(b"HTTP")
        except TimeoutError:
            return False
