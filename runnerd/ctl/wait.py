"""runnerctl wait: wait for an exec's end and exit with its code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .endings import ending, exit_code, say
from .printing import print_json
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Exits as `run` does, with the command's own exit code; 125 if it has not ended by --timeout,
which changes nothing. Works for an exec that has long ended too.

examples:
  runnerctl wait build && echo built
  runnerctl wait build --json | jq .peak_rss_bytes
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument(
        "--until",
        choices=("exited", "closed"),
        default="exited",
        help="the command's own exit, or until nothing of it is left (default: exited)",
    )
    parser.add_argument("--timeout", metavar="S", type=float, help="wait at most S seconds")
    parser.add_argument("--json", action="store_true", help="print the exit as JSON")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not say who ended the command"
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl wait") as client:
        exit = client.wait(options.exec_id, until=options.until, timeout_s=options.timeout)
    if options.json:
        print_json(exit)
    words = None if options.quiet else ending(exit)
    if words is not None:
        say(words)
    return exit_code(exit)
