"""The stop path: the same for SIGTERM, SIGINT, daemon.stop and an uncaught error.

The guard has begun it before anything here runs: the deadline is armed and the lifeline ended,
so every shim sends TERM at once and KILL at 1.5 s, whatever becomes of this process. What is
left to do is to refuse new work, to tell the clients how their execs ended, and to leave early.
"""

from __future__ import annotations

import contextlib
import os
import time

import trio

from runnerd.core.bounds import STOP_DEADLINE_S, STOP_FLUSH_S, STOP_GRACE_S
from runnerd.protocol.notes import StoppingNote

from .guard import cause_name
from .listening import Listener
from .service import Service

_STEP_S = 0.005
_FORCE_S = STOP_GRACE_S + 0.1
_JOURNAL_S = STOP_FLUSH_S + 0.1


async def watch_guard(service: Service) -> None:
    """Return once a cause has come. A core task: what escapes it is an uncaught error."""
    refused = 0
    while service.guard.cause() is None:
        await trio.lowlevel.wait_readable(service.guard.wake_fd)
        with contextlib.suppress(BlockingIOError):
            os.read(service.guard.wake_fd, 4096)
        total, number, pid = service.guard.refused()
        if total != refused:
            refused = service.counters.signals_refused = total
            service.log.warning("signal_refused", signal=number, pid=pid, total=total)


async def stop(service: Service, listener: Listener) -> None:
    """End everything in time; returns when the process may leave."""
    began_s = time.monotonic()
    cause = service.guard.cause()
    assert cause is not None
    met = service.met_by_stop()
    service.registry.state = "stopping"
    sender = service.guard.sender()
    service.log.info(
        "stopping",
        cause=cause_name(cause),
        code=service.guard.code(),
        live_execs=len(met),
        sender_pid=None if sender is None else sender.pid,
        sender_uid=None if sender is None else sender.uid,
        sender_comm=None if sender is None else sender.comm,
    )
    service.observer.stopping(cause_name(cause))
    listener.socket.close()
    service.pool.close()
    note = StoppingNote(cause=cause_name(cause), deadline_s=STOP_DEADLINE_S)
    for connection in list(service.connections):
        connection.note_stopping(note)
    for running in met:
        try:
            running.end("stopped", STOP_GRACE_S)
        except Exception as error:  # noqa: BLE001 - one exec's failure must not stop the stop
            service.stray(error, "stop", exec_id=running.exec.exec_id)
    with trio.move_on_after(_left_s(service, _FORCE_S)):
        await _idle(service)
    for running in service.live():
        running.tree.force()  # a command may keep stopping its shim
    with trio.move_on_after(_left_s(service)):
        await _idle(service)
        service.journal.finish()  # every exit is known: it is written while the clients read
        for connection in list(service.connections):
            await connection.flushed()
    _finish_journal(service)
    service.say_held()
    service.log.info(
        "stopped",
        took_s=round(time.monotonic() - began_s, 3),
        live_execs=service.registry.live_count,
        forced=sum(running.exec.forced for running in met),
    )


def stop_without_loop(service: Service) -> None:
    """Do what can be done where trio itself has failed: wait for the shims to end their trees."""
    service.pool.close()
    while service.pool.by_pid and _left_s(service):
        service.reaper.reap()
        time.sleep(_STEP_S)
    _finish_journal(service)


def finish_audit(service: Service) -> None:
    """Write what is left of the audit, once no connection is left to be answered."""
    if service.audit is not None:
        service.audit.finish(_left_s(service, _JOURNAL_S))


def _finish_journal(service: Service) -> None:
    # Nothing else is left to do, so it may be waited for; beyond this the deadline counts more.
    service.journal.finish()
    if not service.journal.wait_finished(_left_s(service, _JOURNAL_S)):
        service.log.warning("journal_failed", reason="it was not written in time")


async def _idle(service: Service) -> None:
    while service.registry.live_count:
        service.when_idle = trio.Event()
        await service.when_idle.wait()


def _left_s(service: Service, until_s: float = STOP_FLUSH_S) -> float:
    # Counted from the cause, not from here: a loop that heard of it late still leaves by itself,
    # with the socket removed, before the guard ends it.
    return max(0.0, service.guard.armed_s() + until_s - time.monotonic())
