"""The parts of runnerd/PROTOCOL.md that are made from the code.

    python -m tests.page      write them anew

tests/daemon/test_protocol_page.py fails where the page and the code disagree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from runnerd.core.bounds import Bounds
from runnerd.core.life import TRANSITIONS, Event, State
from runnerd.daemon.claim_file import ClaimRecord
from runnerd.daemon.last_words import LastWords
from runnerd.daemon.limit_texts import LIMIT_TEXTS
from runnerd.protocol import (
    answers,
    daemon_answers,
    events,
    exits,
    notes,
    requests,
    sandbox_answers,
)
from runnerd.protocol.errors import KINDS, ErrorData
from runnerd.protocol.schema import attributes, methods_table
from tests.harness import REPOSITORY
from tests.transcripts import PLACEHOLDERS

PAGE: Final = REPOSITORY / "runnerd" / "PROTOCOL.md"
_LEVELS: Final = {"debug": "debug", "info": "info", "warning": "warning", "failure": "error"}

# Limits as hello states them, by the option that sets them.
_SAID_IN_HELLO: Final = {
    name if name in Bounds.__struct_fields__ else f"{name}_max": name
    for name in (field.name for field in msgspec.structs.fields(daemon_answers.Limits))
}


def placeholders_table() -> str:
    rows = [f"| `<{name}>` | {words} |" for name, (words, _) in PLACEHOLDERS.items()]
    return "\n".join(["| placeholder | stands for |", "|---|---|", *rows])


def kinds_table() -> str:
    rows = [
        f"| `{name}` | {kind.code} | {kind.layer} | {kind.preserved} | {kind.hint} "
        f"| {'yes' if kind.retryable else 'no'} |"
        for name, kind in KINDS.items()
    ]
    head = ["| kind | code | layer | preserved | hint | retryable |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def states_diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> STARTING: accepted"]
    for state, moves in TRANSITIONS.items():
        for event, after in moves.items():
            if after is not state:
                lines.append(f"    {state.name} --> {after.name}: {event.value}")
    lines += [f"    {state.name} --> [*]" for state in (State.FAILED, State.CLOSED)]
    return "\n".join([*lines, "```"])


def states_table() -> str:
    head = "| event | " + " | ".join(f"`{state.name}`" for state in State) + " |"
    shown = "| *shown as* | " + " | ".join(f"`{state.shown}`" for state in State) + " |"
    rows = [head, "|---" * (len(State) + 1) + "|", shown]
    for event in Event:
        cells = [_cell(state, TRANSITIONS[state].get(event)) for state in State]
        rows.append(f"| {event.value} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(state: State, after: State | None) -> str:
    if after is None:
        return "—"
    return "stays" if after is state else f"`{after.name}`"


def limits_table() -> str:
    rows = ["| option | default | in `hello.limits` | what |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(Bounds):
        said = _SAID_IN_HELLO.get(field.name)
        shown = "—" if said is None else f"`{said}`"
        option = field.name.replace("_", "-")
        what = LIMIT_TEXTS[field.name]
        rows.append(f"| `--{option}` | {field.default:,} | {shown} | {what} |")
    return "\n".join(rows)


def fields_table(struct: type[msgspec.Struct], *, request: bool) -> str:
    """Return a table of a struct's fields: of a request with what stands where one is absent."""
    words = attributes(struct)
    schema = _schema(struct)
    if not schema["properties"]:
        return "No fields."
    if request:
        rows = ["| field | type | if absent | what |", "|---|---|---|---|"]
    else:
        rows = ["| field | type | what |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        cells = [f"`{name}`", _type(field)]
        if request:
            cells.append("*required*" if name in schema.get("required", ()) else _default(field))
        cells.append(words[name].replace("|", "\\|"))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([struct], ref_template="{name}")
    found: dict[str, Any] = components[struct.__name__]
    return found


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "—"
    value = field["default"]
    return "—" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def _type(field: dict[str, Any]) -> str:
    """Say a JSON Schema's type in a few words."""
    if "$ref" in field:
        return f"[{field['$ref']}](#{field['$ref'].lower()})"
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    kind: str = field.get("type", "anything")
    if kind == "array" and "prefixItems" in field:
        return "[" + ", ".join(_type(each) for each in field["prefixItems"]) + "]"
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    if kind == "object":
        return f"object of {_type(field.get('additionalProperties', {}))}"
    if field.get("contentEncoding"):
        return "bytes"
    return {"string": "text", "boolean": "true or false"}.get(kind, kind) + _range(field)


def _range(field: dict[str, Any]) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    if field.get("exclusiveMinimum") is not None:
        return f" above {field['exclusiveMinimum']}, at most {_short(most)}"
    if least is None:
        return f", at most {_short(field['maxLength'])} characters" if "maxLength" in field else ""
    return f" {_short(least)} to {_short(most)}" if most is not None else f" {_short(least)} up"


def _short(value: float | None) -> str:
    assert value is not None
    powers = {2**40: "2^40", 2**63 - 1: "2^63-1", 2**31 - 1: "2^31-1"}
    return powers.get(int(value), f"{value:g}" if value >= 1e9 else str(value))


def events_table() -> str:
    rows = [f"| `{kind}` | {words} |" for kind, words in events.EVENT_KINDS.items()]
    return "\n".join(["| kind | when, and its fields |", "|---|---|", *rows])


def logged_events(folder: Path = REPOSITORY / "runnerd" / "daemon") -> dict[str, tuple[str, str]]:
    """Find every event the daemon logs: its level and its fields, as the source says."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name not in ("log", "_log") or node.func.attr not in _LEVELS:
                continue
            first = node.args[0]
            literal = first.value if isinstance(first, ast.Constant) else None
            assert isinstance(literal, str), f"{path}:{node.lineno}: an event is a literal"
            fields = [keyword.arg or "…" for keyword in node.keywords]
            fields += ["error", "traceback"] if node.func.attr == "failure" else []
            event = _LEVELS[node.func.attr], ", ".join(f"`{field}`" for field in fields)
            assert found.setdefault(literal, event) == event, f"{literal}: two forms"
    return found


_REQUESTS: Final = {
    method: struct for method, struct in requests.METHODS.items() if struct.__struct_fields__
}
_PARTS: Final[tuple[type[msgspec.Struct], ...]] = (
    *dict.fromkeys(each for each in answers.ANSWERS.values() if each.__struct_fields__),
    daemon_answers.Trouble,
    daemon_answers.Limits,
    sandbox_answers.Claim,
    sandbox_answers.Pin,
    exits.StreamCount,
    exits.Oom,
    exits.Phases,
    exits.Closed,
    exits.Receipt,
    exits.ReceiptProcess,
    exits.Survivor,
    answers.TerminalSize,
    answers.Usage,
    answers.ProcessInfo,
    answers.Holder,
    daemon_answers.OomOrder,
    daemon_answers.MemoryAdmission,
    ErrorData,
)

GENERATED: Final[dict[str, Callable[[], str]]] = {
    "placeholders": placeholders_table,
    "methods": lambda: methods_table().rstrip(),
    "kinds": kinds_table,
    "states diagram": states_diagram,
    "states": states_table,
    "limits": limits_table,
    "kinds of events": events_table,
    "fields of attach": partial(fields_table, requests.Attach, request=True),
    "fields of pty": partial(fields_table, requests.Pty, request=True),
    "fields of claim.json": partial(fields_table, ClaimRecord, request=False),
    "fields of last-words.json": partial(fields_table, LastWords, request=False),
    **{
        f"fields of {method}": partial(fields_table, struct, request=True)
        for method, struct in _REQUESTS.items()
    },
    **{
        f"fields of {method}": partial(fields_table, struct, request=False)
        for method, struct in notes.NOTIFICATIONS.items()
    },
    **{
        f"fields of {struct.__name__}": partial(fields_table, struct, request=False)
        for struct in _PARTS
    },
}
_PART: Final = re.compile(r"(<!-- from the code: (.+?) -->\n).*?(\n?<!-- end -->)", re.DOTALL)


def generated_parts(page: str) -> dict[str, str]:
    """Return the parts of a page that are made from the code, by name."""
    return {
        found[2]: found[0].removeprefix(found[1]).removesuffix("<!-- end -->").strip("\n")
        for found in _PART.finditer(page)
    }


def renewed(page: str) -> str:
    """Return the page with those parts as they should be."""
    return _PART.sub(lambda found: f"{found[1]}\n{GENERATED[found[2]]()}\n\n<!-- end -->", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
