"""runnerctl drain and undrain: refuse new work, and take it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Draining refuses new starts; what runs keeps running and can be followed, waited for and ended.

examples:
  runnerctl drain && runnerctl wait build && runnerctl stop
  runnerctl undrain
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG


def main(options: argparse.Namespace) -> int:
    """Run it."""
    name = f"runnerctl {options.command}"
    with connect(**where(options), client=name) as client:
        if options.command == "drain":
            client.drain()
        else:
            client.undrain()
    return 0
