"""runnerctl forget: let go of a finished exec's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import RemoteError

from .endings import error_code, say
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Frees the memory and disk that hold the output of execs that are over. Their ids stay taken and
their exits known: wait and inspect still answer. One that is not over is refused (exit code 125),
the others are let go of all the same.

examples:
  runnerctl forget build
  runnerctl forget x-0123456789abcdef x-fedcba9876543210
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_ids", metavar="ID", nargs="+")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl forget") as client:
        code = 0
        for exec_id in options.exec_ids:
            try:
                client.forget(exec_id)
            except RemoteError as error:
                if len(options.exec_ids) == 1:
                    raise
                # Without the error's own "nothing changed": others are forgotten.
                say(error.message)
                code = error_code(error)
    return code
