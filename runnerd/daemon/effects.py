"""Carry out several effects so that one that fails does not keep the others from happening."""

from __future__ import annotations

from collections.abc import Callable


def each_of(*calls: Callable[[], object]) -> None:
    """Make every call, whatever becomes of those before it.

    Raises:
        Exception: The failure, or an ExceptionGroup of them where several calls failed.
    """
    failures: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, after the others had their turn
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup("several effects failed", failures)
