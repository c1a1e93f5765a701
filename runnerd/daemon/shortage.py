"""Which errors say that the machine has none left, and nothing of what was asked about.

Who takes such an error for an answer calls a tree empty that nobody could see.
"""

from __future__ import annotations

import errno
from typing import Final

NO_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""No descriptor or memory: of accept(2), which leaves the connection in the backlog."""

_BLIND: Final = NO_RESOURCES | {errno.EAGAIN, errno.EINTR}


def check_sight(error: OSError) -> None:
    """Raise the error if it says that we cannot look.

    Raises:
        OSError: That one.
    """
    if error.errno in _BLIND:
        raise error
