"""What a screen's recent bytes must not do again, and what a program left behind must be undone.

Both look at the command's output for control sequences only, and know no screen. Source: XTerm
Control Sequences (ctlseqs); ECMA-48.
"""

from __future__ import annotations

import re
from typing import Final

# Each asks the terminal something. Shown once more, the answer would be typed into the command.
_QUERIES: Final = re.compile(
    rb"\x1b\[[>=?]?[\d;]*c"  # device attributes
    rb"|\x1b\[\??[\d;]*n"  # status, cursor position
    rb"|\x1b\[>[\d;]*q"  # version
    rb"|\x1b\[\??[\d;]*\$p"  # modes
    rb"|\x1b\[\?u"  # keyboard protocol
    rb"|\x1b\[(?:1[1348]|19|2[01])(?:;\d+)?t"  # window
    rb"|\x1bP[+$]q[^\x1b]*\x1b\\"  # settings, terminfo
    rb"|\x1b\][\d;]*;\?(?:\x07|\x1b\\)"  # colours
)
# What begins a text for the terminal, and what ends it: in between, a bell is such an end too.
_TEXT_BEGIN: Final = re.compile(rb"\x1b[]PX^_]")
_TEXT_END: Final = re.compile(rb"\x07|\x18|\x1a|\x1b[^]PX^_]")
_MODE: Final = re.compile(rb"\x1b\[\?([\d;]+)([hl])")
_LONGEST_MODE: Final = 32

# What a person notices after a program that could not tidy up, and what ends it.
_UNDO: Final = {
    (b"1", True): b"\x1b[?1l",  # arrow keys
    (b"25", False): b"\x1b[?25h",  # the cursor is hidden
    (b"1000", True): b"\x1b[?1000l",  # the mouse
    (b"1002", True): b"\x1b[?1002l",
    (b"1003", True): b"\x1b[?1003l",
    (b"1006", True): b"\x1b[?1006l",
    (b"1004", True): b"\x1b[?1004l",  # focus
    (b"2004", True): b"\x1b[?2004l",  # bracketed paste
    (b"47", True): b"\x1b[?47l",  # the other screen
    (b"1047", True): b"\x1b[?1047l",
    (b"1049", True): b"\x1b[?1049l",
}


def without_queries(shown: bytes) -> bytes:
    """Return bytes to show once more, without what a terminal would answer."""
    return _QUERIES.sub(b"", shown)


class Modes:
    """Which modes of the terminal a command has switched, to undo them where it cannot.

    Attributes:
        is_in_text: Whether what was shown last is the middle of a text for the terminal, a
            window's title for one, so that nothing of ours may be put behind it.
    """

    def __init__(self) -> None:
        self.is_in_text = False
        self._switched: dict[bytes, bool] = {}
        self._end = b""

    def saw(self, data: bytes) -> None:
        """Take note of what is shown."""
        if b"\x1b" not in data and not self._end and not self.is_in_text:
            return
        data = self._end + data
        self._saw_text(data)
        for numbers, letter in _MODE.findall(data):
            for number in numbers.split(b";"):
                self._switched[number] = letter == b"h"
        begin = data.rfind(b"\x1b", -_LONGEST_MODE)
        self._end = b"" if begin < 0 or _MODE.match(data, begin) else data[begin:]

    def _saw_text(self, data: bytes) -> None:
        at = 0
        while True:
            found = (_TEXT_END if self.is_in_text else _TEXT_BEGIN).search(data, at)
            if found is None:
                return
            self.is_in_text, at = not self.is_in_text, found.end()

    def undo(self) -> bytes:
        """Return what puts the terminal's modes and colours back; nothing where none is known."""
        undone = b"".join(_UNDO.get(switched, b"") for switched in self._switched.items())
        self._switched.clear()
        return undone + b"\x1b[m" if undone else b""
