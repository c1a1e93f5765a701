"""Fixtures of the tests with a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness import RunnerdProcess, daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., RunnerdProcess]]:
    """Start daemons with options of the test's own; all are stopped and checked at the end."""
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def runnerd_daemon(start_daemon: Callable[..., RunnerdProcess]) -> RunnerdProcess:
    """One daemon with its defaults."""
    return start_daemon()
