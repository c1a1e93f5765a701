"""runnerctl metrics: print the daemon's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
example:
  runnerctl metrics | grep ^runnerd_exec
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--format",
        choices=("text", "openmetrics"),
        default="text",
        help="Prometheus text format, or OpenMetrics (default: text)",
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl metrics") as client:
        print(client.metrics(options.format).text, end="")
    return 0
