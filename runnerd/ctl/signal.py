"""runnerctl signal: send a signal to an exec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .printing import print_json
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Sends the signal and nothing else: no escalation, no waiting. To end an exec, use cancel.

examples:
  runnerctl signal web HUP
  runnerctl signal build SIGINT --to group
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument("signal", metavar="NAME", help="TERM, SIGTERM, RTMIN+1 or a number")
    parser.add_argument(
        "--to",
        choices=("command", "group", "tree"),
        default="command",
        help="the process itself, its process group, or all it started (default: command)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl signal") as client:
        answer = client.signal(options.exec_id, options.signal, to=options.to)
    if options.json:
        print_json(answer)
    return 0
