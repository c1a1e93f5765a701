"""runnerctl drain and undrain: refuse new work, and take it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Draining refuses new starts; what runs keeps running and can be followed, waited for and ended.
With --if-idle-for the daemon looks and drains in one step: it is drained and nothing has started,
or it is refused (exit code 125) with the reasons; see runnerctl activity for what counts.

examples:
  runnerctl drain && runnerctl wait build && runnerctl stop
  runnerctl drain --if-idle-for 600 && runnerctl stop
  runnerctl undrain
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    if parser.prog.endswith(" drain"):
        condition(parser)


def condition(parser: argparse.ArgumentParser) -> None:
    """Declare the options of what may be for an idle sandbox only."""
    parser.add_argument(
        "--if-idle-for",
        metavar="S",
        type=float,
        help="only if it has been idle for so many seconds; 0 = idle now",
    )
    parser.add_argument(
        "--leftovers-count",
        action="store_true",
        help="with it: what commands left running keeps it from being idle",
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    name = f"runnerctl {options.command}"
    with connect(**where(options), client=name) as client:
        if options.command == "drain":
            client.drain(if_idle_for_s=options.if_idle_for, leftovers_count=options.leftovers_count)
        else:
            client.undrain()
    return 0
