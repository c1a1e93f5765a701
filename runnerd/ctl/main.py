"""runnerctl: the command line.

Each subcommand is a module of this package with `arguments(parser)` and `main(options)`, and
is imported when it is called for: a command line is started for every command, so what one
subcommand needs must not cost the others. tests/bench has the figure.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from .endings import INTERRUPTED, REFUSED, error_code, say, say_error, say_hint
from .streams import flush, open_standard_streams, output_lost

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import NoReturn

COMMANDS: Final = {
    "run": ("run", "run a command and pass its output and exit code through"),
    "ps": ("ps", "list execs"),
    "top": ("top", "watch what execs use"),
    "attach": ("attach", "follow an exec's output until its exit"),
    "logs": ("logs", "print what is kept of an exec's output"),
    "signal": ("signal", "send a signal to an exec"),
    "cancel": ("cancel", "end an exec and everything it started"),
    "wait": ("wait", "wait for an exec's end and exit with its code"),
    "inspect": ("inspect", "show all that is known of an exec"),
    "forget": ("forget", "let go of a finished exec's output"),
    "env": ("env", "set and unset variables of later commands"),
    "claim": ("claim", "become the sandbox's owner"),
    "pin": ("pin", "keep the sandbox from counting as idle"),
    "unpin": ("pin", "end a pin"),
    "activity": ("activity", "say whether the sandbox is idle, and why not"),
    "events": ("events", "watch what happens"),
    "info": ("info", "describe the daemon"),
    "health": ("health", "say whether the daemon is well"),
    "metrics": ("metrics", "print the daemon's metrics"),
    "drain": ("drain", "let the daemon take no new work"),
    "undrain": ("drain", "let the daemon take new work again"),
    "bridge": ("bridge", "pass a connection to the daemon through, on standard input and output"),
    "stop": ("stop", "end every exec and the daemon"),
    "schema": ("schema", "print the JSON Schema of every message"),
}
"""Subcommand: its module, and its line in the help."""

EPILOG: Final = """\
`runnerctl COMMAND --help` says more of each.

exit codes:
  125     runnerd refused it or cannot be reached, or the command line is wrong; standard error
          says which, and what to do
  others  run, attach and wait: the command's own, see `runnerctl run --help`; activity, cancel,
          health, unpin: 1 says no, see their help; else 0

example:
  runnerctl run -- echo hello
"""


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser, in full only for the subcommands among `words`."""
    import argparse  # noqa: PLC0415
    import importlib  # noqa: PLC0415

    from runnerd.arguments import NumbersParser  # noqa: PLC0415

    class Parser(NumbersParser):
        """Exits with 125 on bad usage: 2, argparse's own, may be the command's exit code."""

        def error(self, message: str) -> NoReturn:
            say(message)
            say_hint(f"{self.prog} --help")
            raise SystemExit(REFUSED)

    def formatter(prog: str) -> argparse.HelpFormatter:
        # argparse makes one for each argument it is told of, and to find the terminal's width
        # imports shutil with every compressor there is.
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and len(columns) < 5 else 100
        return argparse.RawDescriptionHelpFormatter(prog, width=max(width, 40) - 2)

    def fence(text: str) -> int | str:
        if text == "current" or (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
            return text if text == "current" else int(text)
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number above 0 nor `current`")

    common = Parser(add_help=False, formatter_class=formatter)
    common.add_argument(
        "--socket",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="the daemon's socket (default: $RUNNERD_SOCKET, else /run/runnerd/runnerd.sock, "
        "else $XDG_RUNTIME_DIR/runnerd/runnerd.sock)",
    )
    common.add_argument(
        "--fence",
        metavar="N",
        type=fence,
        default=argparse.SUPPRESS,
        help="act as the owner of fence N, which from then on shuts out lower ones; `current` acts "
        "whoever the owner is (default: none, which may only look once there is an owner)",
    )
    common.add_argument(
        "--token-file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the file with the token that the daemon asks for (default: $RUNNERD_TOKEN_FILE)",
    )
    parser = Parser(
        prog="runnerctl",
        description="Run commands through runnerd, and look after them.",
        epilog=EPILOG,
        formatter_class=formatter,
        parents=[common],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(prog="runnerctl", metavar="COMMAND", dest="command")
    # A parser costs a tenth of a millisecond; the others are needed for the overall help only.
    named = {word: COMMANDS[word] for word in words if word in COMMANDS}
    needs_all = not named or bool(words[0].startswith(("-h", "--help")))
    for name, (module_name, text) in (COMMANDS if needs_all else named).items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=formatter,
            parents=[common],
            allow_abbrev=False,
        )
        if name in named:
            module = importlib.import_module(f".{module_name}", __package__)
            module.arguments(command)
            command.set_defaults(main=module.main, parser=command)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see endings for what each means."""
    words = sys.argv[1:] if words is None else words
    parser = build_parser(words)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        # As parse_args would, but with the hint at the subcommand's own help.
        getattr(options, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.version:
        from runnerd import __version__  # noqa: PLC0415

        print(f"runnerctl {__version__}")
        return 0
    if options.command is None:
        parser.error("name a command")
    from runnerd.client.errors import ClientError, RemoteError  # noqa: PLC0415
    from runnerd.protocol.errors import RequestError  # noqa: PLC0415

    try:
        code: int = options.main(options)
        sys.stdout.flush()
    except RequestError as error:
        say_error(RemoteError.before_sending(error))
        return error_code(RemoteError.before_sending(error))
    except ClientError as error:
        say_error(error)
        return error_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def script() -> None:
    """Run as a program; does not return."""
    # msgspec takes it where it is installed, by whatever else, and it takes a quarter of our time;
    # typing has all that our messages need. None has its import fail, see importlib.
    sys.modules.setdefault("typing_extensions", None)  # type: ignore[arg-type]
    open_standard_streams()
    try:
        code = main()
    except SystemExit as ended:  # argparse: --help, or bad usage
        code = int(ended.code or 0)
    except KeyboardInterrupt:  # before anything was asked of a daemon
        code = INTERRUPTED
    except OSError as error:
        code = output_lost(error)
    code = flush(code)
    # Without the interpreter's tear-down, which costs a twentieth of the time and frees nothing
    # the kernel would not.
    os._exit(code)


if __name__ == "__main__":
    script()
