"""What outlives a daemon, as it is found at boot: the state directory and the journal in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerd.core.bounds import Bounds
from runnerd.core.past import PackedPast

from .claim_file import FoundClaim, find_claim, read_claim
from .state import StateDirectory, find_read_only, find_state

if TYPE_CHECKING:
    from .journal_file import JournalFile


class Memory:
    """What earlier incarnations left, and where this one may leave something.

    Nothing here ends a boot: without a state directory or a journal the daemon serves all the
    same, and says why.

    Args:
        asked: --state-dir, or None.
        bounds: How many pasts are kept.
        wall_s: Unix seconds, for the name of a damaged journal.

    Attributes:
        directory: The state directory, locked; None = there is none.
        file: The journal, open; None = there is none.
        reason: Why there is no journal, or None.
        trouble: Why the state directory that was asked for is not used, or None.
        warnings: What an operator should know, in sentences.
        pasts: What is known of earlier execs, in order of acceptance.
        starts: Starts accepted by earlier incarnations.
        dropped: The highest number of acceptance of which nothing is known any more.
        fence: The highest fence they saw, or None.
        claim: Whose the sandbox was.
    """

    def __init__(self, asked: str | None, bounds: Bounds, wall_s: float) -> None:
        self.file: JournalFile | None = None
        self.warnings: list[str] = []
        self.pasts: list[PackedPast] = []
        self.starts = 0
        self.dropped = 0
        self.fence: int | None = None
        self.trouble: str | None = None
        self.directory: StateDirectory | None
        self.directory, why = find_state(asked)
        self.reason = None if why is None else f"no state directory: {why}"
        self.claim = self._find_claim(asked)
        if self.directory is not None:
            self._open(self.directory, bounds, wall_s)
        elif asked is not None:
            self.trouble = f"no state directory: {why}"
            self.warnings.append(self.trouble)
        if self.claim.warning is not None:
            self.warnings.append(self.claim.warning)
        # The journal may be lost, and with it what it knew.
        claimed = None if self.claim.standing is None else self.claim.standing.claim.fence
        known = [fence for fence in (self.fence, claimed) if fence is not None]
        self.fence = max(known, default=None)

    def _find_claim(self, asked: str | None) -> FoundClaim:
        if self.directory is not None:
            return find_claim(self.directory.path)
        # Of what can only be read nothing is used, but what was somebody's is not nobody's.
        folder = find_read_only(asked)
        found = FoundClaim() if folder is None else read_claim(folder)
        return found._replace(reason=self.reason)

    @property
    def path(self) -> str | None:
        """Where the state directory is, or None."""
        return None if self.directory is None else str(self.directory.path)

    def _open(self, directory: StateDirectory, bounds: Bounds, wall_s: float) -> None:
        # Imported where there is something to be opened: 2 ms and 1 MB (DECISIONS.md).
        try:
            from .journal_file import JournalError, open_journal  # noqa: PLC0415
        except ImportError as error:  # an interpreter can be built or packaged without it
            self.reason = f"no journal: this Python has no sqlite3 ({error})"
            self.warnings.append(self.reason)
            return
        try:
            self.file, kept = open_journal(
                directory.path, pasts_max=bounds.settled_execs_max, wall_s=wall_s
            )
        except JournalError as error:
            self.reason = f"no journal: {error}"
            self.warnings.append(self.reason)
            return
        self.pasts, self.starts, self.fence = kept.pasts, kept.starts, kept.fence
        self.dropped = kept.dropped
        if kept.moved is not None:
            self.warnings.append(f"a new journal was begun: {kept.moved}")
