"""End the tree of an exec whose shim is gone.

The kernel gives a dead shim's descendants to the daemon, the next subreaper above them. Which
of the daemon's children they are is not written anywhere: a process belongs to the exec if it is
the command, is in its session, or carries at least the score the shim gave it, where only that
gives such a score. Other orphans
(children of a `docker exec` where runnerd is PID 1) are reaped by daemon/reaper.py and never
signalled.

Every signal goes through a pidfd that was checked, after it was opened, for start time and
ancestry, or to a direct child not yet reaped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from runnerd.core.bounds import KILL_ROUNDS_S
from runnerd.core.execs import Exec
from runnerd.protocol.answers import ReceiptProcess, Survivor

from .ending import LISTED_MAX, receipt_of
from .poller import Owner, Poller, Timer
from .procfs import Stat, children, descends_from, read_stat, tree
from .signalling import send_signal

_ROUND_S: Final = 0.02
_SURVIVOR_ROUND_S: Final = 1.0


class AdoptedTree:
    """What a dead shim left, ended by the daemon itself.

    Args:
        its_exec: The exec.
        leader: The command's pid, or the parked child's.
        is_shim: Says which of the daemon's children are shims.
        is_command: Says which pids are commands that are known to live.
        least_score: The oom_score_adj that only processes of commands have, or more; None where
            it proves nothing.
        on_empty: Called when nothing is left.
        on_survivors: Called once KILL was in vain.
    """

    def __init__(
        self,
        its_exec: Exec,
        leader: int,
        poller: Poller,
        owner: Owner,
        *,
        is_shim: Callable[[int], bool],
        is_command: Callable[[int], bool],
        least_score: int | None,
        on_empty: Callable[[], None],
        on_survivors: Callable[[], None],
    ) -> None:
        self._exec = its_exec
        self._leader = leader
        self._poller = poller
        self._owner = owner
        self._is_shim = is_shim
        self._is_command = is_command
        self._least_score = least_score
        self._on_empty = on_empty
        self._on_survivors = on_survivors
        self._kill_at_s = 0.0
        self._bound_s = 0.0
        self._termed: set[tuple[int, int]] = set()
        self._killed: set[tuple[int, int]] = set()
        self._timer: Timer | None = None

    def members(self) -> list[Stat]:
        """Return the processes of the exec that live now."""
        me = os.getpid()
        found: list[Stat] = []
        for pid in children(me):
            if self._is_shim(pid):
                continue
            stat = read_stat(pid)
            if stat is not None and self._belongs(stat):
                found += [stat, *tree(pid)]
        return [stat for stat in found if stat.state not in "ZX"]

    def _belongs(self, stat: Stat) -> bool:
        if self._leader in (stat.pid, stat.session):
            return True
        if self._is_command(stat.pid) or self._is_command(stat.session):
            return False  # another exec's, whose shim is lost as well
        if self._least_score is None:
            return False
        try:
            with open(f"/proc/{stat.pid}/oom_score_adj", "rb") as file:
                score = int(file.read())
        except (OSError, ValueError):
            return False
        return score >= self._least_score

    def end(self, grace_s: float) -> None:
        """TERM to every member once, KILL in rounds after the grace; a later call only hastens."""
        now_s = time.monotonic()
        kill_at_s = now_s + grace_s
        self._kill_at_s = kill_at_s if not self._kill_at_s else min(self._kill_at_s, kill_at_s)
        self._bound_s = self._kill_at_s + KILL_ROUNDS_S
        if grace_s > 0:
            for stat in self.members():
                if (stat.pid, stat.start_ticks) not in self._termed:
                    self._send(stat, signal.SIGTERM, self._termed)
                    self._send(stat, signal.SIGCONT, None)
        receipt_of(self._exec).termed_total = len(self._termed)
        self._round()

    def _round(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now_s = time.monotonic()
        members = self.members()
        if not members:
            self._on_empty()
            return
        pause_s = _ROUND_S
        if now_s >= self._kill_at_s:
            self._exec.forced = True
            for stat in members:
                self._send(stat, signal.SIGKILL, self._killed)
            if now_s >= self._bound_s:
                self._note_survivors(members)
                pause_s = _SURVIVOR_ROUND_S
        self._timer = self._poller.call_at(now_s + pause_s, self._owner, self._round)

    def _send(self, stat: Stat, number: int, done: set[tuple[int, int]] | None) -> None:
        with contextlib.suppress(OSError):
            if not send_signal(stat.pid, number, lambda: _is_still_ours(stat)):
                return
            if done is not None:
                done.add((stat.pid, stat.start_ticks))
        receipt = receipt_of(self._exec)
        if done is self._killed and len(receipt.killed) < LISTED_MAX:
            place = "group" if stat.pgrp == self._leader else "session"
            if stat.session != self._leader:
                place = "outside"
            if all(each.pid != stat.pid for each in receipt.killed):
                receipt.killed.append(
                    ReceiptProcess(pid=stat.pid, place=place, found="children")  # type: ignore[arg-type]
                )
            receipt.killed_total = len(self._killed)

    def _note_survivors(self, members: list[Stat]) -> None:
        self._exec.survivors = receipt_of(self._exec).survivors = [
            Survivor(
                pid=stat.pid, reason="D" if stat.state == "D" else "other", command=stat.command
            )
            for stat in members
        ]
        self._on_survivors()

    def signal(self, number: int, to: str) -> int:
        """Send one signal to the command, its group or the tree; returns how many got it."""
        sent: set[tuple[int, int]] = set()
        for stat in self.members():
            if (
                to == "tree"
                or (to == "command" and stat.pid == self._leader)
                or (to == "group" and stat.pgrp == self._leader)
            ):
                self._send(stat, number, sent)
        return len(sent)


def _is_still_ours(stat: Stat) -> bool:
    again = read_stat(stat.pid)
    return (
        again is not None
        and again.start_ticks == stat.start_ticks
        and bool(descends_from(stat.pid, os.getpid()))
    )
