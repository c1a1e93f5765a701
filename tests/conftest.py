"""What holds for every test: the order, and a state directory that no two tests share."""

import itertools
from pathlib import Path

import pytest

_NUMBERS = itertools.count()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests marked bench last, and keep the order otherwise.

    A figure is measured after everything else, when nothing runs beside it.
    """
    items.sort(key=lambda item: item.get_closest_marker("bench") is not None)


@pytest.fixture(scope="session")
def state_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def state_directory_of_its_own(state_directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a daemon that is started with the default from what earlier tests ran.

    The default one is the machine's, and its journal remembers.
    """
    monkeypatch.setenv("RUNNERD_STATE_DIR", str(state_directories / str(next(_NUMBERS))))
