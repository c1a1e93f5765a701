"""End one exec's tree through its shim, and keep the receipt.

A shim belongs to the command's user, so a command can stop or kill it. It gets CONT before each
`end`; one that has not said `ending` within a second, or is not done a second after its KILLs
should be, is killed, and what it leaves comes to the daemon, a subreaper too (daemon/adopted.py).
"""

from __future__ import annotations

import math
import time
from typing import Final, Literal

from runnerd.core.bounds import END_RECEIPT_S, KILL_ROUNDS_S
from runnerd.core.execs import Exec
from runnerd.protocol.exits import Receipt, ReceiptProcess, Survivor
from runnerd.protocol.shimwire import Ending, Killed, Killing, SignalledProcess, Survivors, Termed

from .poller import Owner, Poller, Timer
from .procfs import command_name
from .shims import Shim

LISTED_MAX: Final = 200
EndMessage = Ending | Termed | Killing | Killed | Survivors

_PLACES: Final[dict[str, Literal["group", "session", "outside"]]] = {
    "g": "group",
    "s": "session",
    "x": "outside",
}
_FOUND: Final[dict[str, Literal["children", "scan"]]] = {"c": "children", "p": "scan"}


class ShimEnder:
    """Ends the tree of one exec through its shim.

    Args:
        its_exec: Whose receipt, survivors and `forced` are kept up to date.
        shim: Its shim.
        owner: Who is told of a failure.

    Attributes:
        leader_was_default: Whether TERM, when we sent it, found the command with its default
            disposition: an exit by code can then not be ours.
        confirmed: Whether the shim has taken up the end.
    """

    def __init__(self, its_exec: Exec, shim: Shim, poller: Poller, owner: Owner) -> None:
        self.leader_was_default = False
        self.confirmed = False
        self._exec = its_exec
        self._shim = shim
        self._poller = poller
        self._owner = owner
        self._receipt_due: Timer | None = None
        self._end_due: Timer | None = None
        self._end_due_s = math.inf

    def end(self, grace_s: float) -> None:
        """Send `end`; a shim that does not take it up within a second is killed."""
        receipt = receipt_of(self._exec)
        receipt.grace_s = grace_s if receipt.grace_s is None else min(grace_s, receipt.grace_s)
        self._shim.send_end(grace_s)
        if self._receipt_due is None:
            self._receipt_due = self._poller.call_at(
                time.monotonic() + END_RECEIPT_S, self._owner, self._shim.kill
            )
        # A receipt is no end: a command may stop its shim again once that has begun.
        due_s = time.monotonic() + grace_s + KILL_ROUNDS_S + END_RECEIPT_S
        if due_s < self._end_due_s:
            self._forget_end()
            self._end_due_s = due_s
            self._end_due = self._poller.call_at(due_s, self._owner, self._shim.kill)

    def take(self, message: EndMessage) -> None:
        """Take one of the shim's messages about ending."""
        receipt = receipt_of(self._exec)
        if isinstance(message, Ending):
            self.confirmed = True
            self.leader_was_default = message.leader == "default"
            self._forget_receipt()
        elif isinstance(message, Termed):
            receipt.termed = _listed(message.processes)
            receipt.termed_total, receipt.gone = message.total, message.gone
            self._exec.saw_processes(message.total)
        elif isinstance(message, Killing):
            self._exec.forced = True
        elif isinstance(message, Killed):
            receipt.killed = _listed(message.processes)
            receipt.killed_total = message.total
        else:
            self._forget_end()  # KILL was sent, and the shim goes on with it
            self._exec.survivors = receipt.survivors = [
                Survivor(pid=each.pid, reason=each.reason, command=command_name(each.pid))
                for each in message.processes
            ]

    def forget_timers(self) -> None:
        """Wait for nothing any more."""
        self._forget_receipt()
        self._forget_end()

    def _forget_end(self) -> None:
        if self._end_due is not None:
            self._end_due.cancel()
            self._end_due = None

    def _forget_receipt(self) -> None:
        if self._receipt_due is not None:
            self._receipt_due.cancel()
            self._receipt_due = None


def receipt_of(its_exec: Exec) -> Receipt:
    """Return the exec's receipt, made at its first use."""
    receipt = its_exec.receipt
    if receipt is None:
        its_exec.receipt = receipt = Receipt()
    return receipt


def _listed(processes: tuple[SignalledProcess, ...]) -> list[ReceiptProcess]:
    return [
        ReceiptProcess(pid=each.pid, place=_PLACES[each.place], found=_FOUND[each.found])
        for each in processes
    ]
