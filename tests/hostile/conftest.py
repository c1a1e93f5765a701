"""Fixtures of the hostile tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness import daemons
from tests.hostile.sandbox import SEPARATE, SETTINGS, Sandbox, sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def make_sandbox(tmp_path: Path) -> Iterator[Callable[..., Sandbox]]:
    """Make sandboxes of a test's own: those it destroys."""
    with daemons(tmp_path) as start, sandboxes(start) as make:
        yield make


@pytest.fixture(params=SETTINGS)
def own_sandbox(request: pytest.FixtureRequest, make_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """One of the test's own, in each setting."""
    return make_sandbox(request.param)


@pytest.fixture(scope="module", params=SETTINGS)
def sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    """One in each setting, shared by the tests of a module: each leaves it as it was."""
    with daemons(tmp_path_factory.mktemp("shared")) as start, sandboxes(start) as make:
        yield make(request.param)


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One with separate users, shared likewise."""
    with daemons(tmp_path_factory.mktemp("shared")) as start, sandboxes(start) as make:
        yield make(SEPARATE)
