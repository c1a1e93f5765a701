"""runnerctl env: set and unset variables of later commands."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import connect
from runnerd.client.errors import ClientError

from .endings import plain
from .reaching import where

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
They reach every exec started later, until the daemon ends: over its boot environment, under HOME
and the like of the exec's user and the exec's own -e. `set NAME` takes the value from here.
Without an action the names are listed; values may be secrets and are never shown.

examples:
  runnerctl env set MODE=test TOKEN
  runnerctl env unset MODE http_proxy
  runnerctl env
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("action", nargs="?", choices=("set", "unset"), help="none: list the names")
    parser.add_argument("words", nargs="*", metavar="NAME[=VALUE]", help="what to set or unset")


def main(options: argparse.Namespace) -> int:
    """Run it."""
    if options.action is not None and not options.words:
        raise _usage(f"name what to {options.action}")
    to_set = dict(map(_pair, options.words)) if options.action == "set" else {}
    to_unset = options.words if options.action == "unset" else []
    with connect(**where(options), client="runnerctl env") as client:
        if options.action is not None:
            client.set_env(to_set, unset=to_unset)
            return 0
        info = client.info()
    for name in info.env_set:
        print(plain(name))
    for name in info.env_unset:
        print(f"{plain(name)} (unset)")
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if is_set:
        return name, value
    if name not in os.environ:
        raise _usage(f"set: '{name}' has no value, and is not set here either")
    return name, os.environ[name]


def _usage(message: str) -> ClientError:
    return ClientError(message, preserved="nothing was changed", hint="runnerctl env --help")
