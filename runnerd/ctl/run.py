"""runnerctl run: start a command and behave as if it ran here."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError
from runnerd.protocol.requests import Attach, ExecStart

from .endings import ending, say, say_reconnecting
from .passing import Passer
from .reaching import where

if TYPE_CHECKING:
    import argparse

    from runnerd.client.blocking import Client
    from runnerd.client.errors import StreamLost
    from runnerd.protocol.fields import RlimitValue
    from runnerd.protocol.requests import Pty

EPILOG: Final = """\
The command's bytes pass straight through on both streams, and its exit code is the exit code:
128+N if signal N ended it, 127 if the program was not found, 126 if it cannot be executed,
125 if runnerd refused or was lost for good. TERM, INT, HUP, QUIT, USR1 and USR2 are
passed on to its process group; a second Ctrl-C cancels it, a third kills it. If the reader of
our output goes away the command is sent SIGPIPE, and cancelled if it goes on printing; so it is
where standard input cannot be read, with exit code 125.

With -t the command gets a terminal of its own, as large as ours and following it; -it makes it an
interactive one: every key goes to it, Ctrl-C too. The detach keys (Ctrl-P Ctrl-Q) leave it running
with exit code 0. TERM and HUP then mean that our terminal goes away: the command is sent HUP.
runnerctl returns at the command's exit; what the command left running stays, see --leftovers.
A lost connection is said on standard error and tried for again for a minute: the command does
not notice, no byte is lost or doubled. With -t it is a bell instead, and a key that was on its way
may be missing, which is said at the end. With -d the exec's id is printed once the command runs,
and its output is kept for logs and attach; it never waits for a reader.

examples:
  runnerctl run -- make -j2
  runnerctl run -w /srv -u app -e MODE=test --deadline 600 -- ./check.sh
  tar c src | runnerctl run -i -- tar x -C /work
  runnerctl run -it -- bash
  id=$(runnerctl run -d -- ./server); runnerctl logs -f "$id"
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "runnerctl run [OPTION]... [--] CMD [ARG]..."
    parser.epilog = EPILOG
    add = parser.add_argument
    add("-i", "--interactive", action="store_true", help="pass standard input to the command")
    add("-t", "--tty", action="store_true", help="run it in a terminal")
    add_detach_keys(parser)
    add("-d", "--detach", action="store_true", help="print the exec's id and return")
    add("-q", "--quiet", action="store_true", help="do not say who ended the command")
    add("--json", action="store_true", help="with -d: print the start's answer as JSON")
    add("--id", metavar="ID", help="the exec's id (default: one is made)")
    add(
        "-e",
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="set a variable; NAME alone takes it from here, if it is set here",
    )
    add(
        "--env-file",
        metavar="FILE",
        action="append",
        default=[],
        help="set variables from a file: K=V or NAME a line, # begins a comment line",
    )
    add("--env-replace", action="store_true", help="give the command these variables only")
    add("-w", "--cwd", "--workdir", metavar="DIR", dest="cwd", help="its working directory")
    add("-u", "--user", metavar="USER", help="name, uid, uid:gid or name:group")
    add("--label", metavar="K=V", action="append", default=[], help="a label, for ps --label")
    add("--deadline", metavar="S", type=float, help="end the command S seconds after its start")
    add(
        "--orphan-ttl",
        metavar="S",
        type=float,
        help="end it once nobody is attached for S seconds; with -d from its start on",
    )
    add("--stall", metavar="S", type=float, help="end it after S seconds without output or work")
    add("--grace", metavar="S", type=float, help="seconds from TERM to KILL, 5 by default")
    add(
        "--rlimit",
        metavar="NAME=SOFT:HARD",
        action="append",
        default=[],
        help="a resource limit, nofile=1024:4096; one value for both; or 'unlimited'",
    )
    add("--nice", metavar="N", type=int, help="-20 to 19")
    add("--umask", metavar="OCT", help="octal, 022 by default")
    add("--no-new-privs", action="store_true", help="no set-uid program can raise privileges")
    add(
        "--leftovers",
        choices=("keep", "kill"),
        default="keep",
        help="what happens to processes it left running at its exit (default: keep)",
    )
    add("--merge", action="store_true", help="send stderr into stdout, in exact order")
    add("--sha256", action="store_true", help="have runnerd digest each stream")
    add("words", metavar="CMD", nargs="...", help="the program and its arguments, after --")


def add_detach_keys(parser: argparse.ArgumentParser) -> None:
    """Declare the option that run and attach share."""
    parser.add_argument(
        "--detach-keys",
        metavar="KEYS",
        default="ctrl-p,ctrl-q",  # detaching.DEFAULT_KEYS, which is imported only when needed
        help="with -it: the keys that leave it running (default: ctrl-p,ctrl-q; '' = none)",
    )


def main(options: argparse.Namespace) -> int:
    """Run it."""
    params = start_params(options)
    if options.tty and options.interactive and not options.detach:
        from .terminal import need_terminal  # noqa: PLC0415

        need_terminal("nothing ran", "leave out -t to pass a pipe or a file on, or leave out -i")
    passer: Passer | None = None

    def lost(lost: StreamLost) -> None:
        (say_reconnecting if passer is None else passer.lost)(lost)

    with connect(**where(options), client="runnerctl run", on_lost=lost) as client:
        if options.detach:
            answer = client.call("exec.start", params)
            if options.json:
                from .printing import json_text  # noqa: PLC0415

                print(json_text(answer))
            else:
                print(getattr(answer, "exec_id", ""))
            return 0
        passer = _passer(options, client)
        code = passer.follow("exec.start", params)
    words = None if passer.exit is None or options.quiet else ending(passer.exit)
    if words is not None:
        say(words)
    return code


def _passer(options: argparse.Namespace, client: Client) -> Passer:
    if not options.tty:
        return Passer(client, owns=True, feeds=options.interactive)
    # Imported here: what a terminal needs must not cost a command without one.
    from .detaching import detach_keys  # noqa: PLC0415
    from .interactive import TerminalPasser  # noqa: PLC0415

    keys = detach_keys(options.detach_keys) if options.interactive else None
    return TerminalPasser(client, owns=True, keys=keys)


def start_params(options: argparse.Namespace) -> ExecStart:
    """Turn the options into the request.

    Raises:
        ClientError: If an option makes no sense.
        RequestError: If a field is out of its range.
    """
    words: list[str] = options.words
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise _usage("name a command to run, after --")
    if options.detach and options.interactive and not options.tty:
        raise _usage("-i passes standard input, which -d does not stay for")
    if options.json and not options.detach:
        raise _usage("--json goes with -d; otherwise standard output is the command's")
    return ExecStart(
        argv=words,
        exec_id=options.id,
        env=environment(options.env, options.env_file),
        env_mode="replace" if options.env_replace else "extend",
        cwd=options.cwd,
        user=options.user,
        umask=0o022 if options.umask is None else _octal(options.umask),
        rlimits=dict(map(rlimit, options.rlimit)),
        nice=options.nice,
        no_new_privs=options.no_new_privs,
        stdin="pipe" if options.interactive else "null",
        stderr="stdout" if options.merge and not options.tty else "pipe",
        pty=_pty() if options.tty else None,
        deadline_s=options.deadline,
        orphan_ttl_s=options.orphan_ttl,
        stall_s=options.stall,
        grace_s=5.0 if options.grace is None else options.grace,
        leftovers=options.leftovers,
        sha256=options.sha256,
        labels=dict(_pair("--label", each) for each in options.label),
        attach=None if options.detach else Attach(),
    )


def _pty() -> Pty:
    from .terminal import local_pty  # noqa: PLC0415

    return local_pty()


def environment(settings: list[str], files: list[str]) -> dict[str, str | None]:
    """Gather variables: files first, in their order, then the settings over them.

    Raises:
        ClientError: If a file cannot be read, or a line is none.
    """
    found: dict[str, str | None] = {}
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                lines = file.read().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise _usage(f"--env-file '{path}': {reason.lower()}") from error
        for line in lines:
            text = line.strip("\r").lstrip()
            if text and not text.startswith("#"):
                if re.search(r"\s", text.partition("=")[0]):
                    # A file written for a shell, most often: `export A=1`.
                    raise _usage(f"--env-file '{path}': '{text}' has white space in its name")
                _set(found, text, f"--env-file '{path}'")
    for text in settings:
        _set(found, text, "-e")
    return found


def _set(found: dict[str, str | None], text: str, option: str) -> None:
    name, is_set, value = text.partition("=")
    if not name:
        raise _usage(f"{option}: '{text}' has no name before '='")
    if is_set:
        found[name] = value
    elif name in os.environ:
        found[name] = os.environ[name]


def rlimit(text: str) -> tuple[str, tuple[RlimitValue, RlimitValue]]:
    """Read NAME=SOFT:HARD, NAME=BOTH, with `unlimited` for a value.

    Raises:
        ClientError: If it is neither.
    """
    name, values = _pair("--rlimit", text)
    soft, both, hard = values.partition(":")
    return name, (_rlimit_value(soft, text), _rlimit_value(hard if both else soft, text))


def _rlimit_value(value: str, text: str) -> RlimitValue:
    if value == "unlimited":
        return "unlimited"
    if not re.fullmatch(r"[0-9]{1,20}", value):
        raise _usage(f"--rlimit: '{text}' is not NAME=SOFT:HARD")
    return int(value)


def _octal(text: str) -> int:
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", text):
        raise _usage(f"--umask: '{text}' is not octal")
    return int(text, 8)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise _usage(f"{option}: '{text}' is not NAME=VALUE")
    return name, value


def _usage(message: str) -> ClientError:
    return ClientError(message, preserved="nothing ran", hint="runnerctl run --help")
