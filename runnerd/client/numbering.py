"""The numbers of a conversation's subscriptions, which outlive its connections. No I/O.

Each has a number of ours for as long as it is open, and another on each connection's wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pending import Followed


class Numbering:
    """The open subscriptions of one conversation.

    Attributes:
        followed: Those to an exec's output, by our number.
        watched: Those to events, by our number; with it the one on the wire, None = none so far.
    """

    def __init__(self) -> None:
        self.followed: dict[int, Followed] = {}
        self.watched: dict[int, int | None] = {}
        self._ours: dict[int, int] = {}  # by the number on this connection's wire
        self._last = 0

    @property
    def is_on_wire(self) -> bool:
        """Whether any is open on this connection."""
        return bool(self._ours)

    @property
    def exec_ids(self) -> dict[int, str]:
        """Whose output each is, "" for events."""
        followed = {number: each.checks.exec_id for number, each in self.followed.items()}
        return followed | dict.fromkeys(self.watched, "")

    def follow(self, followed: Followed) -> int:
        """Number a subscription to output; it is not on the wire yet."""
        self._last += 1
        self.followed[self._last] = followed
        return self._last

    def watch(self) -> int:
        """Number a subscription to events; it is not on the wire yet."""
        self._last += 1
        self.watched[self._last] = None
        return self._last

    def put_on_wire(self, number: int, wire_number: int) -> bool:
        """Take its number on this connection; False where it was forgotten meanwhile."""
        if number in self.watched:
            self.watched[number] = wire_number
        elif number in self.followed:
            self.followed[number].wire_number = wire_number
        else:
            return False
        self._ours[wire_number] = number
        return True

    def on_wire(self, number: int) -> int | None:
        """Return its number on this connection, None where it has none."""
        followed = self.followed.get(number)
        return self.watched.get(number) if followed is None else followed.wire_number

    def ours(self, wire_number: int) -> int | None:
        """Return our number of one on the wire, None where it was forgotten."""
        return self._ours.get(wire_number)

    def was_given(self, number: int) -> bool:
        """Whether this is, or was, one of ours."""
        return 0 < number <= self._last

    def forget(self, number: int) -> str | None:
        """Let go of one; returns its exec's id, "" for events, None where it is none of ours."""
        wire_number = self.on_wire(number)
        if wire_number is not None:
            self._ours.pop(wire_number, None)
        if number in self.watched:
            del self.watched[number]
            return ""
        followed = self.followed.pop(number, None)
        return None if followed is None else followed.checks.exec_id

    def lost(self) -> None:
        """Take the loss of the connection: none is on the wire, and all stay open."""
        self._ours.clear()
        self.watched = dict.fromkeys(self.watched)
        for followed in self.followed.values():
            followed.lost()
