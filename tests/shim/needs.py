"""What a test needs of its machine: missing, it skips with the reason, or fails in CI."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

PIDS_CGROUP = Path("/sys/fs/cgroup/pids")


def need(available: object, what: str) -> None:
    """Skip the test unless `available`; with CI=true fail, for there nothing may be left out."""
    if available:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"needs {what}, and in CI every test must run")
    pytest.skip(f"needs {what}")


def need_root() -> None:
    need(os.geteuid() == 0, "root")


def need_program(name: str) -> str:
    path = shutil.which(name)
    need(path, name)
    assert path is not None
    return path


def need_pids_cgroup() -> Path:
    need_root()
    need(os.access(PIDS_CGROUP / "cgroup.procs", os.W_OK), "a writable cgroup v1 pids hierarchy")
    return PIDS_CGROUP


def need_v2_cgroup() -> Path:
    """Return a mounted cgroup v2 in which this process may make others."""
    need_root()
    for folder in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (folder / "cgroup.controllers").exists() and os.access(folder, os.W_OK):
            return folder
    need(available=False, what="a writable cgroup v2 mount")
    raise AssertionError
