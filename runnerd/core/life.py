"""The life of one exec, as a table.

Rule 1: every state an exec can be in, and every way it can change, is in TRANSITIONS.
Rule 2: this file knows no clock, no process and no socket; core/execs.py holds the facts.

Every pair of a state and an event is written down: in TRANSITIONS if it may happen, in
IMPOSSIBLE, with the reason, if it may not. tests/unit/test_life.py checks that no pair is
missing and none is in both.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """Where an exec stands; `shown` is the word the protocol uses."""

    STARTING = "starting"
    FAILED = "failed"
    RUNNING = "running"
    DRAINING = "draining"
    DRAINING_EMPTY = "draining, nothing of it lives"
    LINGERING = "lingering"
    CLOSED = "closed"

    @property
    def shown(self) -> str:
        """Return the protocol's word for the state."""
        return self.value.split(",")[0]


class Event(enum.Enum):
    """What can happen to an exec."""

    STARTED = "execve succeeded"
    START_FAILED = "the command could not be started"
    END = "somebody wants it ended"
    EXITED = "the command's status is known"
    DRAINED = "its pipes are at EOF, or the drain is over"
    EMPTY = "no process of it is left"
    SHIM_LOST = "its shim is gone without having said empty"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.STARTING: {
        Event.STARTED: State.RUNNING,
        Event.START_FAILED: State.FAILED,
        Event.END: State.STARTING,  # a latch: carried out with STARTED, it cannot be lost
        Event.SHIM_LOST: State.STARTING,  # the launcher fails the start with what is known
    },
    State.FAILED: {
        Event.END: State.FAILED,
        Event.SHIM_LOST: State.FAILED,
        Event.EMPTY: State.FAILED,
    },
    State.RUNNING: {
        Event.END: State.RUNNING,
        Event.EXITED: State.DRAINING,
        Event.SHIM_LOST: State.RUNNING,  # the daemon adopts the tree and reaps the command
    },
    State.DRAINING: {
        Event.END: State.DRAINING,
        Event.DRAINED: State.LINGERING,
        Event.EMPTY: State.DRAINING_EMPTY,
        Event.SHIM_LOST: State.DRAINING,
    },
    State.DRAINING_EMPTY: {
        Event.END: State.DRAINING_EMPTY,
        Event.DRAINED: State.CLOSED,
        Event.SHIM_LOST: State.DRAINING_EMPTY,  # it leaves right after empty
    },
    State.LINGERING: {
        Event.END: State.LINGERING,
        Event.EMPTY: State.CLOSED,
        Event.SHIM_LOST: State.LINGERING,
    },
    State.CLOSED: {
        Event.END: State.CLOSED,
        Event.SHIM_LOST: State.CLOSED,
    },
}

_ORDER = "the shim's messages arrive in order, and started comes first"
_ONCE = "published exactly once"

IMPOSSIBLE: Final[dict[tuple[State, Event], str]] = {
    (State.STARTING, Event.EXITED): _ORDER,
    (State.STARTING, Event.DRAINED): "pipes drain only after the exit",
    (State.STARTING, Event.EMPTY): "before started, empty is the end of a failed start",
    (State.FAILED, Event.STARTED): "failed and started exclude each other",
    (State.FAILED, Event.START_FAILED): _ONCE,
    (State.FAILED, Event.EXITED): "nothing ran",
    (State.FAILED, Event.DRAINED): "nothing ran",
    (State.RUNNING, Event.STARTED): _ONCE,
    (State.RUNNING, Event.START_FAILED): "failed and started exclude each other",
    (State.RUNNING, Event.DRAINED): "EOF on both pipes is no exit; only a reaped status is",
    (State.RUNNING, Event.EMPTY): "the command itself is not reaped yet",
    (State.DRAINING, Event.STARTED): _ONCE,
    (State.DRAINING, Event.START_FAILED): "failed and started exclude each other",
    (State.DRAINING, Event.EXITED): _ONCE,
    (State.DRAINING_EMPTY, Event.STARTED): _ONCE,
    (State.DRAINING_EMPTY, Event.START_FAILED): "failed and started exclude each other",
    (State.DRAINING_EMPTY, Event.EXITED): _ONCE,
    (State.DRAINING_EMPTY, Event.EMPTY): _ONCE,
    (State.LINGERING, Event.STARTED): _ONCE,
    (State.LINGERING, Event.START_FAILED): "failed and started exclude each other",
    (State.LINGERING, Event.EXITED): _ONCE,
    (State.LINGERING, Event.DRAINED): _ONCE,
    (State.CLOSED, Event.STARTED): _ONCE,
    (State.CLOSED, Event.START_FAILED): "failed and started exclude each other",
    (State.CLOSED, Event.EXITED): _ONCE,
    (State.CLOSED, Event.DRAINED): _ONCE,
    (State.CLOSED, Event.EMPTY): _ONCE,
}

LIVE: Final = frozenset(
    {State.STARTING, State.RUNNING, State.DRAINING, State.DRAINING_EMPTY, State.LINGERING}
)


def after(state: State, event: Event) -> State:
    """Return the state an event leads to.

    Raises:
        AssertionError: If the pair is impossible: a defect here, never the outside's fault.
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"{state.name} {event.name}: {IMPOSSIBLE[state, event]}"
    return following
