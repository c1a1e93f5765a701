"""runnerctl attach: follow an exec's output until its exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError
from runnerd.protocol.requests import ExecAttach

from .endings import ending, say, say_reconnecting
from .passing import Passer
from .reaching import where
from .run import add_detach_keys

if TYPE_CHECKING:
    import argparse

    from runnerd.client.blocking import Client
    from runnerd.client.errors import StreamLost

EPILOG: Final = """\
Prints what is kept of the output from its beginning, follows it, and exits with the command's
exit code. The exec is only watched: Ctrl-C, or a reader of ours that goes away, ends attach and
nothing else. Output that is no longer kept is named on standard error, and so is a lost
connection, which is tried for again for a minute.

With -it an exec that has a terminal gets our keys and our size: what its screen showed last comes
first, then it is made to draw anew. -i without -t is refused: where input is a pipe, whoever
started the exec is its one writer. The detach keys (Ctrl-P Ctrl-Q) leave it running; so does
every signal that ends attach, with -t alone Ctrl-C too. A lost connection is then a bell, as for
run -it.

examples:
  runnerctl attach x-0123456789abcdef
  runnerctl attach --tail web > web.log
  runnerctl attach -it shell
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("exec_id", metavar="ID")
    parser.add_argument("-t", "--tty", action="store_true", help="show its terminal in ours")
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="with -t: pass our keys to it"
    )
    add_detach_keys(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--tail", action="store_true", help="only what comes from now on")
    where.add_argument(
        "--after", metavar="N", type=int, default=0, help="only what comes after sequence N"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not say who ended the command"
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    if options.interactive and not options.tty:
        raise ClientError(
            "-i goes with -t: what is fed by a pipe has one writer, who started it",
            preserved="the exec is untouched",
            hint="runnerctl attach --help",
        )
    params = ExecAttach(exec_id=options.exec_id, after="tail" if options.tail else options.after)
    passer: Passer | None = None

    def lost(lost: StreamLost) -> None:
        (say_reconnecting if passer is None else passer.lost)(lost)

    with connect(**where(options), client="runnerctl attach", on_lost=lost) as client:
        if options.tty:
            passer, params = _on_terminal(options, client)
        else:
            passer = Passer(client, owns=False, feeds=False)
        code = passer.follow("exec.attach", params)
    words = None if passer.exit is None or options.quiet else ending(passer.exit)
    if words is not None:
        say(words)
    return code


def _on_terminal(options: argparse.Namespace, client: Client) -> tuple[Passer, ExecAttach]:
    # Imported here: what a terminal needs must not cost a command without one.
    from .detaching import detach_keys  # noqa: PLC0415
    from .interactive import RECENT_BYTES, TerminalPasser  # noqa: PLC0415
    from .terminal import need_terminal  # noqa: PLC0415

    if options.interactive:
        need_terminal("the exec is untouched", "leave out -i to watch it only")
    exec_id: str = options.exec_id
    info = client.inspect(exec_id)
    if info.pty is None:
        raise ClientError(
            f"'{exec_id}' has no terminal",
            preserved="the exec is untouched",
            hint="leave out -t to follow its output",
        )
    keys = detach_keys(options.detach_keys) if options.interactive else None
    typed_bytes = info.stdin_accepted_bytes or 0
    passer = TerminalPasser(
        client, owns=False, keys=keys, attached_to=exec_id, typed_bytes=typed_bytes
    )
    if options.tail or options.after:
        return passer, ExecAttach(exec_id=exec_id, after="tail" if options.tail else options.after)
    return passer, ExecAttach(exec_id=exec_id, after="tail", tail_bytes=RECENT_BYTES)
