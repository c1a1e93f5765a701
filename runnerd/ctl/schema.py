"""runnerctl schema: print the JSON Schema of every message. Needs no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from runnerd.protocol.answers import ANSWERS, NOTIFICATIONS
from runnerd.protocol.errors import ErrorBody
from runnerd.protocol.requests import METHODS, PROTOCOL_VERSIONS

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
    print_json(schema())
    return 0


def schema() -> dict[str, object]:
    """Return the schema of all methods, notifications and errors, with shared definitions."""
    kinds = [*METHODS.values(), *ANSWERS.values(), *NOTIFICATIONS.values(), ErrorBody]
    distinct = [*dict.fromkeys(kinds)]
    references, definitions = msgspec.json.schema_components(
        distinct, ref_template="#/$defs/{name}"
    )
    by_kind = dict(zip(distinct, references, strict=True))
    return {
        "protocol": list(PROTOCOL_VERSIONS),
        "methods": {
            method: {"params": by_kind[params], "result": by_kind[ANSWERS[method]]}
            for method, params in METHODS.items()
        },
        "notifications": {name: by_kind[kind] for name, kind in NOTIFICATIONS.items()},
        "error": by_kind[ErrorBody],
        "$defs": definitions,
    }
