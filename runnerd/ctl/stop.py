"""runnerctl stop: end every exec and the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import CALL_TIMEOUT_S, connect
from runnerd.client.errors import StreamLost

from .drain import condition
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
As SIGTERM to the daemon: TERM to everything that runs, KILL at 1.5 s, gone within 2 s. Returns
once the daemon has gone, unless --no-wait. With --if-idle-for the daemon looks and stops in one
step, or refuses (exit code 125) with the reasons; see runnerctl activity for what counts.

examples:
  runnerctl stop
  runnerctl stop --if-idle-for 600
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--no-wait", action="store_true", help="return once the stop has begun")
    condition(parser)


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl stop") as client:
        client.stop(if_idle_for_s=options.if_idle_for, leftovers_count=options.leftovers_count)
        try:
            while not options.no_wait:
                client.receive_events(timeout_s=CALL_TIMEOUT_S)
        except StreamLost:
            # Its end of the connection is the last thing a daemon lets go of.
            pass
    return 0
