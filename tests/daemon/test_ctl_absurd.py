"""Command lines that make no sense, for every subcommand: one line says so, with 125. Real daemon.

1 and a traceback would be taken for the exit code of a command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.daemon.ctl_calls import say_all
from tests.harness import REPOSITORY

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess

HUGE: Final = "9" * 20
"""More than 64 bits, which is where MessagePack's numbers end."""
LONG: Final = "9" * 5000
"""More digits than Python converts."""
RAW: Final = os.fsdecode(b"\xff")
"""An argument that is no UTF-8, as a program is given it."""
REFUSED: Final[list[tuple[str, ...]]] = [
    *(
        words
        for number in (HUGE, f"-{HUGE}", LONG, "nan", RAW)
        for words in (
            ("run", "-d", f"--nice={number}", "--", "true"),
            ("attach", f"--after={number}", "x"),
            ("logs", f"--after={number}", "x"),
        )
    ),
    *(
        words
        for number in ("nan", "inf", "1e400", f"-{HUGE}", RAW)
        for words in (
            ("run", "-d", f"--deadline={number}", "--", "true"),
            ("run", "-d", f"--grace={number}", "--", "true"),
            ("run", "-d", "--rlimit", f"nofile={number}", "--", "true"),
            ("cancel", f"--grace={number}", "x"),
            ("stop", f"--if-idle-for={number}"),
            ("top", f"--interval={number}"),
        )
    ),
    ("top", f"--interval={HUGE}"),
    ("signal", "x", HUGE),
    ("pin", "why", "--ttl", "inf"),
    (f"--fence={LONG}", "ps"),
    *(
        words
        for text in ("", RAW)
        for words in (
            ("run", "-d", "--", text),
            ("run", "-d", "-e", f"{text}=1", "--", text),
            ("run", "-d", "--label", f"{text}=v", "--", "true"),
            ("run", "-d", "--env-file", text, "--", "true"),
            ("run", "-t", "--detach-keys", text or RAW, "-i", "--", "true"),
            ("run", "-i", "--id", text, "--", "cat"),
            *((command, text) for command in ("attach", "logs", "wait", "inspect", "cancel")),
            ("forget", text, text),
            ("ps", "--label", f"{text}=x"),
            ("env", "set", f"{text}=x"),
            ("env", "unset", text),
            ("pin", text),
            ("claim", text, "--expect", "any", "--fence", "1"),
            ("--token-file", text or "/", "ps"),
            ("--socket", text, "ps"),
            ("--socket", text, "bridge"),
            ("metrics", "--format", text),
        )
    ),
    ("--socket", "/" + "s" * 200, "ps"),
    ("--socket", "/etc", "run", "--", "true"),
    ("--token-file", "/dev/zero", "ps"),
    ("--token-file", "/proc/self/mem", "ps"),
    ("run", "-d", "--env-file", "/proc/self/mem", "--", "true"),
]


def test_an_absurd_command_line_is_refused_in_a_few_lines(runnerd_daemon: RunnerdProcess) -> None:
    told = dict(zip(REFUSED, say_all(runnerd_daemon, REFUSED), strict=True))
    wrong = {
        words: said
        for words, said in told.items()
        if said.code not in {125, 127} or not 1 <= said.err.count("\n") <= 3
    }
    assert wrong == {}


@pytest.mark.parametrize("width", ["²", "٨٠", LONG, "-1", "0"])
def test_help_takes_any_width_for_one(width: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runnerd.ctl.main", "ps", "--help"],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": width},
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_standard_output_has_no_letters_for_is_written_out(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """A tree's lines in a locale without them, a path that is no text."""
    runnerd_daemon.ctl("run", "-d", "--id", "x", "--", "sleep", "60")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    tree = runnerd_daemon.ctl("ps", "--tree", env=ascii_only)
    assert (tree.returncode, tree.stderr) == (0, b"")
    assert b"\\u2514 sleep" in tree.stdout
    nowhere = runnerd_daemon.ctl("health", "--socket", RAW)
    assert (nowhere.returncode, nowhere.stderr) == (1, b"")
    assert nowhere.stdout.startswith(b"unreachable: ")
