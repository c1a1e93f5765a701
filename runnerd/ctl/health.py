"""runnerctl health: say in one line whether the daemon is well."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError, RemoteError

from .endings import plain
from .printing import json_text
from .reaching import where

if TYPE_CHECKING:
    import argparse
    from typing import Literal

    from runnerd.protocol.daemon_answers import Trouble

EPILOG: Final = """\
Prints one line: ready, draining or stopping, and behind it what works worse than it should.

exit codes:
  0  the daemon answers; also while it is draining or degraded
  1  it does not answer within 3 s, does not let us in, or is stopping;
     with --ready and --wait also: it takes no new work

Fit for Docker's HEALTHCHECK and for Kubernetes' exec probes: liveness and startup as it is,
readiness with --ready. To be run as the daemon's user or root.

examples:
  runnerctl health
  runnerctl health --wait 30 && runnerctl run -- make
"""
_ANSWER_S: Final = 3.0
_PAUSE_S: Final = 0.1
_WAIT_MAX_S: Final = 1e9
UNHEALTHY: Final = 1


class Report(msgspec.Struct, kw_only=True):
    """What is printed.

    Attributes:
        live: Whether the daemon answers.
        ready: Whether it takes new work.
        state: As it says, or None where it was not asked.
        degraded: What works worse than it should.
        error: Why it could not be asked.
    """

    live: bool
    ready: bool
    state: Literal["serving", "draining", "stopping"] | None = None
    degraded: list[Trouble] = []
    error: str | None = None

    def line(self) -> str:
        """Say it in one line."""
        if self.error is not None:
            return plain(f"{'busy' if self.live else 'unreachable'}: {self.error}")
        word = "ready" if self.state == "serving" else str(self.state)
        if self.degraded:
            word += ", degraded: " + "; ".join(each.message for each in self.degraded)
        return plain(" ".join(word.split()))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--ready", action="store_true", help="fail while the daemon takes no new work"
    )
    parser.add_argument(
        "--wait",
        metavar="S",
        type=_seconds,
        help="wait until it takes new work, for so many seconds at most",
    )
    parser.add_argument("--json", action="store_true", help="the same as one line of JSON")


def _seconds(text: str) -> float:
    import argparse  # noqa: PLC0415 - who gets here has it

    from runnerd.arguments import number  # noqa: PLC0415

    seconds = number(text)
    if not 0 < seconds <= _WAIT_MAX_S:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds above 0")
    return seconds


def main(options: argparse.Namespace) -> int:
    """Run it."""
    until_s = time.monotonic() + (options.wait or 0.0)
    while True:
        left_s = until_s - time.monotonic()
        patience_s = _ANSWER_S if options.wait is None else max(_PAUSE_S, min(_ANSWER_S, left_s))
        report = _ask(options, patience_s)
        left_s = until_s - time.monotonic()
        if report.ready or options.wait is None or left_s <= 0:
            break
        time.sleep(min(_PAUSE_S, left_s))
    print(json_text(report) if options.json else report.line())
    needs_ready = options.ready or options.wait is not None
    is_well = report.ready if needs_ready else report.live and report.state != "stopping"
    return 0 if is_well else UNHEALTHY


def _ask(options: argparse.Namespace, patience_s: float) -> Report:
    until_s = time.monotonic() + patience_s
    try:
        with connect(
            **where(options), client="runnerctl health", timeout_s=patience_s, reconnect_s=0
        ) as client:
            answer = client.health(max(0.0, until_s - time.monotonic()))
    except RemoteError as error:
        # It answers, so it lives: others have all the connections.
        return Report(live=error.kind == "busy", ready=False, error=error.message)
    except ClientError as error:
        return Report(live=False, ready=False, error=error.message)
    return Report(
        live=answer.live, ready=answer.ready, state=answer.state, degraded=answer.degraded
    )
