"""The two methods that are about an exec's end: exec.cancel brings it, exec.wait waits for it."""

from __future__ import annotations

import time

from runnerd.core.life import State
from runnerd.core.past import Past
from runnerd.core.remembered import check_owner, lost
from runnerd.protocol.answers import CancelAnswer
from runnerd.protocol.errors import RequestError
from runnerd.protocol.exits import Exit
from runnerd.protocol.requests import ExecCancel, ExecWait

from .calls import Call
from .running import Running


def cancel(call: Call, params: ExecCancel) -> None:
    """End an exec; answered once all is gone, the survivors are known, or ending has begun."""
    service = call.service
    running = service.running.get(params.exec_id)
    if running is None:
        call.answer(_cancel_past(call, params))
        return
    its_exec = running.exec
    check_owner(its_exec, params.if_nonce)
    if its_exec.state is State.CLOSED:
        call.answer(
            CancelAnswer(outcome="already_ended", receipt=its_exec.receipt, exit=its_exec.exit)
        )
        return
    if its_exec.state is State.STARTING:
        # The same start sent again must not run after its cancel was answered.
        service.registry.bury(params.exec_id, time.monotonic(), if_nonce=params.if_nonce)
    running.end("cancelled", params.grace_s)
    Cancelling(call, running, wait=params.wait).check()


def _cancel_past(call: Call, params: ExecCancel) -> CancelAnswer:
    registry = call.service.registry
    past = registry.past(params.exec_id)
    if past is not None:
        check_owner(past, params.if_nonce)
        if past.is_lost:
            raise lost(past)
        return CancelAnswer(outcome="already_ended", exit=past.exit)
    if not params.tombstone:
        raise RequestError("exec_unknown", f"there is no exec '{params.exec_id}'")
    registry.bury(params.exec_id, time.monotonic(), if_nonce=params.if_nonce)
    return CancelAnswer(outcome="tombstoned")


class Cancelling:
    """One exec.cancel that has taken effect: answered once there is something to tell."""

    def __init__(self, call: Call, running: Running, *, wait: bool) -> None:
        self._call = call
        self._running = running
        self._wait = wait
        self._on_end = call.later(self.check)
        call.connection.waiting.add(self)

    def abandon(self) -> None:
        """Nobody is there any more to be answered: leave nothing with the exec."""
        self._running.forget_end_waiter(self._on_end)
        self._call.connection.waiting.discard(self)
        self._on_end = _nothing  # it holds us, and we the exec: nothing else would free it

    def check(self) -> None:
        """Answer if it is time, else wait on."""
        answer = _cancel_answer(self._running, wait=self._wait)
        if answer is None:
            self._running.when_ended(self._on_end)
        else:
            self.abandon()
            self._call.answer(answer)


def _cancel_answer(running: Running, *, wait: bool) -> CancelAnswer | None:
    its_exec = running.exec
    if not its_exec.is_live:
        return CancelAnswer(outcome="ended", receipt=its_exec.receipt, exit=its_exec.exit)
    if its_exec.survivors:
        return CancelAnswer(outcome="survivors", receipt=its_exec.receipt, exit=its_exec.exit)
    if not wait and running.tree.end_confirmed:
        return CancelAnswer(outcome="ending", receipt=its_exec.receipt, exit=its_exec.exit)
    return None


def wait(call: Call, params: ExecWait) -> None:
    """Wait for an exec's end."""
    found = call.service.found(params.exec_id)
    if isinstance(found, Past):
        call.answer(found.exit or lost(found))
        return
    if call.connection.is_gone:
        return  # it waited for the start, and its connection did not
    waiting = Waiting(call, found, params)
    waiting.check()


class Waiting:
    """One exec.wait: answered by the end it waits for or by its timeout, whichever is first."""

    def __init__(self, call: Call, running: Running, params: ExecWait) -> None:
        self._call = call
        self._running = running
        self._until = params.until
        self._done = False
        self._timer = None
        # Made once: what is to be forgotten later must be the same object.
        self._on_exit = call.later(self._finish)
        self._on_end = call.later(self.check)
        call.connection.waiting.add(self)
        if params.timeout_s is not None:
            self._timer = call.service.poller.call_at(
                time.monotonic() + params.timeout_s, self, call.later(self._timed_out)
            )

    def stray(self, error: Exception) -> None:
        """See Owner; never called, since everything given away is guarded already."""
        self._call.service.stray(error, "request", method="exec.wait")

    def abandon(self) -> None:
        """Nobody is there any more to be answered: leave nothing with the exec."""
        self._done = True
        self._running.forget_exit_waiter(self._on_exit)
        self._running.forget_end_waiter(self._on_end)
        self._call.connection.waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        # They hold us, and we the exec: only the collector would free it.
        self._on_exit, self._on_end = _told, _nothing

    def check(self) -> None:
        """Answer if it is time, else wait on."""
        its_exec = self._running.exec
        if self._done:
            return
        if its_exec.exit is not None and (self._until == "exited" or not its_exec.is_live):
            self._finish(its_exec.exit)
        elif self._until == "exited":
            self._running.when_exited(self._on_exit)
        else:
            self._running.when_ended(self._on_end)

    def _finish(self, outcome: Exit | RequestError) -> None:
        if self._done:
            return
        self.abandon()
        self._call.answer(outcome)

    def _timed_out(self) -> None:
        self._finish(
            RequestError("wait_timeout", f"exec '{self._running.exec.exec_id}' has not ended yet")
        )


def _nothing() -> None:
    """Take the place of a callback that is not called any more."""


def _told(outcome: Exit | RequestError) -> None:
    """Take the place of one that was told an outcome."""
