"""What is said of an exec that is known already: to its own start again, and to all who come late.

Nothing here changes anything. A Past answers what its exit answers; what needs more than that is
refused with the exit in the error's data.
"""

from __future__ import annotations

from runnerd.protocol.errors import RequestError

from .digest import Content
from .execs import Exec
from .past import Past


def same_start(known: Exec | Past, content: Content | None) -> Exec | Past:
    """Return the exec if this is its own start sent again.

    A nonce is looked up under its exec_id alone: it says whose start that is, and a sender may
    use one nonce for many ids.

    Raises:
        RequestError: exec_exists under another nonce or none; nonce_reused where the content is
            another; exec_lost where it is the same, and nobody saw how it ended.
    """
    if content is None or known.nonce != content.nonce:
        state = _settled_word(known)
        raise RequestError(
            "exec_exists", f"exec '{known.exec_id}' exists and is {state}", state=state
        )
    if known.digest != content.digest:
        raise _nonce_reused(known, content)
    if isinstance(known, Past) and known.is_lost:
        raise lost(known)
    return known


def _settled_word(known: Exec | Past) -> str:
    if isinstance(known, Past):
        return "settled"
    return "live" if known.is_live else "finished"


def _nonce_reused(known: Exec | Past, content: Content) -> RequestError:
    field = None
    if isinstance(known, Exec) and known.content is not None:
        field = known.content.first_difference(content)
    where = "in content" if field is None else f"in {field}"
    return RequestError(
        "nonce_reused",
        f"exec '{known.exec_id}' was started with this nonce and differs {where}",
        field=field,
    )


def check_owner(known: Exec | Past, if_nonce: str | None) -> None:
    """Refuse who names a nonce that is not the exec's own.

    Raises:
        RequestError: not_owner.
    """
    if if_nonce is not None and known.nonce != if_nonce:
        raise RequestError(
            "not_owner", f"exec '{known.exec_id}' was not started with the nonce in if_nonce"
        )


def lost(past: Past) -> RequestError:
    """Make the error for an exec whose daemon ended before it."""
    return RequestError(
        "exec_lost",
        f"exec '{past.exec_id}' was lost with incarnation {past.incarnation}",
        incarnation=past.incarnation,
        pid=past.pid,
    )


def no_output(past: Past) -> RequestError:
    """Make the error for an attach that comes too late."""
    if past.is_lost:
        return lost(past)
    if past.transcript == "lost":
        return RequestError(
            "exec_lost",
            f"the output of exec '{past.exec_id}' was lost with incarnation {past.incarnation}",
            incarnation=past.incarnation,
            pid=past.pid,
            exit=past.exit,
        )
    if past.transcript == "forgotten":
        return RequestError(
            "exec_settled",
            f"exec '{past.exec_id}' was forgotten on request",
            incarnation=past.incarnation,
            exit=past.exit,
        )
    return RequestError(
        "exec_evicted",
        f"the output of exec '{past.exec_id}' is no longer kept",
        exit=past.exit,
    )


def over(past: Past) -> RequestError:
    """Make the error for what only a living command can take: a signal, or its stdin."""
    if past.is_lost:
        return lost(past)
    return RequestError(
        "exec_ended", f"exec '{past.exec_id}' has ended; nothing was changed", exit=past.exit
    )
