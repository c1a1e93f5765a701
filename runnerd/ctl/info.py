"""runnerctl info: describe the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .claim import owner_words
from .endings import plain
from .printing import duration, print_json, size, table
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.protocol.daemon_answers import DaemonInfo

EPILOG: Final = """\
examples:
  runnerctl info
  runnerctl info --json | jq .oom_order
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    with connect(**where(options), client="runnerctl info") as client:
        info = client.info()
    if options.json:
        print_json(info)
    else:
        print(summary(info))
    return 0


def summary(info: DaemonInfo) -> str:
    """Describe a daemon in words, its warnings last."""
    order = info.oom_order
    rows = [
        ("runnerd", f"{info.version}, protocol {', '.join(map(str, info.protocol))}"),
        ("state", f"{info.state}, for {duration(info.uptime_s)}"),
        ("socket", info.socket),
        ("process", f"pid {info.pid}, uid {info.uid}, {size(info.rss_bytes)} resident"),
        ("python", info.python),
        ("incarnation", info.incarnation),
        ("execs", f"{info.live_execs} live of at most {info.limits.live_execs}"),
        ("starts", f"{info.starts} so far, {info.parked_shims} shims parked"),
        ("connections", f"{info.connections}, with {info.subscriptions} subscriptions"),
        ("state directory", info.state_directory or "none"),
        ("journal", "yes" if info.journal else f"no: {info.journal_reason}"),
        ("owner", owner_words(info.claim, durable=info.claim_durable, reason=info.claim_reason)),
        ("fence", "none" if info.fence is None else str(info.fence)),
        ("guard", info.guard),
        ("oom order", f"{order.verdict}: daemon {order.own_score}, commands {order.command_score}"),
        ("memory limit", "none" if order.limit_bytes is None else size(order.limit_bytes)),
        ("failures", f"{info.stray_failures} survived"),
    ]
    warnings = dict.fromkeys([*info.warnings, *order.warnings])
    shown = [(name, plain(text)) for name, text in rows]
    return "\n".join([table(shown), *(plain(f"warning: {each}") for each in warnings)])
