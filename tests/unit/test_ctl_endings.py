"""Exit codes and words: how an end is told to a shell and to a person."""

from __future__ import annotations

from typing import Any

import pytest

from runnerd.client.errors import ClientError, RemoteError, StreamLost
from runnerd.ctl.cancel import receipt_lines
from runnerd.ctl.endings import ending, error_code, exit_code
from runnerd.ctl.printing import command_line, duration, table
from runnerd.protocol.answers import CancelAnswer
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Receipt, ReceiptProcess, Survivor
from tests.unit.fake_daemon import make_exit


@pytest.mark.parametrize("code", [0, 1, 125, 255])
def test_a_code_is_the_commands_own(code: int) -> None:
    assert exit_code(make_exit(code=code)) == code


@pytest.mark.parametrize("signal", [1, 9, 15, 64])
def test_a_signal_is_128_and_its_number(signal: int) -> None:
    assert exit_code(make_exit(code=None, signal=signal)) == 128 + signal


@pytest.mark.parametrize("reason", ["lost", "internal"])
def test_an_exit_that_is_not_known_is_125(reason: str) -> None:
    exit = make_exit(code=None, reason=reason)
    assert exit_code(exit) == 125
    assert ending(exit) is not None


@pytest.mark.parametrize(
    ("kind", "details", "expected"),
    [
        ("start_failed", {"stage": "exec", "errno": 2}, 127),
        ("start_failed", {"stage": "exec", "errno": 13}, 126),
        ("start_failed", {"stage": "exec", "errno": 8}, 126),
        ("start_failed", {"stage": "cwd", "errno": 2}, 125),
        ("start_failed", {"stage": "user", "errno": 1}, 125),
        ("exec_exists", {}, 125),
        ("busy", {}, 125),
    ],
)
def test_a_refusal_has_its_code(kind: str, details: dict[str, Any], expected: int) -> None:
    error = RemoteError.before_sending(RequestError(kind, "no", **details))
    assert error_code(error) == expected


def test_every_error_of_the_client_itself_is_125() -> None:
    assert error_code(StreamLost("gone")) == 125
    assert error_code(ClientError("no")) == 125


@pytest.mark.parametrize(
    ("exit", "expected"),
    [
        (make_exit(code=3), None),
        (make_exit(code=None, signal=9), None),
        (make_exit(code=None, signal=9, reason="deadline"), "ended by its deadline (signal 9)"),
        (make_exit(code=0, reason="cancelled"), "ended by a cancel (exit code 0)"),
        (make_exit(code=None, reason="lost"), "its exit is lost"),
        (make_exit(code=None, signal=9, oom="killed"), "killed at the memory limit (signal 9)"),
        (
            make_exit(code=None, signal=9, oom="possible"),
            "killed at the memory limit, most likely (signal 9)",
        ),
    ],
)
def test_who_ended_a_command_is_said_unless_it_did_itself(exit: Any, expected: str | None) -> None:
    assert ending(exit) == expected


def test_a_receipt_reads_as_what_happened() -> None:
    process = ReceiptProcess(pid=5, place="session", found="scan")
    receipt = Receipt(
        termed=[process],
        termed_total=1,
        gone=2,
        killed=[process],
        killed_total=1,
        survivors=[Survivor(pid=9, reason="D", command="dd")],
    )
    answer = CancelAnswer(
        outcome="survivors", receipt=receipt, exit=make_exit(code=None, signal=15)
    )
    assert [*receipt_lines("web", answer)] == [
        "web could not be ended in full, its command's exit: SIGTERM",
        "  TERM to 1 process, 1 of them outside the command's group",
        "  2 processes had gone before its turn",
        "  KILL to 1 process: 5",
        "  left: 9 (dd) in uninterruptible sleep",
    ]


def test_a_command_is_written_on_one_short_line() -> None:
    assert command_line(["sh", "-c", "a  b"]) == "sh -c 'a  b'"
    assert command_line(["a\n\x1b[31m"]) == "'a\\n\\x1b[31m'"
    assert len(command_line(["x" * 500])) == 60


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (130, "2m10s"), (18120, "5h2m"), (273600, "3d4h")],
)
def test_a_duration_is_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_is_aligned_and_has_no_trailing_blanks() -> None:
    assert table([("A", "B"), ("long", "x"), ("y", "")]) == "A     B\nlong  x\ny"
