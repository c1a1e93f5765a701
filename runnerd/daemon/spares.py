"""Descriptors held back, so that the rescue lane works when there are no others.

The limits on connections and execs leave enough of them (options.py). A process of the daemon's
own user can still take them away with prlimit(2): what is open stays open then, and nothing new
is to be had but the numbers of descriptors that are closed. These were opened at boot and have
low ones. They are given up for as long as one rescue takes, on the loop, where nobody else can
take them meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

SPARES: Final = 10
# A start with all three streams opens six ends and the job's memfd, after it has read passwd and
# group; a look at a tree and a signal three.


class Spares:
    """Descriptors that stand for nothing."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self.refill()

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    def refill(self) -> None:
        """Hold as many again as there should be, or as there are to be had."""
        with contextlib.suppress(OSError):
            while len(self._held) < SPARES:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def give_up(self) -> None:
        """Let all of them go: the stop needs them, and nothing comes after it."""
        while self._held:
            os.close(self._held.pop())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give them up for a block that does not wait."""
        self.give_up()
        try:
            yield
        finally:
            self.refill()

    def retry(self, call: Callable[[], T]) -> T:
        """Call, and once more with these lent if there was no descriptor to be had.

        Raises:
            OSError: As the call does.
        """
        try:
            return call()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self.lent():
            return call()
