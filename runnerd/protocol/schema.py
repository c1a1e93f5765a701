"""The protocol described by its own structs: a JSON Schema and PROTOCOL.md's table.

Nothing is written twice: names, types and ranges are the structs', words are their docstrings'.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import msgspec

from .answers import ANSWERS
from .errors import KINDS, ErrorBody
from .notes import NOTIFICATIONS
from .requests import METHODS, PROTOCOL_VERSIONS, ExecAck

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
REF: Final = "#/$defs/{name}"

_SECTION: Final = "\n\nAttributes:\n"
_ATTRIBUTE: Final = re.compile(r" {4}(\w+): (.*)")


def protocol_schema() -> dict[str, Any]:
    """Return the JSON Schema of all that crosses the socket, as `runnerctl schema` prints it.

    The schema describes the JSON encoding; in MessagePack a field of format byte is a bin.

    Returns:
        A document whose $defs hold one schema a struct; `methods`, `notifications` (from the
        daemon), `client_notifications` and `error` refer to them; `error_kinds` is KINDS.
    """
    structs: set[type[msgspec.Struct]] = {
        ErrorBody,
        ExecAck,
        *METHODS.values(),
        *ANSWERS.values(),
        *NOTIFICATIONS.values(),
    }
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    refs, components = msgspec.json.schema_components(ordered, ref_template=REF)
    ref_of = dict(zip(ordered, refs, strict=True))
    for schema in components.values():
        _describe(schema)
    return {
        "$schema": DIALECT,
        "title": "runnerd protocol",
        "protocol": list(PROTOCOL_VERSIONS),
        "methods": {
            method: {
                "description": _parts(params)[0],
                "params": ref_of[params],
                "result": ref_of[ANSWERS[method]],
            }
            for method, params in METHODS.items()
        },
        "notifications": {name: ref_of[note] for name, note in NOTIFICATIONS.items()},
        "client_notifications": {"exec.ack": ref_of[ExecAck]},
        "error": ref_of[ErrorBody],
        "error_kinds": {
            name: {
                "code": kind.code,
                "layer": kind.layer,
                "preserved": kind.preserved,
                "hint": kind.hint,
                "retryable": kind.retryable,
            }
            for name, kind in KINDS.items()
        },
        "$defs": components,
    }


def methods_table() -> str:
    """Return PROTOCOL.md's table of methods, in Markdown; a `?` marks what may be absent."""
    lines = ["| method | what | parameters | answer |", "|---|---|---|---|"]
    for method, params in METHODS.items():
        what = _parts(params)[0].replace("\n", " ").replace("|", "\\|")
        answer = ANSWERS[method]
        lines.append(f"| `{method}` | {what} | {_fields(params)} | {_fields(answer)} |")
    return "\n".join(lines) + "\n"


def attributes(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return what a struct's docstring says of each of its fields."""
    return _parts(struct)[1]


def _fields(struct: type[msgspec.Struct]) -> str:
    fields = msgspec.structs.fields(struct)
    names = (f"`{field.encode_name}{'' if field.required else '?'}`" for field in fields)
    return ", ".join(names) or "—"


def _parts(struct: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    return _parse(inspect.getdoc(struct) or "")


def _parse(doc: str) -> tuple[str, dict[str, str]]:
    what, _, section = doc.partition(_SECTION)
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = _ATTRIBUTE.fullmatch(line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return what.strip(), found


def _describe(schema: dict[str, Any]) -> None:
    """Move the docstring's Attributes to the fields they describe."""
    schema["description"], words = _parse(inspect.cleandoc(schema["description"]))
    for name, field in schema["properties"].items():
        if name in words:
            field["description"] = words[name]
