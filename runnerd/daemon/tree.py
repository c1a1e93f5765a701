"""The processes of one exec, whoever holds them: its shim, or the daemon once that is gone.

Here is decided who ends, signals and looks at them. How is said elsewhere: through the shim in
ending.py, without it in adopted.py.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runnerd.core.execs import Exec, ExitStatus
from runnerd.core.oom import SIGKILL
from runnerd.protocol.errors import RequestError
from runnerd.protocol.shimwire import Ending, Scope, Signalled, Survivors

from .adopted import AdoptedTree, Kin
from .effects import each_of
from .ending import EndMessage, ShimEnder
from .procfs import Stat, tree_use

if TYPE_CHECKING:
    from .leaf import Leaf
    from .poller import Owner
    from .service import Service
    from .shims import Shim

SignalReply = Callable[[int | RequestError], None]


class Tree:
    """The command of one exec and everything it started.

    Args:
        service: The daemon's shared parts.
        its_exec: The exec; its receipt, survivors and `forced` are kept up to date.
        owner: Who is told of a failure.
        asked_score: The oom_score_adj that was asked for.
        on_exited: Called with the command's status where its shim cannot tell it any more.
        on_empty: Called once nothing is left.
        on_news: Called when there is news of its ending: it has begun, or somebody survives.

    Attributes:
        shim: The shim that has or had it; None before the launch and after the end.
    """

    def __init__(
        self,
        service: Service,
        its_exec: Exec,
        owner: Owner,
        *,
        asked_score: int,
        on_exited: Callable[[ExitStatus], None],
        on_empty: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        self.shim: Shim | None = None
        self._service = service
        self._exec = its_exec
        self._owner = owner
        self._asked_score = asked_score
        self._on_exited = on_exited
        self._on_empty = on_empty
        self._on_news = on_news
        self._leaf: Leaf | None = None
        self._ender: ShimEnder | None = None
        self._adopted: AdoptedTree | None = None
        self._survivors: set[int] = set()
        self._asking: list[SignalReply] = []  # in the order the shim answers

    def handed_to(self, shim: Shim) -> None:
        """A shim has the job."""
        self.shim, self._leaf = shim, shim.leaf
        self._ender = ShimEnder(self._exec, shim, self._service.poller, self._owner)

    def leaf_refused(self, number: int) -> None:
        """It is in no cgroup of its own: the shim could not enter the leaf."""
        self._leaf = None
        self._service.pool.leaf_refused(number)

    # ------------------------------------------------------------------ ending

    def end(self, grace_s: float) -> None:
        """TERM, and KILL after the grace; a later call only hastens."""
        if self._adopted is not None:
            self._adopted.end(grace_s)
        elif self._ender is not None:
            self._ender.end(grace_s)

    def end_goes_on(self, message: EndMessage) -> None:
        """Take what the shim says about an ending."""
        if self._ender is None:
            return
        self._ender.take(message)
        if isinstance(message, Survivors):
            self._survivors_seen()
        elif isinstance(message, Ending):
            self._on_news()

    def _survivors_seen(self) -> None:
        # Told again whenever the set changes, and by the shim as by the daemon after it.
        pids = {each.pid for each in self._exec.survivors}
        self._service.counters.survivors += len(pids - self._survivors)
        self._survivors |= pids
        self._on_news()

    def force(self) -> None:
        """The shim has had its time: end what is left without it."""
        if self._adopted is None and self.shim is not None and not self._exec.survivors:
            self.shim.kill()

    @property
    def end_confirmed(self) -> bool:
        """Whether the ending has begun for certain."""
        return self._adopted is not None or (self._ender is not None and self._ender.confirmed)

    def had_no_part_in(self, status: ExitStatus) -> bool:
        """Say whether it is certain that no signal of ours has caused this end of the command."""
        if self._adopted is not None:
            return False
        if self._ender is None or not self._ender.confirmed:
            return True  # the shim had not begun to end anything yet
        # TERM met a command that does not handle it, so an exit by code is no answer to it.
        not_our_signal = status.code is not None or (
            status.signal == SIGKILL and not self._exec.forced
        )
        return self._ender.leader_was_default and not_our_signal

    # ------------------------------------------------------------------ without the shim

    @property
    def is_adopted(self) -> bool:
        """Whether the daemon itself holds it."""
        return self._adopted is not None

    @property
    def has_lost_its_shim(self) -> bool:
        """Whether what it has left may be among the daemon's own children."""
        return self.is_adopted or (self.shim is not None and self.shim.is_reaped)

    def left_by_shim(self) -> None:
        """The shim says that nothing is left below it."""
        if self._leaf is not None and self._exec.is_live and self._may_be_in(self._leaf):
            self._adopt()  # not below the shim, and in its cgroup all the same
        else:
            self._on_empty()

    def _may_be_in(self, leaf: Leaf) -> bool:
        try:
            return bool(self._service.spares.retry(leaf.pids))
        except OSError:
            return True  # who cannot look does not say so; adopted, it is looked at until we can

    def shim_lost(self) -> None:
        """The shim is gone, with the command started: adopt what it has left."""
        assert self.shim is not None
        self.shim.kill()  # its socket may have been closed while it lives
        self._service.reaper.when_gone(self.shim.pid, self._owner, self._adopt)

    def end_half_made(self, child_pid: int) -> None:
        """End what became of the parked child of a start that failed."""
        self._adopted = self._adopt_from(child_pid, self._nobody_else_leaves_orphans)
        self._adopted.end(0.0)

    def _nobody_else_leaves_orphans(self) -> bool:
        # A start may fail while another exec's orphans have their grace still.
        self._service.reaper.reap()  # shims that have died
        others = (each.tree for each in self._service.live() if each.tree is not self)
        return not any(each.has_lost_its_shim for each in others)

    def _adopt(self) -> None:
        pid = self._exec.pid
        assert pid is not None
        if self._ender is not None:
            self._ender.forget_timers()
        asking, self._asking = self._asking, []
        for reply in asking:
            reply(RequestError("internal", "the shim was lost"))
        self._adopted = adopted = self._adopt_from(pid, lambda: True)
        if self._exec.status is None:
            self._service.reaper.adopt(pid, self._owner, self._adopted_exited)
        if self._adopted is not adopted:
            return  # it was reaped already, it was the last, and all of it is closed
        grace_s = self._exec.grace_s
        if self._exec.end_by_s is not None:
            grace_s = max(0.0, self._exec.end_by_s - time.monotonic())
        adopted.end(grace_s)

    def _adopt_from(self, leader: int, claims_orphans: Callable[[], bool]) -> AdoptedTree:
        service = self._service
        return AdoptedTree(
            self._exec,
            leader,
            service.poller,
            self._owner,
            kin=Kin(
                is_shim=service.pool.by_pid.__contains__,
                is_command=service.reaper.is_command,
                all_ours=service.all_children_ours,
                least_score=service.launcher.telling_score(self._asked_score),
                leaf=self._leaf,
                claims_orphans=claims_orphans,
            ),
            spares=service.spares,
            reap=service.reaper.reap,
            on_empty=self._adopted_empty,
            on_survivors=self._survivors_seen,
        )

    def _adopted_exited(self, status: ExitStatus) -> None:
        self._on_exited(status)

    def _adopted_empty(self) -> None:
        self._service.reaper.reap()
        self._on_empty()

    # ------------------------------------------------------------------ signals

    def signal(self, number: int, to: Scope, reply: SignalReply) -> None:
        """Send one signal, by way of the shim where there is one; `reply` is told how many got it.

        Args:
            number: The signal.
            to: The command, its group or the whole tree.
            reply: Called once, now or later.
        """
        if self._adopted is not None:
            try:
                reply(self._adopted.signal(number, to))
            except OSError as error:
                reply(RequestError("internal", f"cannot look at the processes: {error.strerror}"))
        elif self.shim is None or not self.shim.send_signal(number, to):
            reply(0)
        else:
            self._asking.append(reply)

    def signalled(self, message: Signalled) -> None:
        """The shim says who got the signal it was asked first to send."""
        if self._asking:
            self._asking.pop(0)(outcome_of(message))

    # ------------------------------------------------------------------ looks

    @property
    def shim_pid(self) -> int | None:
        """Its shim's pid while it is ours."""
        return None if self.shim is None or self.shim.is_reaped else self.shim.pid

    def adopted_members(self) -> list[Stat] | None:
        """Return the processes of an adopted tree, None where the shim still holds it.

        Raises:
            OSError: If we cannot look.
        """
        return None if self._adopted is None else self._adopted.members()

    def cpu_s(self) -> float | None:
        """Return its CPU seconds, those of its dead included; None where they cannot be seen."""
        use = None if self.shim_pid is None else tree_use(self.shim_pid)
        if use is None:
            return None
        self._exec.saw_processes(use.processes)
        in_leaf = None if self._leaf is None else self._leaf.cpu_s()
        if in_leaf is not None:
            return max(use.cpu_s, in_leaf)  # root may have left its cgroup, and is in the tree
        return use.cpu_s if use.is_whole else None

    def read_leaf(self) -> None:
        """Take over what its cgroup has counted so far, where it has one."""
        if self._leaf is not None:
            self._exec.own_oom_kills(self._leaf.oom_kills())
            self._exec.counted_tasks(self._leaf.peak_tasks())

    # ------------------------------------------------------------------ its end

    def close(self) -> None:
        """Nothing of it is left: wait for nothing, and let go of everything.

        The shim left before it had read whom else to signal: nobody was signalled.
        """
        asking, self._asking = self._asking, []
        ender, self._ender = self._ender, None
        self.shim = self._adopted = None
        each_of(
            lambda: None if ender is None else ender.forget_timers(),
            *(functools.partial(reply, 0) for reply in asking),
        )


def outcome_of(message: Signalled) -> int | RequestError:
    """Return how many got a signal, or why nobody did."""
    if message.count or message.errno != errno.EPERM:
        return message.count
    return RequestError("not_permitted", "the daemon's user may not signal that process")
