"""runnerctl pin and unpin: keep the sandbox from counting as idle, or no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .endings import say
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
A pin is known by its reason, is the sandbox's and not this command's, and ends with the daemon at
the latest. `runnerctl activity` lists them. unpin exits with 1 if there is no pin of that reason.

examples:
  runnerctl pin "Ann looks at the build" --ttl 3600
  runnerctl unpin "Ann looks at the build"
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("reason", metavar="REASON", help="why; what the pin is known by")
    if parser.prog.endswith(" pin"):
        parser.add_argument(
            "--ttl",
            metavar="S",
            type=float,
            help="seconds until it ends by itself (default: until unpinned)",
        )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client=f"runnerctl {options.command}") as client:
        if options.command == "pin":
            client.pin(options.reason, ttl_s=options.ttl)
            return 0
        was_pinned = client.unpin(options.reason).was_pinned
    if not was_pinned:
        say("there is no pin of that reason; runnerctl activity lists those there are")
    return 0 if was_pinned else 1
