"""The claim and its durability: it is in force at once, and answered once it is written.

A thread of its own writes it: it syncs, which may take as long as the disk likes, and neither the
loop nor a start that waits for the journal may wait for that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runnerd.core.bounds import CLAIM_WAIT_S
from runnerd.core.claim import Ownership, Taken
from runnerd.protocol.daemon_requests import SandboxClaim

from .claim_file import NAME, FoundClaim, write_claim
from .disk import Disk
from .effects import each_of
from .poller import Owner, Poller

if TYPE_CHECKING:
    from .log import Log

RETRY_S: Final = 30.0

Told = Callable[[bool], None]


class Claiming:
    """Take claims and have them written.

    Args:
        found: As an earlier incarnation left it.
        folder: The state directory, or None where there is none.
        incarnation: This daemon start.
        poller: For the thread's answers, and the time they may take.
        owner: Who is told of a failure.
        log: For what cannot be written.

    Attributes:
        ownership: Whose it is.
        is_durable: Whether that is written; while there is no claim, whether one would be.
        reason: Why not, in words, or None.
    """

    def __init__(
        self,
        found: FoundClaim,
        *,
        folder: Path | None,
        incarnation: str,
        poller: Poller,
        owner: Owner,
        log: Log,
    ) -> None:
        self.ownership = Ownership(found.standing, incarnation)
        self.reason = found.reason
        self.is_durable = found.standing is not None or found.reason is None
        self._poller = poller
        self._owner = owner
        self._log = log
        self._claims = 0  # made so far; a number for each
        self._writing: int | None = None  # the number of the one the thread has
        self._waiting: dict[Told, int] = {}
        self._retry_armed = False
        self._folder = folder
        self._disk: Disk | None = None
        if folder is not None and not found.is_left_alone:
            self._disk = Disk(poller, owner, self._hangs, name="claim")

    @property
    def trouble(self) -> str | None:
        """Why the claim in force does not outlive this daemon, in words; None where it does."""
        # Without a reason it is on its way to the disk.
        if self.ownership.claim is None or self.is_durable or self.reason is None:
            return None
        return f"the claim ends with this daemon: {self.reason}"

    def take(self, params: SandboxClaim, held: int | None) -> Taken:
        """Claim the sandbox for a connection that holds that fence.

        Raises:
            RequestError: See Ownership.take; nothing was changed.
        """
        taken = self.ownership.take(
            params.owner, params.expect, params.nonce, held=held, wall_s=time.time()
        )
        if taken.created:
            self._claims += 1
            self.is_durable = False
            self._write()
        return taken

    def when_written(self, told: Told) -> None:
        """Tell once whether the claim in force is written, after CLAIM_WAIT_S at the latest."""
        if self._writing is None:
            told(self.is_durable)
            return

        def tell(is_written: bool) -> None:  # noqa: FBT001 - an answer, not a mode
            timer.cancel()
            told(is_written)

        def late() -> None:
            del self._waiting[tell]
            told(False)

        timer = self._poller.call_at(time.monotonic() + CLAIM_WAIT_S, self._owner, late)
        self._waiting[tell] = self._claims

    def _write(self) -> None:
        # One at a time: however many claims come while the disk is slow, the last one counts.
        standing = self.ownership.standing
        if self._disk is None or self._folder is None or self._writing is not None:
            return
        assert standing is not None
        self._writing = self._claims
        folder = self._folder
        self._disk.submit(lambda: write_claim(folder, standing), self._written)

    def _written(self, outcome: Exception | None) -> None:
        number, self._writing = self._writing, None
        assert number is not None
        if outcome is None:
            self._works()
        else:
            self._failed(outcome)
        is_last = number == self._claims
        self.is_durable = is_last and outcome is None
        if not is_last:
            self._write()
        told = [tell for tell, waits_for in self._waiting.items() if waits_for <= number]
        for tell in told:
            del self._waiting[tell]
        each_of(*(functools.partial(tell, outcome is None) for tell in told))

    def _works(self) -> None:
        if self.reason is not None:
            self._log.info("claim_durable")
        self.reason = None

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            self._owner.stray(error)
        self._say(f"cannot write '{self._folder}/{NAME}': {getattr(error, 'strerror', error)}")
        if not self._retry_armed:
            self._retry_armed = True
            self._poller.call_at(time.monotonic() + RETRY_S, self._owner, self._retry)

    def _retry(self) -> None:
        self._retry_armed = False
        if not self.is_durable:
            self._write()

    def _hangs(self) -> None:
        self._say("the disk hangs")

    def _say(self, reason: str) -> None:
        if self.reason != reason:
            self._log.warning("claim_not_durable", reason=reason)
        self.reason = reason
