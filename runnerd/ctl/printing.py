"""How a value is printed: JSON for machines, columns and plain words for people."""

from __future__ import annotations

import re
import shlex
import time
from typing import TYPE_CHECKING, Final

import msgspec

from .endings import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMAND_CHARS_MAX: Final = 60
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_KIB: Final = 1024
_TEN: Final = 10
_UNITS: Final = "BKMGT"
_BEYOND_ASCII: Final = re.compile(r"[^\n -~]")


def print_json(value: object) -> None:
    """Print one value as indented JSON."""
    print(json_text(value, indent=2))


def json_text(value: object, *, indent: int = -1) -> str:
    """Write a value as JSON, in one line unless indented; what is unprintable is escaped in it.

    JSON itself demands that of the first 32 characters alone, and U+009B too is how a terminal's
    commands begin.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return _BEYOND_ASCII.sub(_printable, text)


def _printable(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable():
        return char
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns by two spaces; the last one is as long as it is."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    widths[-1] = 0
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def moment(at: float) -> str:
    """Write Unix seconds as people read them, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def command_line(argv: Sequence[str]) -> str:
    """Write an argv as a shell would read it, on one line, shortened."""
    text = plain(" ".join(map(shlex.quote, argv)))
    return text if len(text) <= _COMMAND_CHARS_MAX else text[: _COMMAND_CHARS_MAX - 3] + "..."


def duration(seconds: float) -> str:
    """Write a duration in its two largest units, as ps does: 3s, 2m10s, 5h2m, 3d4h."""
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m{whole % _MINUTE_S}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h{whole % _HOUR_S // _MINUTE_S}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // _HOUR_S}h"


def size(count_bytes: int | None) -> str:
    """Write a size in MiB, or that it is not known."""
    return "unknown" if count_bytes is None else f"{count_bytes / 2**20:.1f} MiB"


def short_size(count_bytes: int | None) -> str:
    """Write a size in at most six characters: 512B, 3.4M, 120M, 1.5G; - where it is not known."""
    if count_bytes is None:
        return "-"
    if count_bytes < _KIB:
        return f"{count_bytes}B"
    power = min((count_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    value = count_bytes / _KIB**power
    return f"{value:.0f}{_UNITS[power]}" if value >= _TEN else f"{value:.1f}{_UNITS[power]}"
