"""The cases use the daemon tests' fixtures."""

import faulthandler

import pytest

from tests.cases.field import is_full
from tests.daemon.conftest import runnerd_daemon, start_daemon

__all__ = ["runnerd_daemon", "start_daemon"]


@pytest.fixture(autouse=True)
def time_for_a_full_case() -> None:
    """Let a case take its minutes without a stack in the middle of them."""
    if is_full():
        faulthandler.cancel_dump_traceback_later()
