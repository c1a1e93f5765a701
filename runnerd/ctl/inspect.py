"""runnerctl inspect: show all that is known of an exec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .printing import print_json
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Prints JSON: everything but the exec's environment, which may hold secrets.

example:
  runnerctl inspect build --usage | jq .usage
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument(
        "--usage", action="store_true", help="also count its processes, their memory and CPU time"
    )
    parser.add_argument("--json", action="store_true", help="accepted, and always so")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl inspect") as client:
        print_json(client.inspect(options.exec_id, usage=options.usage))
    return 0
