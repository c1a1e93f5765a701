"""End the tree of an exec whose shim is gone.

The kernel gives a dead shim's descendants to the daemon, the next subreaper above them. Where
nothing else can become a child of the daemon's, all of them belong to execs whose shims are gone.
Where something else can (children of a `docker exec` where runnerd is PID 1; what a script left
that became us), a process belongs to the exec if it is the command, is in its session, or carries
at least the score the shim gave it, where only that gives such a score. Where the exec has a
cgroup of its own (daemon/cgroup.py), whatever is in that belongs to it, whoever its parent is.
Other orphans are reaped
by daemon/reaper.py and never signalled.

A tree is empty when nobody of it is left, not when nobody can be seen: no descriptor to look with
means to look again, and a zombie that we cannot reap (another process traces it) is still there.

Every signal goes through a pidfd that was checked, after it was opened, for start time and
ancestry, or to a direct child not yet reaped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from runnerd.core.bounds import KILL_ROUNDS_S
from runnerd.core.execs import Exec
from runnerd.protocol.exits import ReceiptProcess, Survivor

from .ending import LISTED_MAX, receipt_of
from .leaf import Leaf
from .poller import Owner, Poller, Timer
from .procfs import Stat, descends_from, look, read_file, read_stat, tree
from .signalling import send_signal
from .spares import Spares

_ROUND_S: Final = 0.02
_SURVIVOR_ROUND_S: Final = 1.0


class Kin(NamedTuple):
    """What tells an exec's processes from the daemon's other children.

    Attributes:
        is_shim: Says which of the daemon's children are shims.
        is_command: Says which pids are commands that are known to live.
        all_ours: Whether every child of the daemon's that is no shim came from an exec.
        least_score: The oom_score_adj that only processes of commands have, or more; None where
            it proves nothing.
        leaf: The exec's own cgroup, or None.
        claims_orphans: Says whether an orphan that may be its or of another exec whose shim is gone
            is for this one to end. Who may not claim it waits for what the other does.
    """

    is_shim: Callable[[int], bool]
    is_command: Callable[[int], bool]
    all_ours: bool
    least_score: int | None
    leaf: Leaf | None
    claims_orphans: Callable[[], bool]

    def is_of(self, leader: int, stat: Stat) -> bool | None:
        """Say whether a child of the daemon's belongs to the exec of that command.

        Returns:
            None for an orphan of this exec or of another whose shim is gone: nothing tells which.

        Raises:
            OSError: If we cannot look.
        """
        if self.is_shim(stat.pid):
            return False
        if leader in (stat.pid, stat.session):
            return True
        if self.is_command(stat.pid) or self.is_command(stat.session):
            return False  # another exec's, whose shim is lost as well
        if self.all_ours:
            return None
        if self.least_score is None:
            return False
        try:
            score = int(read_file(f"/proc/{stat.pid}/oom_score_adj"))
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            return False
        return None if score >= self.least_score else False


class AdoptedTree:
    """What a dead shim left, ended by the daemon itself.

    Args:
        its_exec: The exec.
        leader: The command's pid, or the parked child's.
        kin: Tells its processes from others.
        spares: Descriptors to look with where there are no others.
        reap: Takes the statuses of all who have ended.
        on_empty: Called once nothing is left.
        on_survivors: Called once KILL was in vain.
    """

    def __init__(
        self,
        its_exec: Exec,
        leader: int,
        poller: Poller,
        owner: Owner,
        *,
        kin: Kin,
        spares: Spares,
        reap: Callable[[], int],
        on_empty: Callable[[], None],
        on_survivors: Callable[[], None],
    ) -> None:
        self._exec = its_exec
        self._leader = leader
        self._poller = poller
        self._owner = owner
        self._kin = kin
        self._spares = spares
        self._reap = reap
        self._on_empty = on_empty
        self._on_survivors = on_survivors
        self._kill_at_s = 0.0
        self._bound_s = 0.0
        self._is_over = False
        self._waits = False  # for another exec's end, to see whose an orphan is
        self._termed: set[tuple[int, int]] = set()
        self._killed: set[tuple[int, int]] = set()
        # What the shim did is in the receipt, and its TERM is not repeated.
        receipt = receipt_of(its_exec)
        self._termed_before = {each.pid for each in receipt.termed}
        self._timer: Timer | None = None

    def members(self) -> list[Stat]:
        """Return the processes of the exec that live now.

        Raises:
            OSError: If we cannot look.
        """
        return [stat for stat in self._present() if stat.state not in "ZX"]

    def _present(self) -> list[Stat]:
        """Return its living processes, and its dead ones that are for us to reap."""
        found: list[Stat] = []
        children_of = look()
        claims: bool | None = None  # asked after the look: who left an orphan was gone before it
        self._waits = False
        for pid in children_of(os.getpid()):
            stat = read_stat(pid)
            its = False if stat is None else self._kin.is_of(self._leader, stat)
            if its is None:
                claims = its = self._kin.claims_orphans() if claims is None else claims
                self._waits |= not claims
            if stat is not None and its:
                found.append(stat)
                found += [each for each in tree(pid, children_of) if each.state not in "ZX"]
        return found + self._others_in_leaf({stat.pid for stat in found})

    def _others_in_leaf(self, seen: set[int]) -> list[Stat]:
        pids = set() if self._kin.leaf is None else set(self._kin.leaf.pids()) - seen
        return [stat for stat in map(read_stat, sorted(pids)) if stat is not None]

    def end(self, grace_s: float) -> None:
        """TERM to every member once, KILL in rounds after the grace; a later call only hastens."""
        now_s = time.monotonic()
        kill_at_s = now_s + grace_s
        self._kill_at_s = kill_at_s if not self._kill_at_s else min(self._kill_at_s, kill_at_s)
        self._bound_s = self._kill_at_s + KILL_ROUNDS_S
        if grace_s > 0:
            with contextlib.suppress(OSError):  # if we cannot look, the rounds go on
                self._spares.retry(self._term_all)
        self._round()

    def _term_all(self) -> None:
        for stat in self.members():
            if (stat.pid, stat.start_ticks) not in self._termed:
                if stat.pid not in self._termed_before and self._send(stat, signal.SIGTERM):
                    self._termed.add((stat.pid, stat.start_ticks))
                    receipt = receipt_of(self._exec)
                    receipt.termed_total += 1
                    self._list(stat, receipt.termed)
                self._send(stat, signal.SIGCONT)

    def _round(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_over:
            return
        now_s = time.monotonic()
        try:
            left = self._spares.retry(lambda: self._look(now_s))
        except OSError:
            left = self._kill_unseen(now_s)
        if left is None:
            self._is_over = True
            self._on_empty()
            return
        pause_s = _ROUND_S
        if now_s >= self._bound_s:
            pause_s = _SURVIVOR_ROUND_S
            self._note_survivors(left)
        if not self._is_over:
            self._timer = self._poller.call_at(now_s + pause_s, self._owner, self._round)

    def _look(self, now_s: float) -> list[Survivor] | None:
        """Kill whom we see, if it is time; returns who is left, None for nobody."""
        present = self._present()
        if all(stat.state in "ZX" for stat in present):
            # The dead are not always reaped yet; whoever stays dead and ours is traced.
            self._reap()
            present = self._present()
        if not present:
            return [] if self._waits else None
        if now_s >= self._kill_at_s:
            self._exec.forced = True
            if self._kin.leaf is not None:
                self._kin.leaf.kill()
            for stat in present:
                if stat.state not in "ZX" and self._send(stat, signal.SIGKILL):
                    self._note_killed(stat)
        return [
            Survivor(pid=stat.pid, reason=_why(stat), command=stat.command)
            for stat in present[:LISTED_MAX]
        ]

    def _kill_unseen(self, now_s: float) -> list[Survivor] | None:
        """Do what can be done without a look: the command's group, as long as it is our child."""
        try:
            os.waitid(os.P_PID, self._leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
        if now_s >= self._kill_at_s:
            self._exec.forced = True
            with contextlib.suppress(OSError):
                os.killpg(self._leader, signal.SIGKILL)
        return [Survivor(pid=self._leader, reason="other", command=None)]

    def _is_still_ours(self, stat: Stat) -> bool:
        again = read_stat(stat.pid)
        if again is None or again.start_ticks != stat.start_ticks:
            return False
        in_leaf = self._kin.leaf is not None and stat.pid in self._kin.leaf.pids()
        return in_leaf or bool(descends_from(stat.pid, os.getpid()))

    def _send(self, stat: Stat, number: int) -> bool:
        with contextlib.suppress(OSError):
            return self._spares.retry(
                lambda: send_signal(stat.pid, number, lambda: self._is_still_ours(stat))
            )
        return False

    def _note_killed(self, stat: Stat) -> None:
        if (stat.pid, stat.start_ticks) not in self._killed:
            self._killed.add((stat.pid, stat.start_ticks))
            receipt = receipt_of(self._exec)
            receipt.killed_total += 1
            self._list(stat, receipt.killed)

    def _list(self, stat: Stat, processes: list[ReceiptProcess]) -> None:
        if len(processes) < LISTED_MAX:
            place: Literal["group", "session", "outside"] = "outside"
            if stat.session == self._leader:
                place = "group" if stat.pgrp == self._leader else "session"
            processes.append(ReceiptProcess(pid=stat.pid, place=place, found="children"))

    def _note_survivors(self, left: list[Survivor]) -> None:
        if left:
            self._exec.survivors = receipt_of(self._exec).survivors = left
            self._on_survivors()

    def signal(self, number: int, to: str) -> int:
        """Send one signal to the command, its group or the tree; returns how many got it.

        Raises:
            OSError: If we cannot look.
        """
        return sum(
            self._send(stat, number)
            for stat in self.members()
            if to == "tree"
            or (to == "command" and stat.pid == self._leader)
            or (to == "group" and stat.pgrp == self._leader)
        )


def _why(stat: Stat) -> Literal["D", "user", "other"]:
    """Say why a process may survive a KILL, in the shim's words."""
    if stat.state == "D":
        return "D"
    try:
        os.kill(stat.pid, 0)  # nothing is sent: the kernel only says whether it could be
    except PermissionError:
        return "user"
    except OSError:
        pass
    return "other"
