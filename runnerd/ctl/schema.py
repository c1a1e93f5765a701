"""runnerctl schema: print the JSON Schema of every message. Needs no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runnerd.protocol.schema import protocol_schema

from .printing import print_json

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
Bytes are base64 strings in the JSON encoding and binary in MessagePack.

example:
  runnerctl schema | jq '.methods["exec.start"].params'
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="accepted, and always so")


def main(options: argparse.Namespace) -> int:  # noqa: ARG001  # as every subcommand's
    """Run it."""
    print_json(protocol_schema())
    return 0
