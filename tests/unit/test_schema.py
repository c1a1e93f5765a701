"""What the protocol says of itself is whole, and is what the decoder does."""

import json
import re
from typing import Any

import msgspec
import pytest

from runnerd.protocol.answers import ANSWERS
from runnerd.protocol.errors import KINDS, ErrorBody, ErrorData
from runnerd.protocol.notes import NOTIFICATIONS
from runnerd.protocol.requests import METHODS
from runnerd.protocol.schema import attributes, methods_table, protocol_schema

SCHEMA = protocol_schema()
ALL: set[type[msgspec.Struct]] = {
    *METHODS.values(),
    *ANSWERS.values(),
    *NOTIFICATIONS.values(),
    ErrorData,
    ErrorBody,
}
STRUCTS = sorted(ALL, key=lambda struct: struct.__name__)


def refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return here + [ref for item in value.values() for ref in refs(item)]
    return [ref for item in value for ref in refs(item)] if isinstance(value, list) else []


def test_it_is_json() -> None:
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


def test_every_method_notification_and_kind_is_in_it() -> None:
    assert SCHEMA["methods"].keys() == METHODS.keys()
    assert SCHEMA["notifications"].keys() == NOTIFICATIONS.keys()
    assert SCHEMA["client_notifications"].keys() == {"exec.ack"}
    assert SCHEMA["error_kinds"].keys() == KINDS.keys()
    assert SCHEMA["protocol"] == [1]


def test_every_reference_leads_somewhere_and_nothing_is_left_over() -> None:
    names = {ref.removeprefix("#/$defs/") for ref in refs(SCHEMA)}
    assert names == SCHEMA["$defs"].keys()


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_every_message_is_described(struct: type[msgspec.Struct]) -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(struct)}
    words = attributes(struct)
    if struct is not ErrorBody:  # JSON-RPC's own three
        assert words.keys() == fields
        assert all(words.values())
    definition = SCHEMA["$defs"][struct.__name__]
    assert definition["properties"].keys() == fields
    assert definition["description"]
    assert "Attributes:" not in definition["description"]
    for name, text in words.items():
        assert definition["properties"][name]["description"] == text


@pytest.mark.parametrize("name", SCHEMA["$defs"])
def test_every_part_of_a_message_is_described(name: str) -> None:
    for field, schema in SCHEMA["$defs"][name]["properties"].items():
        assert name == "ErrorBody" or schema.get("description"), field


def test_requests_refuse_and_answers_take_what_is_unknown() -> None:
    for method, entry in SCHEMA["methods"].items():
        params, result = (entry[part]["$ref"].removeprefix("#/$defs/") for part in
                          ("params", "result"))  # fmt: skip
        assert SCHEMA["$defs"][params]["additionalProperties"] is False, method
        assert SCHEMA["$defs"][result].get("additionalProperties") is not False, method


def test_no_pattern_needs_a_dialect() -> None:
    r"""JSON Schema means ECMA-262, where \Z is a letter and the end of a text is `$`."""
    pattern = SCHEMA["$defs"]["ExecInspect"]["properties"]["exec_id"]["pattern"]
    assert "\\Z" not in pattern
    assert re.search(pattern, "a:b")
    assert not re.search(pattern, "a\n")


def test_the_schema_is_made_anew_each_time() -> None:
    assert protocol_schema() == SCHEMA
    assert protocol_schema() is not SCHEMA


def test_the_table_has_a_row_for_every_method() -> None:
    head, rule, *rows = methods_table().splitlines()
    assert head == "| method | what | parameters | answer |"
    assert rule == "|---|---|---|---|"
    assert [row.split("`")[1] for row in rows] == [*METHODS]
    for row, (method, params) in zip(rows, METHODS.items(), strict=True):
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 4
        shown = {(name.rstrip("?"), not name.endswith("?")) for name in cells[2].split("`")[1::2]}
        fields = msgspec.structs.fields(params)
        assert shown == {(field.encode_name, field.required) for field in fields}
        answer = {name.rstrip("?") for name in cells[3].split("`")[1::2]}
        assert answer == {field.encode_name for field in msgspec.structs.fields(ANSWERS[method])}
        assert cells[1].strip().endswith(".")
