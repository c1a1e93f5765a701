"""Every error tells the same four facts, and can always be sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from runnerd.protocol import errors
from runnerd.protocol.codec import Codec
from runnerd.protocol.errors import KINDS, ErrorData, RequestError, invalid
from runnerd.protocol.framing import HEADER_BYTES, Encoding

LAYERS = {"request", "access", "sandbox", "daemon", "shim", "kernel"}

STANDARD = {
    "parse_error": -32700,
    "invalid_request": -32600,
    "method_unknown": -32601,
    "invalid_params": -32602,
    "internal": -32603,
}
"""Source: JSON-RPC 2.0 Specification, 5.1 "Error object"."""

NEEDED = {
    *STANDARD,
    *["hello_required", "protocol_unsupported", "frame_too_large", "unauthorized", "peer_refused"],
    *["peer_gone", "incarnation_changed", "exec_exists", "cancelled", "exec_unknown"],
    *["exec_evicted", "exec_ended", "cursor_invalid", "stdin_closed", "stdin_offset"],
    *["not_owner", "nonce_reused", "history_lost", "exec_settled", "exec_lost", "exec_live"],
    *["start_failed", "start_timeout", "wait_timeout", "busy", "draining", "stopping"],
}
"""What the methods served now can answer; a later method brings its kinds along."""

SAFE_TO_REPEAT = {"start_timeout", "wait_timeout", "busy"}


def test_every_kind_that_is_needed_exists() -> None:
    assert NEEDED - KINDS.keys() == set()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_its_four_facts(name: str) -> None:
    kind = KINDS[name]
    assert kind.layer in LAYERS
    assert kind.preserved
    assert kind.hint
    assert kind.retryable is (name in SAFE_TO_REPEAT)
    assert kind.code == STANDARD.get(name, -32000)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_worded_like_the_others(name: str) -> None:
    for words in (KINDS[name].preserved, KINDS[name].hint):
        assert not words[0].isupper()
        assert not words.endswith((".", "!"))
        assert words == words.strip()
    assert name == name.lower()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("encoding", Encoding)
def test_the_four_facts_are_written_out_on_the_wire(name: str, encoding: Encoding) -> None:
    """`retryable` too, where it is false: a fact left out is a fact to be guessed."""
    codec = Codec(encoding)
    wire = codec.failure(7, RequestError(name, "it happened"))
    payload = wire[HEADER_BYTES:] if encoding is Encoding.MSGPACK else wire
    body = codec._module.decode(payload)
    kind = KINDS[name]
    assert body == {
        "jsonrpc": "2.0",
        "id": 7,
        "error": {
            "code": kind.code,
            "message": "it happened",
            "data": {
                "kind": name,
                "layer": kind.layer,
                "preserved": kind.preserved,
                "hint": kind.hint,
                "retryable": kind.retryable,
            },
        },
    }


def test_a_raise_site_adds_what_is_particular() -> None:
    error = RequestError(
        "start_failed",
        "cannot run '/nope'",
        preserved="nothing",
        hint="look",
        layer="shim",
        retryable=True,
        stage="exec",
        errno=2,
        errno_name="ENOENT",
    )
    assert error.data == ErrorData(
        kind="start_failed",
        layer="shim",
        preserved="nothing",
        hint="look",
        retryable=True,
        stage="exec",
        errno=2,
        errno_name="ENOENT",
    )
    assert str(error) == error.message == "cannot run '/nope'"


def test_a_kind_or_a_detail_that_does_not_exist_is_a_defect() -> None:
    with pytest.raises(KeyError):
        RequestError("nope", "x")
    with pytest.raises(AttributeError):
        RequestError("busy", "x", nope=1)


def test_an_invalid_field_leads_the_message() -> None:
    error = invalid("argv[0]", "contains a NUL byte")
    assert error.message == "argv[0]: contains a NUL byte"
    assert error.data.field == "argv[0]"
    assert error.code == errors.INVALID_PARAMS


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_can_be_quoted_in_a_message_and_sent(field: str, message: str) -> None:
    """What a peer sent is quoted: a lone surrogate could not be encoded at all."""
    error = invalid(field, message)
    assert error.message.isprintable()
    json.encode(error.body())


@pytest.mark.parametrize("char", ["x", "\x1b", "\0", "\udcff", "\U0010ffff"])
def test_a_message_is_bounded_whatever_it_quotes(char: str) -> None:
    error = invalid(char * 5_000_000, char * 5_000_000)
    assert len(error.message) <= 10 * errors.MESSAGE_CHARS_MAX
    assert error.data.field is not None
    assert len(error.data.field) <= 10 * errors.FIELD_CHARS_MAX
    assert "..." in error.data.field


def test_a_terminal_never_gets_a_peers_escape_sequences() -> None:
    assert invalid("cwd", "'\x1b[2J' is no path").message == "cwd: '\\x1b[2J' is no path"
