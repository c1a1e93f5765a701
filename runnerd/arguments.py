"""What the command lines of runnerd and runnerctl have in common: numbers, and what is none.

argparse itself says `invalid float value`, which is Python's word for it and not a user's.
"""

from __future__ import annotations

import argparse
from typing import Any


def number(text: str) -> float:
    """Return a number.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no number") from error


def whole(text: str) -> int:
    """Return a whole number.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from error


class NumbersParser(argparse.ArgumentParser):
    """A parser whose `type=float` and `type=int` say so in plain words."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register("type", float, number)
        self.register("type", int, whole)
