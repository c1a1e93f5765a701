"""What a command leaves running: it lives on, is named, counted, and wears nobody down."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runnerd.daemon.procfs import holds_one_of
from runnerd.daemon.terminal import PseudoTerminal
from runnerd.protocol.requests import Pty
from tests import needs
from tests.cases.field import cpu_s, mark, marked
from tests.daemon.looking import seconds
from tests.daemon.test_clocks import wake_ups
from tests.harness import wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness import RunnerdProcess

    Daemons = Callable[..., RunnerdProcess]

LIVE_MAX = 3


def test_output_of_leftovers_is_thrown_away_slowly(runnerd_daemon: RunnerdProcess) -> None:
    """A writer at full speed is slowed, not refused: 64 KiB each 50 ms, whoever reads or not."""
    word = mark()
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="l", argv=["sh", "-c", f"yes {word} &"])
        client.call("exec.wait", exec_id="l")
        pid = runnerd_daemon.pid
        began_s, began_cpu_s, began_wakes = time.monotonic(), cpu_s(pid), wake_ups(pid)
        time.sleep(3)  # a rate needs a length of time
        lasted_s = time.monotonic() - began_s
        assert cpu_s(pid) - began_cpu_s < 0.3 * lasted_s
        assert wake_ups(pid) - began_wakes < 60 * lasted_s
        assert marked(word), "neither blocked for good nor dead of SIGPIPE"
        client.call("exec.cancel", exec_id="l", grace_s=0)
        discarded = client.call("exec.inspect", exec_id="l")["closed"]["discarded_bytes"]
        rounds = (time.monotonic() - began_s) / 0.05 + 3
        assert 64 * 1024 * 10 < discarded <= rounds * 64 * 1024


def test_who_holds_the_pipes_is_named(runnerd_daemon: RunnerdProcess) -> None:
    """The one that has them, and not the one beside it that does not."""
    holder, other = mark(), mark()
    script = f"sleep {holder} & sleep {other} >/dev/null 2>&1 & :"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="h", argv=["sh", "-c", script])
        client.call("exec.wait", exec_id="h")
        (pid,) = wait_for(lambda: marked(holder))
        wait_for(lambda: marked(other))
        info = client.call("exec.inspect", exec_id="h", usage=True)
        assert info["state"] == "lingering"
        assert info["holders"] == [{"pid": pid, "command": "sleep", "certain": True}]
        assert info["usage"]["processes"] == 2
        client.call("exec.cancel", exec_id="h", grace_s=0)
        assert client.call("exec.inspect", exec_id="h").get("holders", []) == []


HANGS = """
import ctypes, os, sys
fuse = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
if ctypes.CDLL(None).mount(b"hangs", sys.argv[1].encode(), b"fuse", 0, options) < 0:
    sys.exit("not mounted")
held = os.open(sys.argv[1], os.O_PATH)
os.set_inheritable(fuse, True)
os.set_inheritable(held, True)
if os.fork() == 0:
    print("up", flush=True)
    os.execvp("sleep", ["sleep", "900"])
"""


def test_a_file_system_that_never_answers_is_not_asked(
    runnerd_daemon: RunnerdProcess, tmp_path: Path
) -> None:
    """A command's own FUSE server, say, which it has stopped: the loop would wait for it."""
    needs.root()
    if not Path("/dev/fuse").exists():
        needs.skip_or_fail("no /dev/fuse")
    needs.program("unshare", "util-linux")
    argv = ["unshare", "--mount", "--propagation", "private", "python3", "-I", "-c", HANGS]
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="h", argv=[*argv, str(tmp_path)], attach={})
        client.call("exec.wait", exec_id="h")
        assert client.output("h") == b"up\n"
        took_s, info = seconds(lambda: client.call("exec.inspect", exec_id="h"))
        assert took_s < 5
        assert [each["certain"] for each in info["holders"]] == [True]
        assert client.call("exec.cancel", exec_id="h", grace_s=0)["outcome"] == "ended"


def test_who_holds_a_terminal_is_told_by_its_name() -> None:
    """Not by an inode: all masters have that of /dev/ptmx, and other files have it elsewhere."""
    terminal = PseudoTerminal(Pty(), None)
    (slave, *_), master = terminal.theirs, terminal.output[0]
    assert master is not None
    (link,) = links = {terminal.link(master)}
    assert link == os.ttyname(slave)
    other = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    sleeping = ["sleep", "900"]
    try:
        assert os.fstat(other).st_ino == os.fstat(master).st_ino
        with (
            subprocess.Popen(sleeping, pass_fds=[other]) as stranger,
            subprocess.Popen(sleeping, stdin=slave) as holder,
        ):
            assert holds_one_of(stranger.pid, links) is False
            assert holds_one_of(holder.pid, links) is True
            terminal.close()
            assert str(Path(f"/proc/{holder.pid}/fd/0").readlink()) == f"{link} (deleted)"
            assert holds_one_of(holder.pid, links) is True
            stranger.kill()
            holder.kill()
        assert holds_one_of(holder.pid, links) is False
    finally:
        os.close(other)


def test_lingering_execs_count_against_the_limit(start_daemon: Daemons) -> None:
    daemon = start_daemon("--live-execs-max", str(LIVE_MAX))
    word = mark()
    with RawClient(daemon.socket_path) as client:
        for number in range(LIVE_MAX):
            script = f"sleep {word} >/dev/null 2>&1 &"
            client.call("exec.start", exec_id=f"l{number}", argv=["sh", "-c", script])
            client.call("exec.wait", exec_id=f"l{number}")
        states = [each["state"] for each in client.call("exec.list")["execs"]]
        assert states == ["lingering"] * LIVE_MAX
        with pytest.raises(RawError) as refused:
            client.call("exec.start", argv=["true"])
        assert refused.value.kind == "busy"
        client.call("exec.cancel", exec_id="l0", grace_s=0)
        client.call("exec.start", argv=["true"])
        for number in range(1, LIVE_MAX):
            client.call("exec.cancel", exec_id=f"l{number}", grace_s=0)
        assert not marked(word)
