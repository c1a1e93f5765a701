"""A word to the loop comes through, whatever its calls come back with."""

from __future__ import annotations

import errno
import os
import select
from typing import TYPE_CHECKING

import pytest

from runnerd.daemon.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def wake() -> Iterator[Wake]:
    made = Wake()
    yield made
    os.close(made.fd)


def is_told(wake: Wake) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


def failing(call: Callable[..., object], *errors: int) -> Callable[..., object]:
    """Return a call that fails so often, and then does what it should."""
    left = [*errors]

    def fail(*args: int) -> object:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return call(*args)

    return fail


def test_told_twice_is_told_once(wake: Wake) -> None:
    assert not is_told(wake)
    wake.tell()
    wake.tell()
    assert is_told(wake)
    wake.take()
    assert not is_told(wake)
    wake.take()  # nothing is there, and nothing is waited for


def test_an_interrupted_word_is_told_all_the_same(
    wake: Wake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "eventfd_write", failing(os.eventfd_write, errno.EINTR, errno.EINTR))
    wake.tell()
    assert is_told(wake)


def test_a_full_counter_is_a_word_that_was_told(wake: Wake) -> None:
    os.eventfd_write(wake.fd, 2**64 - 2)
    wake.tell()
    assert is_told(wake)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_a_word_that_cannot_be_taken_stays(
    wake: Wake, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "eventfd_read", failing(os.eventfd_read, number))
    wake.tell()
    wake.take()
    assert is_told(wake)
    wake.take()
    assert not is_told(wake)
