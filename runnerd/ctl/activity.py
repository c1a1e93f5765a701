"""runnerctl activity: say whether the sandbox is idle, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .endings import plain
from .printing import duration, print_json
from .reaching import where

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from runnerd.protocol.sandbox_answers import ActivityAnswer

EPILOG: Final = """\
Live execs, attached clients and pins keep a sandbox from being idle; with --if-idle-for so does
work in that time. Looking does not. What commands left running is listed, and counts with
--leftovers-count. Exits with 0 if it is idle, 1 if not.

`drain --if-idle-for S` judges alike and drains in one step: between the two nothing can start.

examples:
  runnerctl activity
  runnerctl activity --if-idle-for 600 && echo idle for ten minutes
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--if-idle-for",
        metavar="S",
        type=float,
        default=0.0,
        help="seconds without work that make it idle (default: 0, idle once nothing runs)",
    )
    parser.add_argument(
        "--leftovers-count",
        action="store_true",
        help="what commands left running keeps it from being idle",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl activity") as client:
        answer = client.activity(
            if_idle_for_s=options.if_idle_for, leftovers_count=options.leftovers_count
        )
    if options.json:
        print_json(answer)
    else:
        print("\n".join(activity_lines(answer)))
    return 0 if answer.idle else 1


def activity_lines(answer: ActivityAnswer) -> Iterator[str]:
    """Put the answer into words: the verdict first, then what there is."""
    verdict = "idle" if answer.idle else "not idle"
    since = f", last work {duration(answer.idle_for_s)} ago" if answer.idle_for_s else ""
    state = "" if answer.state == "serving" else f" ({answer.state})"
    yield f"{verdict}{since}{state}"
    if answer.execs_total:
        yield f"  live: {_listed(answer.execs, answer.execs_total)}"
    if answer.attached_total:
        yield f"  attached: {answer.attached_total}"
    if answer.leftovers_total:
        counts = "" if "leftovers" in answer.reasons else " (does not count)"
        yield f"  left running: {_listed(answer.leftovers, answer.leftovers_total)}{counts}"
    for pin in answer.pins:
        left = "until unpinned" if pin.left_s is None else f"{duration(pin.left_s)} left"
        yield f"  pinned: {plain(pin.reason)} ({duration(pin.age_s)} old, {left})"


def _listed(ids: Sequence[str], total: int) -> str:
    more = f" and {total - len(ids)} more" if total > len(ids) else ""
    return f"{', '.join(ids)}{more}"
