"""The figures use the daemon tests' fixtures, and compiled modules."""

import compileall
from pathlib import Path

import pytest

import runnerd
from tests.daemon.conftest import runnerd_daemon, start_daemon

__all__ = ["runnerd_daemon", "start_daemon"]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile runnerd, as pip does when it installs: also where Python is told to write nothing.

    What it is measured against (trio, the standard library) has been compiled so.
    """
    assert compileall.compile_dir(Path(runnerd.__file__).parent, quiet=1)
