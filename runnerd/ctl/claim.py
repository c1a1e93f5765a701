"""runnerctl claim: become the sandbox's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .endings import plain
from .printing import moment, print_json
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.protocol.sandbox_answers import Claim

EPILOG: Final = """\
Needs --fence. Of any number who claim a sandbox with --expect unclaimed exactly one succeeds; the
others are told whose it is. It stays claimed when the daemon is started again in the same state
directory; if it would not, a line on standard error says so.

The fence is in force once runnerctl is connected, also where the claim is refused: lower ones are
shut out. So all who may create a sandbox say the same one, 1, and who resumes it a higher one.

examples:
  runnerctl claim spawner-7 --expect unclaimed --fence 1    (whoever creates the sandbox)
  runnerctl claim spawner-9 --expect claimed --fence 2      (whoever resumes it)
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("owner", metavar="OWNER", help="who claims it, for people and errors")
    parser.add_argument(
        "--expect",
        choices=("unclaimed", "claimed", "any"),
        required=True,
        help="whether somebody has claimed it already; if that is not so, nothing is changed",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    from .endings import say  # noqa: PLC0415 - info needs owner_words alone

    with connect(**where(options), client="runnerctl claim") as client:
        answer = client.claim(options.owner, expect=options.expect)
        reason = None if answer.durable else client.info().claim_reason
    if options.json:
        print_json(answer)
    else:
        before = answer.previous
        took = "" if before is None else f", before it {owner_words(before)}"
        print(f"{owner_words(answer.claim)}{took}")
    if not answer.durable:
        say(f"the claim ends with this daemon: {reason or 'it is not written yet'}")
    return 0


def owner_words(claim: Claim | None, *, durable: bool = True, reason: str | None = None) -> str:
    """Say whose the sandbox is, on one line.

    Args:
        claim: As the daemon tells it; None = nobody has claimed it.
        durable: Whether that outlives the daemon.
        reason: Why not.
    """
    if claim is None:
        words = "none"
    elif claim.owner is None or claim.claimed_at is None:
        words = "somebody: what was written of the claim cannot be read"
    else:
        words = f"{plain(claim.owner)}, since {moment(claim.claimed_at)}, fence {claim.fence}"
    if durable:
        return words
    would = "would end" if claim is None else "ends"
    why = f": {plain(reason)}" if reason else ""
    return f"{words} (a claim {would} with this daemon{why})"
