"""Whether the daemon is well: from what it knows already, without asking a disk or a command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from runnerd.protocol.daemon_answers import HealthAnswer, Trouble, TroubleKind

if TYPE_CHECKING:
    from .service import Service

LAG_S: Final = 1.0  # a client notices; a busy machine alone is late by a few hundredths


def health(service: Service) -> HealthAnswer:
    """Describe the daemon's health."""
    # The guard knows of a stop before the loop does.
    state = service.registry.state if service.guard.cause() is None else "stopping"
    return HealthAnswer(
        live=True, ready=state == "serving", state=state, degraded=list(_troubles(service))
    )


def _troubles(service: Service) -> Iterator[Trouble]:
    journal, pulse = service.journal, service.pulse
    if service.state_trouble is not None:
        yield Trouble(kind="state_lost", message=service.state_trouble)
    elif service.state_path is not None and journal.reason is not None:
        kind: TroubleKind = "state_lost" if journal.is_gone else "journal_off"
        yield Trouble(kind=kind, message=f"starts and exits are not written: {journal.reason}")
    if service.state_path is not None and (claim := service.claiming.trouble) is not None:
        yield Trouble(kind="claim_off", message=claim)
    if (spool := service.spool.trouble) is not None:
        yield Trouble(kind="spool_off", message=spool)
    if (lag_s := pulse.worst_lag_s()) >= LAG_S:
        message = f"the loop was late by {lag_s:.1f} s in the last minute"
        yield Trouble(kind="loop_lag", message=message)
    if pulse.socket_trouble is not None:
        yield Trouble(kind="socket_unreachable", message=pulse.socket_trouble)
    if pulse.was_bound_again():
        message = "the socket's file was gone in the last minute; it was bound again"
        yield Trouble(kind="socket_bound_again", message=message)
    if service.metrics_port is not None and service.metrics_port.trouble is not None:
        yield Trouble(kind="metrics_off", message=service.metrics_port.trouble)
