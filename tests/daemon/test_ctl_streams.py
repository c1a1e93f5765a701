"""runnerctl's standard streams where others share, fill or close them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "unread"])
@pytest.mark.parametrize(
    "words", [["forget", "one", "another"], ["run", "--nonsense"]], ids=["twice", "usage"]
)
def test_words_that_standard_error_does_not_take_are_nowhere(
    runnerd_daemon: RunnerdProcess, words: list[str], *, is_full: bool
) -> None:
    """Two lines each: once the first has failed the second was printed on standard output."""
    if is_full:
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    with os.fdopen(writing, "wb") as error:
        done = runnerd_daemon.ctl(*words, capture_output=False, stdout=-1, stderr=error)
    assert (done.returncode, done.stdout) == (125, b"")
