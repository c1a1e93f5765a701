"""runnerctl attach: follow an exec's output until its exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.protocol.requests import ExecAttach

from .endings import ending, say, say_reconnecting
from .passing import Passer, open_standard_streams
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Prints what is kept of the output from its beginning, follows it, and exits with the command's
exit code. The exec is only watched: Ctrl-C, or a reader of ours that goes away, ends attach and
nothing else. Output that is no longer kept is named on standard error, and so is a lost
connection, which is tried for again for a minute.

examples:
  runnerctl attach x-0123456789abcdef
  runnerctl attach --tail web > web.log
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--tail", action="store_true", help="only what comes from now on")
    where.add_argument(
        "--after", metavar="N", type=int, default=0, help="only what comes after sequence N"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not say who ended the command"
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    open_standard_streams()
    params = ExecAttach(exec_id=options.exec_id, after="tail" if options.tail else options.after)
    with connect(**where(options), client="runnerctl attach", on_lost=say_reconnecting) as client:
        passer = Passer(client, owns=False, feeds=False)
        code = passer.follow("exec.attach", params)
    words = None if passer.exit is None or options.quiet else ending(passer.exit)
    if words is not None:
        say(words)
    return code
