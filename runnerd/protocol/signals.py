"""Signals by name and number, as a request may give them."""

from __future__ import annotations

import re
import signal
from typing import Final

SIGNAL_MAX: Final = 64

_REALTIME: Final = re.compile(r"(RTMIN|RTMAX)(?:([+-])(\d{1,2}))?")


def signal_number(text: str | int) -> int | None:
    """Return the number of a signal, or None if there is none of that name.

    Args:
        text: `TERM`, `SIGTERM`, `RTMIN+2`, `RTMAX-1`, in any case, or a number.

    Returns:
        1-64, or None.

    Source: signal(7); real-time numbers are the C library's, 34-64, as kill -l shows them.
    """
    if isinstance(text, int):
        return text if 1 <= text <= SIGNAL_MAX else None
    if not text.isascii():  # upper() turns a long s into S; \d takes any script's digits
        return None
    name = text.upper().removeprefix("SIG")
    if name.isdigit():
        return signal_number(int(name)) if len(name) < 4 else None
    found = _REALTIME.fullmatch(name)
    if found:
        base, sign, by = found.groups()
        first = int(signal.SIGRTMIN if base == "RTMIN" else signal.SIGRTMAX)
        number = first + int(f"{sign or '+'}{by or 0}")
        return number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else None
    try:
        return int(signal.Signals[f"SIG{name}"])
    except KeyError:
        return None


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15, `SIGRTMIN+2` for 36, the number itself where it has no name."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
