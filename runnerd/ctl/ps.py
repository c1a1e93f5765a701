"""runnerctl ps: list execs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import RemoteError
from runnerd.protocol.signals import signal_name

from .printing import command_line, duration, print_json, short_size, table
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.client.blocking import Client
    from runnerd.protocol.answers import ExecInfo, ProcessInfo
    from runnerd.protocol.exits import Exit

TREE_HEAD: Final = ("ID", "STATE", "PID", "UID", "THREADS", "RSS", "CPU", "COMMAND")

EPILOG: Final = """\
examples:
  runnerctl ps
  runnerctl ps --all --label job=42
  runnerctl ps --tree
  runnerctl ps --json | jq -r '.[].exec_id'
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("-a", "--all", action="store_true", help="also those that are closed")
    parser.add_argument(
        "--label", metavar="K=V", action="append", default=[], help="only those with this label"
    )
    parser.add_argument("--tree", action="store_true", help="also each one's processes")
    parser.add_argument("--json", action="store_true", help="all that is known, as a JSON list")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    labels: dict[str, str] = {}
    for text in options.label:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            options.parser.error(f"--label: '{text}' is not NAME=VALUE")
        labels[name] = value
    with connect(**where(options), client="runnerctl ps") as client:
        execs = client.list_execs(labels=labels, live_only=not options.all)
        if options.tree:
            execs = [_with_tree(client, each) for each in execs]
    if options.json:
        print_json(execs)
    elif options.tree:
        print(table([TREE_HEAD, *(line for each in execs for line in tree_rows(each))]))
    else:
        print(table([("ID", "STATE", "PID", "AGE", "EXIT", "COMMAND"), *map(row, execs)]))
    return 0


def _with_tree(client: Client, info: ExecInfo) -> ExecInfo:
    if info.state == "closed":
        return info
    try:
        return client.inspect(info.exec_id, tree=True)
    except RemoteError:
        return info  # its record has gone meanwhile


def tree_rows(info: ExecInfo) -> list[tuple[str, ...]]:
    """Return an exec's row and one for each of its processes, below their parents."""
    rows: list[tuple[str, ...]] = [
        (info.exec_id, info.state, "", "", "", "", "", command_line(info.argv or ()))
    ]
    pids = {each.pid for each in info.processes}
    below: dict[int, list[ProcessInfo]] = {}
    for each in info.processes:
        below.setdefault(each.ppid if each.ppid in pids else 0, []).append(each)

    def add(parent: int, indent: str) -> None:
        children = below.pop(parent, [])
        for each in children:
            is_last = each is children[-1]
            rows.append(_process_row(each, indent + ("└ " if is_last else "├ ")))
            add(each.pid, indent + ("  " if is_last else "│ "))

    add(0, "  ")
    return rows


def _process_row(process: ProcessInfo, lead: str) -> tuple[str, ...]:
    return (
        "",
        process.state,
        str(process.pid),
        "-" if process.uid is None else str(process.uid),
        "-" if process.threads is None else str(process.threads),
        short_size(process.rss_bytes),
        "-" if process.cpu_s is None else f"{process.cpu_s:.2f}s",
        lead + command_line([process.command]),
    )


def row(info: ExecInfo) -> tuple[str, ...]:
    """Return an exec's cells."""
    return (
        info.exec_id,
        info.state,
        "-" if info.pid is None else str(info.pid),
        duration(info.age_s),
        _exit_cell(info),
        "-" if info.argv is None else command_line(info.argv),
    )


def _exit_cell(info: ExecInfo) -> str:
    if info.exit is not None:
        return short_exit(info.exit)
    # It is over and nobody saw how: its daemon died before it.
    return "lost" if info.state == "closed" else "-"


def short_exit(exit: Exit) -> str:
    """Write an exit in one word: 0, SIGKILL, or why neither is known."""
    if exit.signal is not None:
        return signal_name(exit.signal)
    return exit.reason if exit.code is None else str(exit.code)
