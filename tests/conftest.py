"""Order only: a figure is measured after everything else, when nothing runs beside it."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests marked bench last, and keep the order otherwise."""
    items.sort(key=lambda item: item.get_closest_marker("bench") is not None)
