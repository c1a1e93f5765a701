"""A word to the loop, from a thread or from a signal's handler: an eventfd, eventfd(2).

Told many times before it is taken is told once: whoever takes it looks for all that there is.
"""

from __future__ import annotations

import contextlib
import os


class Wake:
    """One who waits in the loop, and those who tell him to look.

    Attributes:
        fd: Readable from the first word on, until it is taken.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def tell(self) -> None:
        """Have the loop look. From any thread and amid anything: it neither waits nor raises."""
        while True:
            try:
                os.eventfd_write(self.fd, 1)
            except InterruptedError:  # Python tries read(2) and write(2) again, but not these
                continue
            except OSError:  # its counter is full: told already
                pass
            return

    def take(self) -> None:
        """Take the word, before looking; one that cannot be taken now is there in the next turn."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            os.eventfd_read(self.fd)
