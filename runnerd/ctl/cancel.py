"""runnerctl cancel: end an exec and everything it started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .endings import plain
from .printing import print_json
from .ps import short_exit
from .reaching import where

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from runnerd.protocol.answers import CancelAnswer
    from runnerd.protocol.exits import Receipt

EPILOG: Final = """\
TERM to every process of the exec, KILL after the grace to what is left, and a receipt of what
that took. Exits with 0 if nothing is left, 1 if something could not be ended.

examples:
  runnerctl cancel web
  runnerctl cancel build --grace 0
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument(
        "--grace",
        metavar="S",
        type=float,
        help="seconds from TERM to KILL; 0 = KILL at once (default: the exec's own)",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="return as soon as the ending has begun"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl cancel") as client:
        answer = client.cancel(options.exec_id, grace_s=options.grace, wait=not options.no_wait)
    if options.json:
        print_json(answer)
    else:
        print("\n".join(receipt_lines(options.exec_id, answer)))
    return 1 if answer.outcome == "survivors" else 0


_OUTCOMES: Final = {
    "ended": "ended",
    "already_ended": "had already ended",
    "survivors": "could not be ended in full",
    "tombstoned": "is not known; a start of that id will be refused",
    "ending": "is being ended",
}


def receipt_lines(exec_id: str, answer: CancelAnswer) -> Iterator[str]:
    """Put a cancel's answer into words."""
    how = "" if answer.exit is None else f", its command's exit: {short_exit(answer.exit)}"
    yield f"{exec_id} {_OUTCOMES[answer.outcome]}{how}"
    if answer.receipt is not None:
        yield from _receipt_lines(answer.receipt)


def _receipt_lines(receipt: Receipt) -> Iterator[str]:
    if receipt.termed_total:
        yield f"  TERM to {_processes(receipt.termed_total)}{_away(receipt)}"
    if receipt.gone:
        yield f"  {_processes(receipt.gone)} had gone before its turn"
    if receipt.killed_total:
        pids = ", ".join(str(each.pid) for each in receipt.killed[:10])
        more = ", ..." if receipt.killed_total > 10 else ""
        yield f"  KILL to {_processes(receipt.killed_total)}: {pids}{more}"
    for each in receipt.survivors:
        why = {"D": "in uninterruptible sleep", "user": "another user's"}.get(each.reason, "")
        name = f" ({plain(each.command)})" if each.command else ""
        yield f"  left: {each.pid}{name} {why}".rstrip()


def _away(receipt: Receipt) -> str:
    left = sum(each.place != "group" for each in receipt.termed)
    return f", {left} of them outside the command's group" if left else ""


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
