"""runnerctl events: watch what happens."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from runnerd.client.blocking import connect
from runnerd.client.errors import StreamLost

from .endings import plain, say
from .printing import json_text
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.protocol.events import EventNote

EPILOG: Final = """\
Prints a line for everything that happens from now on: execs, OOM kills, memory pressure, drain,
stop, owner. `events_lost` says how many could not be told, or nothing where a connection was lost
between. Ends with 0 when the daemon stops.

examples:
  runnerctl events
  runnerctl events --json | jq 'select(.kind == "oom_kill")'
"""
_ALWAYS: Final = frozenset(("subscription", "number", "at", "kind"))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    is_stopping = False
    with connect(**where(options), client="runnerctl events") as client, client.events() as watch:
        pressure = watch.began.pressure or "unknown"
        say(f"watching: the daemon is {watch.began.state}, memory pressure {pressure}")
        try:
            for event in watch:
                is_stopping |= event.kind == "stopping"
                sys.stdout.write(_json(event) if options.json else line(event))
                sys.stdout.flush()
        except StreamLost:
            if not is_stopping:
                raise
    return 0


def _json(event: EventNote) -> str:
    told = msgspec.to_builtins(event)
    del told["subscription"]
    return json_text(told) + "\n"


def line(event: EventNote) -> str:
    """Write an event for people: when, what, and what of it."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    told = msgspec.to_builtins(event)
    parts = (f"{name}={value}" for name, value in told.items() if name not in _ALWAYS)
    return f"{clock}  {plain(event.kind):<16}{plain(' '.join(parts))}".rstrip() + "\n"
