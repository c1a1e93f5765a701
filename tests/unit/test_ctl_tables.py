"""What tables say: sizes in few characters, trees below their parents, use between two looks."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from runnerd.ctl.cancel import receipt_lines
from runnerd.ctl.printing import short_size
from runnerd.ctl.ps import row, tree_rows
from runnerd.ctl.top import CpuUse, rows, show
from runnerd.protocol.answers import CancelAnswer, ExecInfo, ProcessInfo, Usage
from runnerd.protocol.exits import Receipt, Survivor


def process(pid: int, ppid: int, **fields: Any) -> ProcessInfo:
    defaults: dict[str, Any] = {
        "command": f"p{pid}", "state": "sleeping", "uid": 0, "threads": 1, "rss_bytes": 4096,
        "cpu_s": 0.25, "started_at": 1.0,
    }  # fmt: skip
    return ProcessInfo(pid=pid, ppid=ppid, **defaults | fields)


def info(exec_id: str = "e", **fields: Any) -> ExecInfo:
    defaults: dict[str, Any] = {
        "state": "running", "argv": ["sh"], "cwd": "/", "user": None, "labels": {}, "pid": 2,
        "incarnation": "i", "accepted": 1, "accepted_at": 1.0, "age_s": 10.0, "flow": "drop",
        "first_seq": 1, "last_seq": 1, "stdin_accepted_bytes": 0, "stdin_open": False,
        "subscriptions": 0, "transcript": "kept",
    }  # fmt: skip
    return ExecInfo(exec_id=exec_id, **defaults | fields)


def use(cpu_s: float) -> Usage:
    return Usage(processes=2, rss_bytes=3 << 20, cpu_s=cpu_s)


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "-"), (0, "0B"), (1023, "1023B"), (1024, "1.0K"), (10240, "10K"), (3_565_158, "3.4M"),
     (2**40 * 5000, "5000T")],
)  # fmt: skip
def test_a_size_is_short(size: int | None, text: str) -> None:
    assert short_size(size) == text


def test_every_process_stands_below_its_parent() -> None:
    """The command and orphans hang below the exec; one whose parent is not listed does too."""
    its = info(
        processes=[process(2, 1), process(9, 1), process(3, 2), process(4, 3), process(5, 2)]
    )
    assert [row[-1] for row in tree_rows(its)] == [
        "sh", "  ├ p2", "  │ ├ p3", "  │ │ └ p4", "  │ └ p5", "  └ p9"
    ]  # fmt: skip
    assert [row[2] for row in tree_rows(its)] == ["", "2", "3", "4", "5", "9"]


def test_what_cannot_be_seen_is_a_dash() -> None:
    hidden = process(2, 1, uid=None, threads=None, rss_bytes=None, cpu_s=None)
    row = tree_rows(info(processes=[hidden]))[1]
    assert row[3:7] == ("-", "-", "-", "-")


def test_a_name_cannot_move_the_cursor() -> None:
    row = tree_rows(info(processes=[process(2, 1, command="\x1b[2J")]))[1]
    assert "\x1b" not in row[-1]


def test_a_survivors_name_cannot_move_the_cursor_either() -> None:
    """PR_SET_NAME takes any bytes, prctl(2)."""
    left = Survivor(pid=7, reason="D", command="\x1b[2J\x9b")
    answer = CancelAnswer(outcome="survivors", receipt=Receipt(survivors=[left]))
    assert list(receipt_lines("e", answer))[-1] == (
        "  left: 7 (\\x1b[2J\\x9b) in uninterruptible sleep"
    )


def test_cpu_use_is_between_two_looks_and_at_first_since_the_start() -> None:
    usage = CpuUse()
    assert usage.percent(info(usage=use(5.0)), 100.0) == 50.0
    assert usage.percent(info(usage=use(5.5)), 101.0) == 50.0
    assert usage.percent(info(usage=use(5.5)), 102.0) == 0.0
    assert usage.percent(info(usage=use(4.0)), 103.0) == 0.0, "time that left the account"
    assert CpuUse().percent(info(usage=None), 100.0) == 0.0


def test_the_busiest_stands_first() -> None:
    execs = [info("idle", usage=use(0.0)), info("busy", usage=use(9.0)), info("new", age_s=0.0)]
    assert [row[0] for row in rows(execs, CpuUse(), 100.0)] == ["busy", "idle", "new"]


@pytest.mark.parametrize(
    ("size", "columns", "lines"), [((0, 0), 80, 23), ((20, 6), 20, 5), ((50, 2), 50, 4)]
)
def test_top_cuts_to_the_terminal_and_shows_something_where_that_has_no_size(
    size: tuple[int, int],
    columns: int,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size(size))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    daemon: Any = SimpleNamespace(
        version="1", state="serving", uptime_s=1.0, live_execs=50, starts=50, rss_bytes=4096
    )
    execs = [info(str(number), argv=["c" * 300]) for number in range(50)]
    show(daemon, rows(execs, CpuUse(), 1.0), is_live=True)
    shown = capsys.readouterr().out.removeprefix("\x1b[H\x1b[J").splitlines()
    assert len(shown) == lines
    assert max(map(len, shown)) == columns


def test_ps_tells_an_exec_whose_end_nobody_saw_from_one_that_runs() -> None:
    assert row(info(state="running"))[4] == "-"
    assert row(info(state="closed", pid=None, transcript="lost"))[4] == "lost"
