"""runnerctl top: watch what execs use."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect

from .printing import command_line, duration, short_size, table
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.protocol.answers import ExecInfo
    from runnerd.protocol.daemon_answers import DaemonInfo

HEAD: Final = ("ID", "STATE", "AGE", "PROCS", "RSS", "CPU%", "OUTPUT", "COMMAND")
HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"  # ECMA-48: cursor to the corner, erase what is below it
_INTERVAL_MIN_S: Final = 0.1
_INTERVAL_MAX_S: Final = 86400.0

EPILOG: Final = """\
One row an exec that is live, the busiest first. CPU% is of one CPU, over the time since the row
before it was read; in the first table since the exec's start. Without a terminal, tables follow
each other with an empty line between them. Ctrl-C ends it.

examples:
  runnerctl top
  runnerctl top --once
  runnerctl top --interval 5 >> usage.log
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument(
        "--interval",
        metavar="S",
        type=float,
        default=1.0,
        help="seconds between tables, 1 by default",
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    if not _INTERVAL_MIN_S <= options.interval <= _INTERVAL_MAX_S:
        options.parser.error(f"--interval: {_INTERVAL_MIN_S:g} to {_INTERVAL_MAX_S:.0f} seconds")
    usage = CpuUse()
    with connect(**where(options), client="runnerctl top") as client:
        try:
            while True:
                execs = client.list_execs(usage=True, live_only=True)
                show(client.info(), rows(execs, usage, time.monotonic()), is_live=not options.once)
                if options.once:
                    return 0
                time.sleep(options.interval)
        except KeyboardInterrupt:
            return 0  # the way to leave it


class CpuUse:
    """CPU use between one reading and the next."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def percent(self, info: ExecInfo, now_s: float) -> float:
        """Return an exec's use since it was asked for last, else since its start, in percent."""
        cpu_s = 0.0 if info.usage is None else info.usage.cpu_s
        before_s, before_cpu_s = self._before.get(info.exec_id, (now_s - info.age_s, 0.0))
        self._before[info.exec_id] = now_s, cpu_s
        # Who ignores SIGCHLD takes the time of its dead out of every account.
        return max(0.0, cpu_s - before_cpu_s) / max(now_s - before_s, 0.001) * 100


def rows(execs: list[ExecInfo], usage: CpuUse, now_s: float) -> list[tuple[str, ...]]:
    """Return the table's rows, the busiest first."""
    found = sorted(
        ((usage.percent(each, now_s), each) for each in execs), key=lambda pair: -pair[0]
    )
    return [_row(percent, each) for percent, each in found]


def _row(percent: float, info: ExecInfo) -> tuple[str, ...]:
    return (
        info.exec_id,
        info.state,
        duration(info.age_s),
        "-" if info.usage is None else str(info.usage.processes),
        short_size(None if info.usage is None else info.usage.rss_bytes),
        f"{percent:.1f}",
        short_size(info.output_bytes or 0),
        command_line(info.argv or ()),
    )


def show(info: DaemonInfo, lines: list[tuple[str, ...]], *, is_live: bool) -> None:
    """Print one table; on a terminal in place of the one before, cut to its size."""
    head = (
        f"runnerd {info.version}, {info.state} for {duration(info.uptime_s)}: "
        f"{info.live_execs} live, {info.starts} started, {short_size(info.rss_bytes)} resident"
    )
    text = f"{head}\n\n{table([HEAD, *lines])}"
    if is_live and sys.stdout.isatty():
        columns, height = os.get_terminal_size(sys.stdout.fileno())
        # Nobody may have given it a size (a serial line, a bare pty): that is 0 by 0, not no room.
        lines_max = max((height or 24) - 1, 4)
        cut = [line[: columns or 80] for line in text.split("\n")[:lines_max]]
        sys.stdout.write(HOME_AND_CLEAR + "\n".join(cut) + "\n")
    else:
        sys.stdout.write(text + ("\n\n" if is_live else "\n"))
    sys.stdout.flush()
