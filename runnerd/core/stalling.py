"""Whether memory is under pressure, with hysteresis. No I/O, no clock."""

from __future__ import annotations

from typing import Final, Literal

Level = Literal["normal", "high"]

HIGH_PERCENT: Final = 10.0
NORMAL_PERCENT: Final = 5.0
# Of the last 10 s in which some task stood still for memory. systemd-oomd acts at 60 % over 30 s,
# when it is late; a spawner that is to send less work wants to know before. Half of it to come
# back, so that a load at the edge is one event and not one every two seconds.


class PressureLevel:
    """The level; it begins at normal.

    Attributes:
        level: high from HIGH_PERCENT on, until it falls under NORMAL_PERCENT.
    """

    def __init__(self) -> None:
        self.level: Level = "normal"

    def take(self, some_percent: float) -> bool:
        """Take a reading, 0-100; returns whether the level changed by it."""
        if self.level == "normal" and some_percent >= HIGH_PERCENT:
            self.level = "high"
            return True
        if self.level == "high" and some_percent < NORMAL_PERCENT:
            self.level = "normal"
            return True
        return False
