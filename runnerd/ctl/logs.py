"""runnerctl logs: print what is kept of an exec's output."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.following import record_seq
from runnerd.protocol.notes import GapNote

from .endings import say_gap, say_reconnecting
from .reaching import where
from .streams import DESCRIPTORS, write_all

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from runnerd.client.execs import Exec
    from runnerd.protocol.notes import OutputNote

    Record = OutputNote | GapNote

EPILOG: Final = """\
Prints what is kept now, each stream to its own, and exits with 0; with -f it goes on until the
command's exit (attach does the same and exits with the command's code). What is no longer kept
is named on standard error. The exec is only watched: Ctrl-C ends logs and nothing else.

examples:
  runnerctl logs build
  runnerctl logs -f --tail 4096 web
  runnerctl logs --after 120 build 2>/dev/null
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the command's exit"
    )
    parser.add_argument(
        "--after", metavar="N", type=int, default=0, help="only what comes after sequence N"
    )
    parser.add_argument(
        "--tail",
        metavar="BYTES",
        type=int,
        help="of what is kept now, only the last BYTES of both streams together",
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    if options.tail is not None and options.tail < 0:
        options.parser.error("--tail is a number of bytes, 0 or more")
    with connect(**where(options), client="runnerctl logs", on_lost=say_reconnecting) as client:
        handle = client.attach(options.exec_id, after=options.after)
        records = handle.output()
        kept = _kept(handle, records, options.after)
        for record in kept if options.tail is None else _tail(kept, options.tail):
            _print(record)
        if options.follow:
            for record in records:
                _print(record)
    return 0


def _kept(handle: Exec, records: Iterator[Record], after: int) -> Iterator[Record]:
    """Yield what was there when the handle attached."""
    seq = after
    while seq < handle.known_seq:
        record = next(records, None)
        if record is None:  # the exit, and the end of the exec, have sequences too
            return
        seq = record_seq(record)
        yield record


def _tail(records: Iterable[Record], count_bytes: int) -> Iterator[Record]:
    """Yield the records that hold the last bytes, the first of them cut."""
    held: deque[Record] = deque()
    over_bytes = -count_bytes
    for record in records:
        held.append(record)
        over_bytes += _size_bytes(record)
        while held and over_bytes >= _size_bytes(held[0]):
            over_bytes -= _size_bytes(held.popleft())
    if held and not isinstance(held[0], GapNote) and over_bytes > 0:
        held[0].data = held[0].data[over_bytes:]
    yield from held


def _size_bytes(record: Record) -> int:
    return 0 if isinstance(record, GapNote) else len(record.data)


def _print(record: Record) -> None:
    if isinstance(record, GapNote):
        say_gap(record)
        return
    write_all(DESCRIPTORS[record.stream], record.data)
