"""Whose a status is that the daemon takes itself: of this command, and of no other of its number.

In an interpreter of its own, whose children are all for the reaper to take.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

BEGIN: Final = """
import os, sys, time
from types import SimpleNamespace
from runnerd.daemon.poller import Poller
from runnerd.daemon.reaper import Reaper

reaper = Reaper(SimpleNamespace(by_pid={}), None, Poller(), when_open=lambda: None)

def child():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

def adopt(pid):
    got = []
    reaper.adopt(pid, None, lambda status: got.append(status.code))
    return got

"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["reaped first", "adopted first"])
def test_a_command_whose_shim_is_lost_gets_its_status(order: str) -> None:
    steps = ["assert reaper.reap() == 1", "got = adopt(pid)"]
    if order == "adopted first":
        steps.reverse()
    run("pid = child(); reaper.started(pid)\n" + "\n".join(steps) + "\nassert got == [7], got")


@pytest.mark.parametrize("again", ["", "reaper.started(pid)\n"])
def test_a_status_that_was_told_is_not_kept_for_the_next_of_its_number(again: str) -> None:
    """Its shim told it, and was killed before it took it."""
    run(
        "pid = child(); reaper.started(pid)\n"
        "assert reaper.reap() == 1\n"
        "reaper.told(pid)\n"
        "assert not reaper.is_command(pid)\n" + again + "got = adopt(pid)\n"
        "assert got == [], got"
    )


def test_who_was_given_up_gets_no_status_of_the_next_of_its_number() -> None:
    """Adopted and not to be found: reaped before it was known to be a command."""
    run(
        "pid = child(); given_up = adopt(pid); reaper.told(pid)\n"
        "reaper.started(pid); assert reaper.reap() == 1\n"
        "assert adopt(pid) == [7]\n"
        "assert given_up == []"
    )
