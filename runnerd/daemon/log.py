"""The log: one JSON object a line on stderr, that can neither block nor end the daemon.

A line is written only if the descriptor takes it now: a pipe that poll(2) calls writable takes
PIPE_BUF bytes whole (pipe(7)), so lines are cut to that. A log nobody reads costs lines, which
are counted, and nothing else.
"""

from __future__ import annotations

import datetime as dt
import os
import select
import traceback
from typing import Final, Literal

import msgspec

LINE_BYTES_MAX: Final = 4096  # PIPE_BUF on Linux, pipe(7)
_TEXT_CHARS_MAX: Final = 2400
Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")


class Log:
    """Write log lines.

    Args:
        level: The least level written.
        fd: Where to.

    Attributes:
        dropped: Lines not written because the descriptor did not take them.
    """

    def __init__(self, level: Level = "info", fd: int = 2) -> None:
        self.dropped = 0
        self._fd = fd
        self._least = LEVELS.index(level)
        self._encode = msgspec.json.Encoder(enc_hook=repr).encode
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

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
        fields |= {"error": repr(error), "traceback": text[-_TEXT_CHARS_MAX:]}
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: dict[str, object]) -> None:
        if LEVELS.index(level) < self._least:
            return
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        line = self._encode({"ts": now, "level": level, "event": event, **fields})
        if len(line) >= LINE_BYTES_MAX:
            short = {key: str(value)[: LINE_BYTES_MAX // 8] for key, value in fields.items()}
            line = self._encode({"ts": now, "level": level, "event": event, "cut": True} | short)
            if len(line) >= LINE_BYTES_MAX:
                line = self._encode({"ts": now, "level": level, "event": event, "cut": True})
        try:
            ready = self._poll.poll(0)
            if not ready or not ready[0][1] & select.POLLOUT:
                self.dropped += 1
                return
            os.write(self._fd, line + b"\n")
        except OSError:  # a closed pipe, a full disk: the log is the least of the daemon's duties
            self.dropped += 1
