"""What is asked about the sandbox as a whole: whose it is, whether it is idle, and to leave it.

Each of these looks and acts in one turn of the loop, so nothing can happen in between: a start is
accepted before a drain, which then finds it live, or it finds the daemon draining.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from runnerd.core.activity import Facts, Verdict, not_idle
from runnerd.core.life import State
from runnerd.protocol.answers import Empty
from runnerd.protocol.daemon_requests import (
    DaemonDrain,
    DaemonStop,
    SandboxActivity,
    SandboxClaim,
    SandboxPin,
)
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import NoParams
from runnerd.protocol.sandbox_answers import ActivityAnswer, ClaimAnswer, PinAnswer

from .calls import Call

if TYPE_CHECKING:
    from .service import Service

_IDS_LISTED: Final = 100


def claim(call: Call, params: SandboxClaim) -> None:
    """Take a claim; what comes behind it on its connection waits until it is written."""
    service, connection = call.service, call.connection
    taken = service.claiming.take(params, connection.fence)
    mine = taken.standing.claim
    if taken.created:
        service.observer.claimed(mine, taken.previous, connection.number)
    connection.hold()

    @call.later
    def written(is_durable: bool) -> None:  # noqa: FBT001 - an answer, not a mode
        connection.release()
        call.answer(
            ClaimAnswer(
                claim=mine, created=taken.created, previous=taken.previous, durable=is_durable
            )
        )

    try:
        service.claiming.when_written(written)
    except BaseException:
        connection.release()
        raise


def pin(call: Call, params: SandboxPin) -> None:
    """Set, renew or end a pin. It is the sandbox's: its connection may go."""
    service, now_s = call.service, time.monotonic()
    if params.unpin:
        was_pinned = service.activity.unpin(params.reason, now_s)
        if was_pinned:
            service.log.info("unpinned", connection=call.connection.number, reason=params.reason)
    else:
        was_pinned = service.activity.pin(params.reason, params.ttl_s, now_s)
        service.log.info(
            "pinned",
            connection=call.connection.number,
            reason=params.reason,
            ttl_s=params.ttl_s,
        )
    call.answer(PinAnswer(was_pinned=was_pinned, pins=service.activity.pins(now_s)))


def activity(call: Call, params: SandboxActivity) -> None:
    """Say whether the sandbox is idle."""
    verdict = _look(call.service, params.if_idle_for_s, leftovers_count=params.leftovers_count)
    facts = verdict.facts
    call.answer(
        ActivityAnswer(
            idle=not verdict.reasons,
            idle_for_s=verdict.idle_for_s,
            reasons=verdict.reasons,
            execs=[*facts.execs[:_IDS_LISTED]],
            execs_total=len(facts.execs),
            attached_total=facts.attached,
            leftovers=[*facts.leftovers[:_IDS_LISTED]],
            leftovers_total=len(facts.leftovers),
            pins=verdict.pins,
            state=call.service.registry.state,
        )
    )


def drain(call: Call, params: DaemonDrain) -> None:
    """Refuse new work from now on."""
    _refuse_unless_idle(call.service, params)
    if call.service.registry.state == "serving":
        call.service.registry.state = "draining"
        call.service.observer.draining(call.connection.number)
    call.answer(Empty())


def undrain(call: Call, _params: NoParams) -> None:
    """Take new work again."""
    registry = call.service.registry
    if registry.state == "stopping":
        raise RequestError("stopping", "the daemon is stopping")
    if registry.state == "draining":
        registry.state = "serving"
        call.service.observer.serving_again(call.connection.number)
    call.answer(Empty())


def stop(call: Call, params: DaemonStop) -> None:
    """Begin the stop. From here on every start finds the guard armed, and is refused."""
    _refuse_unless_idle(call.service, params)
    call.answer(Empty())
    call.service.stop_asked()


def _refuse_unless_idle(service: Service, params: DaemonDrain | DaemonStop) -> None:
    if params.if_idle_for_s is None:
        return
    verdict = _look(service, params.if_idle_for_s, leftovers_count=params.leftovers_count)
    if verdict.reasons:
        raise not_idle(verdict, params.if_idle_for_s)


def _look(service: Service, for_s: float, *, leftovers_count: bool) -> Verdict:
    execs: list[str] = []
    leftovers: list[str] = []
    attached = 0
    for running in service.live():
        attached += len(running.readers)
        is_over = running.exec.state is State.LINGERING
        (leftovers if is_over else execs).append(running.exec.exec_id)
    facts = Facts(execs, leftovers, attached)
    return service.activity.look(
        facts, time.monotonic(), for_s=for_s, leftovers_count=leftovers_count
    )
