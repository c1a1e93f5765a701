"""The shim's program is started in a form that hides it from its first moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from runnerd.daemon.shim_program import ShimProgram
from tests import needs

START: Final = """
import os, sys
from runnerd.daemon.shim_program import ShimProgram
os.setgroups([]); os.setgid(4343); os.setuid(4343)
program = ShimProgram(sys.argv[1])
path = sys.argv[1] if "plain" in sys.argv else program.path
pid = os.posix_spawn(path, ["sleep", "900"], {})
try:
    for _ in range(2000):
        os.stat(f"/proc/{pid}").st_uid
    open(f"/proc/{pid}/environ").read()
    print("read")
except PermissionError:
    print("hidden")
os.kill(pid, 9)
os.waitpid(pid, 0)
"""


def start(*words: str) -> str:
    needs.root()
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n" + START
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_nobody_of_its_user_may_read_it() -> None:
    assert start("/bin/sleep") == "hidden\n"


def test_the_twin_that_is_started_plainly_can_be_read() -> None:
    assert start("/bin/sleep", "plain") == "read\n"


def test_a_script_and_what_is_unreadable_are_started_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4343)
    script = tmp_path / "shim"
    script.write_text("#!/bin/sh\n")
    assert ShimProgram(str(script)).path == str(script)
    assert ShimProgram(str(tmp_path / "none")).path == str(tmp_path / "none")


def test_where_the_copy_cannot_run_the_binary_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4343)
    program = ShimProgram("/bin/sleep")
    assert program.path.startswith("/proc/self/fd/")
    assert not program.give_up_copy(OSError(11, "EAGAIN"))
    assert program.give_up_copy(OSError(13, "EACCES"))
    assert program.path == "/bin/sleep"
    assert not program.give_up_copy(OSError(13, "EACCES"))
