"""runnerctl ps: list execs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError
from runnerd.protocol.signals import signal_name

from .printing import command_line, duration, print_json, table
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.protocol.answers import ExecInfo, Exit

EPILOG: Final = """\
examples:
  runnerctl ps
  runnerctl ps --all --label job=42
  runnerctl ps --json | jq -r '.[].exec_id'
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("-a", "--all", action="store_true", help="also those that are closed")
    parser.add_argument(
        "--label", metavar="K=V", action="append", default=[], help="only those with this label"
    )
    parser.add_argument("--json", action="store_true", help="all that is known, as a JSON list")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    labels: dict[str, str] = {}
    for text in options.label:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise ClientError(f"--label: '{text}' is not NAME=VALUE")
        labels[name] = value
    with connect(**where(options), client="runnerctl ps") as client:
        execs = client.list_execs(labels=labels)
    if not options.all:
        execs = [each for each in execs if each.state != "closed"]
    if options.json:
        print_json(execs)
    else:
        print(table([("ID", "STATE", "PID", "AGE", "EXIT", "COMMAND"), *map(row, execs)]))
    return 0


def row(info: ExecInfo) -> tuple[str, ...]:
    """Return an exec's cells."""
    return (
        info.exec_id,
        info.state,
        "-" if info.pid is None else str(info.pid),
        duration(info.age_s),
        "-" if info.exit is None else short_exit(info.exit),
        "-" if info.argv is None else command_line(info.argv),
    )


def short_exit(exit: Exit) -> str:
    """Write an exit in one word: 0, SIGKILL, or why neither is known."""
    if exit.signal is not None:
        return signal_name(exit.signal)
    return exit.reason if exit.code is None else str(exit.code)
