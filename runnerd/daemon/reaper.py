"""Reap every child of the daemon: the one owner of waiting.

Shims end here, commands whose shim died, and orphans that came to the daemon because it is a
subreaper or PID 1. One SIGCHLD may stand for many deaths, so each wake-up reaps until nothing is
left. Nobody else may wait, or statuses would be stolen.

It listens by itself and not through trio, whose handler sends on a socket pair: in a memory cgroup
that is full the kernel has no buffer for that, and the error would come up wherever the loop is. A
Wake needs no memory.

A shim that a command stopped would tell nothing any more, not even the command's exit. The same
SIGCHLD says so, and it is made to go on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable

import trio

from runnerd.core.execs import ExitStatus

from .log import Log
from .poller import Owner, Poller
from .procfs import read_stat
from .shims import ShimPool
from .statuses import told_by_wait
from .wake import Wake

_CONTINUE_S = 0.05  # between a stop and CONT: a command that stops its shim for ever keeps us from
# nothing else
_WITHHELD_S = 0.1


class Reaper:
    """Take the status of every child that ends.

    Args:
        pool: Its map says which children are shims.
        log: For shims that end in an unexpected way.
        poller: For what is looked at again a little later.
        when_open: Called once it listens for SIGCHLD: trio has touched SIGINT by then.

    Attributes:
        orphans: How many children were reaped that were no shim and no command.
    """

    def __init__(
        self, pool: ShimPool, log: Log, poller: Poller, when_open: Callable[[], None]
    ) -> None:
        self.orphans = 0
        self._pool = pool
        self._poller = poller
        self._log = log
        self._when_open = when_open
        self._deaths = Wake()
        # Commands whose status is not known yet. One that is reaped here has lost its shim, even
        # where that is reaped after it.
        self._commands: set[int] = set()
        self._early: dict[int, ExitStatus] = {}
        self._adopted: dict[int, tuple[Owner, Callable[[ExitStatus], None]]] = {}
        self._when_gone: dict[int, list[tuple[Owner, Callable[[], None]]]] = {}

    async def run(self) -> None:
        """Serve for ever. A core task: what escapes it is an uncaught error of the daemon."""
        signal.signal(signal.SIGCHLD, self._on_death)
        self._when_open()
        self.reap()
        while True:
            await trio.lowlevel.wait_readable(self._deaths.fd)
            self._deaths.take()
            self._poller.batch(self.reap)

    def _on_death(self, _number: int, _frame: object) -> None:
        self._deaths.tell()

    def sweep(self) -> None:
        """Look for dead children in the next turn, whether or not a signal told of them.

        A SIGCHLD cannot be lost, but this costs nothing and needs no proof.
        """
        self._deaths.tell()

    def reap(self) -> int:
        """Take the status of every child that has ended; returns how many."""
        taken = 0
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return taken
            if not pid:
                return taken
            if os.WIFSTOPPED(status):
                self._stopped(pid)
                continue
            taken += 1
            self._dispatch(pid, status, usage)

    def _stopped(self, pid: int) -> None:
        shim = self._pool.by_pid.get(pid)
        if shim is not None:
            self._poller.call_at(
                time.monotonic() + _CONTINUE_S, shim, lambda: shim.signal(signal.SIGCONT)
            )

    def _dispatch(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
        shim = self._pool.by_pid.pop(pid, None)
        if shim is not None:
            shim.is_reaped = True
            shim.read_last_words()  # of what it started and how that ended, before its cgroup goes
            self._pool.reaped(shim)
            if status:
                self._log.debug("shim_ended", pid=pid, status=status)
        else:
            self._hear_of(pid)
        exit_status = told_by_wait(status, usage, time.monotonic())
        adopted = self._adopted.pop(pid, None)
        if adopted is not None:
            owner, on_exit = adopted
            _tell(owner, lambda: on_exit(exit_status))
        elif pid in self._commands:
            self._early[pid] = exit_status
        elif shim is None:
            self.orphans += 1
        self._tell_gone(pid)

    def _hear_of(self, pid: int) -> None:
        # Linux has a shim reaped before what it leaves, which no page promises; and one that is
        # traced is not to be had. Then what it said of this command may be yet unread.
        shim = None if pid in self._commands or pid in self._adopted else self._pool.over(pid)
        if shim is not None:
            shim.read_last_words()

    def _tell_gone(self, shim_pid: int) -> None:
        for owner, call in self._when_gone.pop(shim_pid, []):
            _tell(owner, call)

    def started(self, pid: int) -> None:
        """A command runs: its status will be told by its shim, or asked for here."""
        self.told(pid)  # whoever had the number before
        self._commands.add(pid)

    def told(self, pid: int) -> None:
        """Its exec has the status, or never will: what becomes of the number is another's.

        A shim can die between telling a status and taking it. Then it was taken here as well, and
        must not wait for the next command that the kernel gives the same number.
        """
        self._commands.discard(pid)
        self._early.pop(pid, None)
        self._adopted.pop(pid, None)

    def is_command(self, pid: int) -> bool:
        """Say whether a command has this number, as far as is known."""
        return pid in self._commands

    def adopt(self, pid: int, owner: Owner, on_exit: Callable[[ExitStatus], None]) -> None:
        """Report the status of a command whose shim is gone; it is our child by now.

        Args:
            pid: The command.
            owner: Whose failure it is if `on_exit` fails.
            on_exit: Told once.
        """
        early = self._early.pop(pid, None)
        if early is None:
            self._adopted[pid] = owner, on_exit
        else:
            on_exit(early)

    def when_gone(self, shim_pid: int, owner: Owner, call: Callable[[], None]) -> None:
        """Call once a killed shim is dead: from then on its descendants are the daemon's."""
        if shim_pid not in self._pool.by_pid:
            call()
            return
        self._when_gone.setdefault(shim_pid, []).append((owner, call))
        self._look_later(shim_pid, owner)

    def _look_later(self, shim_pid: int, owner: Owner) -> None:
        # Dead and not to be had by wait(2): a process of a command with the right to traces it, and
        # may be among what it leaves, to be ended only after this.
        def look() -> None:
            if shim_pid not in self._when_gone:
                return
            with contextlib.suppress(OSError):  # if we cannot look now, then next time
                stat = read_stat(shim_pid)
                if stat is None or stat.state in "ZX":
                    self._tell_gone(shim_pid)
                    return
            self._look_later(shim_pid, owner)

        self._poller.call_at(time.monotonic() + _WITHHELD_S, owner, look)


def _tell(owner: Owner, call: Callable[[], None]) -> None:
    # Reaping is a core task; what one exec makes of a status is that exec's own business.
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the owner's failure, survived here
        owner.stray(error)
