"""What a shim reports, turned into what a request is told."""

from __future__ import annotations

import errno

import pytest

from runnerd.daemon.tree import outcome_of
from runnerd.protocol.errors import RequestError
from runnerd.protocol.shimwire import Signalled


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (Signalled(10, 3, 0), 3),
        (Signalled(10, 2, errno.EPERM), 2),  # some of the tree were another user's
        (Signalled(10, 0, errno.ESRCH), 0),
    ],
)
def test_who_got_a_signal_is_counted(message: Signalled, count: int) -> None:
    assert outcome_of(message) == count


def test_a_signal_the_kernel_refuses_is_an_error() -> None:
    outcome = outcome_of(Signalled(9, 0, errno.EPERM))
    assert isinstance(outcome, RequestError)
    assert outcome.kind == "not_permitted"
