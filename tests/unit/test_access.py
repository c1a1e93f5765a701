"""What a kernel may say of a peer's pidfd, and who is let in then."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from runnerd.daemon.access import Allowed, Peer, check_peer
from runnerd.daemon.linux import SO_PEERPIDFD
from runnerd.protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Asked(socket.socket):
    """A socket whose kernel says an error where its peer's pidfd is asked for."""

    says = 0

    def getsockopt(self, level: int, option: int, *more: Any) -> Any:
        if option == SO_PEERPIDFD:
            raise OSError(self.says, os.strerror(self.says))
        return super().getsockopt(level, option, *more)


@pytest.fixture
def asked() -> Iterator[Asked]:
    with Asked(socket.AF_UNIX) as sock:
        yield sock


OUTSIDE = Peer(os.getppid(), os.geteuid(), os.getegid())
"""A number that a process has which would be let in."""


@pytest.mark.parametrize("says", [errno.EINVAL, errno.ESRCH, errno.ENODATA, errno.EACCES])
def test_who_has_the_number_of_a_peer_that_is_gone_is_not_asked(asked: Asked, says: int) -> None:
    """A command's child connects and ends; somebody outside gets its pid before we look."""
    asked.says = says
    with pytest.raises(RequestError) as raised:
        check_peer(asked, OUTSIDE, Allowed())
    assert raised.value.kind == "peer_gone"


@pytest.mark.parametrize("says", [errno.ENOPROTOOPT, errno.EOPNOTSUPP])
def test_an_older_kernel_is_asked_by_the_number(asked: Asked, says: int) -> None:
    asked.says = says
    check_peer(asked, OUTSIDE, Allowed())
    with pytest.raises(RequestError) as raised:
        check_peer(asked, OUTSIDE._replace(pid=2**22 + 1), Allowed())
    assert raised.value.kind == "peer_gone"


@pytest.mark.parametrize("says", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_that_we_cannot_look_says_nothing_of_the_peer(
    asked: Asked, says: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.says = says
    with pytest.raises(OSError, match=os.strerror(says)):
        check_peer(asked, OUTSIDE, Allowed())

    def short(pid: int) -> int:
        raise OSError(says, os.strerror(says))

    asked.says = errno.ENOPROTOOPT
    monkeypatch.setattr(os, "pidfd_open", short)
    with pytest.raises(OSError, match=os.strerror(says)):
        check_peer(asked, OUTSIDE, Allowed())
