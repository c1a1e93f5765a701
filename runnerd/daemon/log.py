"""The log: one line an event on stderr, that can neither block nor end the daemon.

Rule 1: a line is written if the descriptor takes it now, else it is lost, and counted: the next
one says how many. See log_end.py.
Rule 2: no kind of event may flood it. After ten lines at once a kind has one a second; those
between are held back, and how many is said with the next of that kind, or by `held_back` where
none comes. Debug lines are not held back: who asks for them wants them all.
Rule 3: what is in a line may come from a hostile command or peer. See log_lines.py.
"""

from __future__ import annotations

import datetime as dt
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from .log_end import open_end
from .log_lines import json_line, text_line

_TRACEBACK_CHARS_MAX: Final = 2400
_AT_ONCE: Final = 10
_EVERY_S: Final = 1.0

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
Form = Literal["auto", "json", "text"]
FORMS: Final[tuple[Form, ...]] = ("auto", "json", "text")


class Log:
    """Write log lines.

    Args:
        level: The least level written.
        fd: Where to.
        form: json, text for people, or auto: text where `fd` is a terminal.

    Attributes:
        dropped: Lines lost because the descriptor did not take them.
        on_held: Called when the first line is held back: take_held() is to be called in a while.
    """

    def __init__(self, level: Level = "info", fd: int = 2, form: Form = "json") -> None:
        self.dropped = 0
        self.on_held: Callable[[], None] = lambda: None
        self._least = LEVELS.index(level)
        self._write_now = open_end(fd)
        is_text = form == "text" or (form == "auto" and os.isatty(fd))
        self._line = text_line if is_text else json_line
        self._full_at_s: dict[str, float] = {}  # by kind: when ten at once may come again
        self._held: Counter[str] = Counter()
        self._lost = 0  # of `dropped`, those not yet told

    def debug(self, event: str, **fields: object) -> None:
        """Something an operator wants only while looking for a fault."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Something that happened as it should."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something an operator should know."""
        self._write("warning", event, fields)

    def failure(self, event: str, error: BaseException, **fields: object) -> None:
        """Something that should not have happened, with its traceback."""
        text = "".join(traceback.format_exception(error))
        fields |= {"error": repr(error), "traceback": text[-_TRACEBACK_CHARS_MAX:]}
        self._write("error", event, fields)

    def take_held(self) -> list[tuple[str, int]]:
        """Return how many lines of each kind were held back and not told; to be told now."""
        held, self._held = self._held, Counter()
        return [*held.items()]

    def _may(self, event: str) -> bool:
        # A kind has _AT_ONCE lines in hand, and gets one back each _EVERY_S.
        now_s = time.monotonic()
        full_at_s = max(self._full_at_s.get(event, now_s), now_s) + _EVERY_S
        if full_at_s - now_s > _AT_ONCE * _EVERY_S:
            return False
        self._full_at_s[event] = full_at_s
        return True

    def _write(self, level: Level, event: str, fields: dict[str, object]) -> None:
        if LEVELS.index(level) < self._least:
            return
        if level != "debug":
            if not self._may(event):
                self._held[event] += 1
                if self._held.total() == 1:
                    self.on_held()
                return
            if event in self._held:
                fields = fields | {"held_back": self._held.pop(event)}
        if self._lost:
            fields = fields | {"lost": self._lost}
        if self._write_now(self._line(dt.datetime.now(dt.UTC), level, event, fields)):
            self._lost = 0
        else:
            self._lost += 1
            self.dropped += 1
