"""What execs use, as the daemon reads it and runnerctl shows it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from runnerd.ctl.ps import TREE_HEAD
from runnerd.daemon.processes import process_infos
from runnerd.daemon.procfs import read_stat
from tests.cases.field import mark, rss_bytes, status_field
from tests.daemon.looking import TREE, TREE_SIZE, tree_of
from tests.harness import wait_for
from tests.raw import RawClient

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess

SPIN: Final = "while :; do :; done"
HEAD: Final = "ID STATE AGE PROCS RSS CPU% OUTPUT COMMAND"


def table_rows(text: str) -> list[list[str]]:
    """Return a table's rows, cut into words, without its head."""
    lines = [line.split() for line in text.splitlines()]
    return lines[lines.index(HEAD.split()) + 1 :]


def test_each_process_of_a_tree_is_described(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="t", argv=TREE)["pid"]
        tree = tree_of(pid)
        assert client.call("exec.inspect", exec_id="t").get("processes", []) == []
        found = client.call("exec.inspect", exec_id="t", tree=True)["processes"]
        assert {each["pid"] for each in found} == tree
        assert found[0]["pid"] == pid
        for each in found:
            assert each["ppid"] in {*tree, int(status_field(pid, "PPid"))}
            assert each["command"] == status_field(each["pid"], "Name")
            assert each["uid"] == os.geteuid()
            assert each["threads"] == 1
            assert each["state"] == "sleeping"
            assert each["rss_bytes"] == rss_bytes(each["pid"])
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: status_field(pid, "State").startswith("T"))
        found = client.call("exec.inspect", exec_id="t", tree=True)["processes"]
        assert found[0]["state"] == "stopped"
        client.call("exec.cancel", exec_id="t", grace_s=0)
        assert client.call("exec.inspect", exec_id="t", tree=True).get("processes", []) == []


def test_a_wide_tree_is_cut(runnerd_daemon: RunnerdProcess) -> None:
    word = mark()
    script = f"i=0; while [ $i -lt 230 ]; do sleep {word} & i=$((i+1)); done; echo up; wait"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="w", argv=["sh", "-c", script], attach={})
        client.note("exec.output", "w")
        info = client.call("exec.inspect", exec_id="w", usage=True, tree=True)
        assert info["usage"]["processes"] == 231
        assert len(info["processes"]) == 200
        client.call("exec.cancel", exec_id="w", grace_s=0)


def test_psutil_is_imported_only_for_who_asks(runnerd_daemon: RunnerdProcess) -> None:
    maps = Path(f"/proc/{runnerd_daemon.pid}/maps")
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="t", argv=["sleep", "60"], stall_s=50)
        client.call("exec.list", usage=True)
        client.call("exec.inspect", exec_id="t", usage=True)
        assert "psutil" not in maps.read_text()
        assert client.call("exec.inspect", exec_id="t", tree=True)["processes"]
        assert "psutil" in maps.read_text()
        client.call("exec.cancel", exec_id="t", grace_s=0)


@pytest.mark.parametrize("way", ["{}", "({} &) | cat"], ids=["a child's", "an orphan's"])
def test_the_time_of_the_dead_counts(runnerd_daemon: RunnerdProcess, way: str) -> None:
    """Whether the command has waited for them or, where they were orphans, the shim."""
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    script = way.format(f"{sys.executable} -c '{spin}'") + "; echo done; sleep 60"
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="d", argv=["sh", "-c", script], attach={})
        client.note("exec.output", "d")

        def used_s() -> float:
            usage = client.call("exec.inspect", exec_id="d", usage=True)["usage"]
            return float(usage["cpu_s"]) if usage["processes"] == 2 else 0.0

        wait_for(lambda: used_s() >= 0.25)  # in ticks of 0.01 s, for each of its parts
        assert used_s() < 2
        assert client.call("exec.inspect", exec_id="d")["output_bytes"] == 5
        client.call("exec.cancel", exec_id="d", grace_s=0)


def test_a_number_that_has_changed_hands_is_nobody_of_the_tree() -> None:
    stat = read_stat(os.getpid())
    assert stat is not None
    assert [each.pid for each in process_infos([stat])] == [os.getpid()]
    assert process_infos([stat._replace(start_ticks=stat.start_ticks - 1)]) == []


def test_one_table_shows_the_busiest_first(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        client.call("exec.start", exec_id="idle", argv=["sleep", "60"])
        client.call("exec.start", exec_id="busy", argv=["sh", "-c", f"echo 12345; {SPIN}"])
        client.call("exec.start", exec_id="over", argv=["true"])
        client.call("exec.wait", exec_id="over", until="closed")

        def used() -> bool:
            usage = client.call("exec.inspect", exec_id="busy", usage=True)["usage"]
            return bool(usage["cpu_s"] > 0.1)

        wait_for(used)
        done = runnerd_daemon.ctl("top", "--once")
        assert done.returncode == 0
        text = done.stdout.decode()
        assert re.match(
            r"runnerd \S+, serving for \d+s: 2 live, 3 started, \S+M resident\n\n", text
        )
        busy, idle = table_rows(text)
        assert (busy[:2], busy[3], busy[6]) == (["busy", "running"], "1", "6B")
        assert float(busy[5]) > 1
        assert (idle[0], idle[5], idle[6:]) == ("idle", "0.0", ["0B", "sleep", "60"])
        assert b"\x1b" not in done.stdout
        for exec_id in ("busy", "idle"):
            client.call("exec.cancel", exec_id=exec_id, grace_s=0)


def test_on_a_terminal_each_table_takes_the_place_of_the_one_before(
    runnerd_daemon: RunnerdProcess,
) -> None:
    ours, theirs = pty.openpty()
    top = runnerd_daemon.start_ctl("top", "--interval", "0.1", stdout=theirs)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"\x1b[H\x1b[J") < 3:
            assert select.select([ours], [], [], 20)[0]
            seen += os.read(ours, 4096)
        top.send_signal(signal.SIGINT)
        assert top.wait(10) == 0, "Ctrl-C is the way to leave it"
    finally:
        top.kill()
        top.communicate()
        os.close(ours)
    assert seen.startswith(b"\x1b[H\x1b[J")


def test_a_pipe_gets_plain_tables(runnerd_daemon: RunnerdProcess) -> None:
    words = runnerd_daemon.ctl_words("top", "--interval", "0.1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        lines = [top.stdout.readline() for _ in range(9)]
        top.stdout.close()
        assert top.wait(10) == 141, "its reader has gone"
        assert top.stderr.read() == b""
    assert sum(line.startswith(b"runnerd ") for line in lines) >= 2
    assert b"\x1b" not in b"".join(lines)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "x"])
def test_an_interval_that_is_none_is_refused(runnerd_daemon: RunnerdProcess, value: str) -> None:
    assert runnerd_daemon.ctl("top", f"--interval={value}").returncode == 125


def test_ps_shows_trees(runnerd_daemon: RunnerdProcess) -> None:
    with RawClient(runnerd_daemon.socket_path) as client:
        pid = client.call("exec.start", exec_id="t", argv=TREE)["pid"]
        tree = tree_of(pid)
        lines = runnerd_daemon.ctl("ps", "--tree").stdout.decode().splitlines()
        assert lines[0].split() == [*TREE_HEAD]
        assert lines[1].split()[:2] == ["t", "running"]
        assert len(lines) == 2 + TREE_SIZE
        assert {int(line.split()[1]) for line in lines[2:]} == tree
        assert lines[2].rstrip().endswith("  └ sh")
        assert any(line.endswith("└ sleep") for line in lines[3:])
        client.call("exec.cancel", exec_id="t", grace_s=0)
        assert len(runnerd_daemon.ctl("ps", "--tree").stdout.splitlines()) == 1
        assert b"closed" in runnerd_daemon.ctl("ps", "--tree", "--all").stdout
