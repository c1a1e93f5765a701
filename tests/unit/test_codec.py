"""Messages to bytes and back, in both encodings; and any bytes at all to a value or one error."""

import base64
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runnerd.protocol.answers import ANSWERS
from runnerd.protocol.codec import REQUEST_ID_CHARS_MAX, Codec
from runnerd.protocol.errors import MESSAGE_CHARS_MAX, ErrorData, RequestError
from runnerd.protocol.fields import Params
from runnerd.protocol.framing import Encoding, FrameSplitter
from runnerd.protocol.notes import NOTIFICATIONS, OutputNote
from runnerd.protocol.requests import (
    METHODS,
    ExecAck,
    ExecInspect,
    ExecSignal,
    ExecStart,
    ExecWrite,
)

from .strategies import INT_MAX, INT_MIN, messages

JSON, MSGPACK = Codec(Encoding.JSON), Codec(Encoding.MSGPACK)
CODECS = (JSON, MSGPACK)
DEEP = 100_000
PARAMS = sorted({*METHODS.values()}, key=lambda struct: struct.__name__)
BODIES = sorted({*ANSWERS.values(), *NOTIFICATIONS.values()}, key=lambda struct: struct.__name__)

request_ids = st.integers(INT_MIN, INT_MAX) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=REQUEST_ID_CHARS_MAX
)
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.encoding.value)


def unframed(codec: Codec, data: bytes | bytearray) -> bytes:
    splitter = FrameSplitter(encoding=codec.encoding)
    splitter.feed(data)
    payload = splitter.next_frame()
    assert payload is not None
    assert splitter.next_frame() is None
    assert splitter.pending_bytes == 0
    return payload


def encoded(codec: Codec, value: object) -> bytes:
    data: bytes = codec._module.encode(value)
    return data


def raw(codec: Codec, value: object) -> msgspec.Raw:
    return msgspec.Raw(encoded(codec, value))


# Round trips


@codecs
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_every_request_comes_back_as_it_was(codec: Codec, method: str, data: st.DataObject) -> None:
    kind = METHODS[method]
    params, request_id = data.draw(messages(kind)), data.draw(request_ids)
    request = codec.request(unframed(codec, codec.call(request_id, method, params)))
    assert (request.id, request.method) == (request_id, method)
    assert codec.params(request.params, kind) == params


@codecs
@pytest.mark.parametrize("method", ANSWERS)
@given(data=st.data())
def test_every_answer_comes_back_as_it_was(codec: Codec, method: str, data: st.DataObject) -> None:
    answer, request_id = data.draw(messages(ANSWERS[method])), data.draw(request_ids)
    incoming = codec.incoming(unframed(codec, codec.answer(request_id, answer)))
    assert (incoming.id, incoming.method, incoming.error) == (request_id, None, None)
    assert codec.decode(incoming.result, ANSWERS[method]) == answer


@codecs
@pytest.mark.parametrize("method", NOTIFICATIONS)
@given(data=st.data())
def test_every_notification_comes_back_as_it_was(
    codec: Codec, method: str, data: st.DataObject
) -> None:
    note = data.draw(messages(NOTIFICATIONS[method]))
    incoming = codec.incoming(unframed(codec, codec.note(method, note)))
    assert (incoming.id, incoming.method, incoming.error) == (None, method, None)
    assert codec.decode(incoming.params, NOTIFICATIONS[method]) == note


@codecs
@given(facts=messages(ErrorData), request_id=st.none() | request_ids)
def test_every_error_comes_back_as_it_was(
    codec: Codec, facts: ErrorData, request_id: int | str | None
) -> None:
    error = RequestError(facts.kind, "it happened")
    error.data = facts
    incoming = codec.incoming(unframed(codec, codec.failure(request_id, error)))
    assert incoming.id == request_id
    assert incoming.error == error.body()


@codecs
@given(params=messages(ExecAck))
def test_the_clients_notification_has_no_id(codec: Codec, params: ExecAck) -> None:
    request = codec.request(unframed(codec, codec.note("exec.ack", params)))
    assert request.id is None
    assert codec.params(request.params, ExecAck) == params


# Unknown fields


@codecs
@pytest.mark.parametrize("kind", PARAMS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_an_unknown_field_of_a_request_is_refused_by_name(
    codec: Codec, kind: type[Params], data: st.DataObject
) -> None:
    params = msgspec.to_builtins(data.draw(messages(kind)), builtin_types=(bytes,))
    with pytest.raises(RequestError) as caught:
        codec.params(raw(codec, params | {"from_the_future": 1}), kind)
    assert caught.value.kind == "invalid_params"
    assert caught.value.data.field == "from_the_future"
    assert caught.value.message == "from_the_future: unknown field"


def with_more(value: Any, *, is_struct: bool = True) -> Any:
    """Add a field to every struct inside; the dictionary of labels is none."""
    if isinstance(value, list):
        return [with_more(item) for item in value]
    if not isinstance(value, dict) or not is_struct:
        return value
    more = {key: with_more(item, is_struct=key != "labels") for key, item in value.items()}
    return more | {"from_the_future": [{"any": None}]}


@codecs
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_unknown_fields_of_an_answer_are_ignored_at_every_depth(
    codec: Codec, kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    body = data.draw(messages(kind))
    fields = msgspec.to_builtins(body, builtin_types=(bytes,))
    assert codec.decode(raw(codec, with_more(fields)), kind) == body


@codecs
def test_an_unknown_member_of_the_envelope_is_refused_by_name(codec: Codec) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": "ping", "extra": 1}
    with pytest.raises(RequestError, match="extra: unknown field") as caught:
        codec.request(encoded(codec, request))
    assert caught.value.kind == "invalid_request"


# The envelope

ENVELOPES: list[tuple[object, str]] = [
    ([], "expected `object`, got `array`"),
    ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}], "expected `object`, got `array`"),
    (None, "expected `object`, got `null`"),
    (7, "expected `object`, got `int`"),
    ("{}", "expected `object`, got `str`"),
    ({}, "jsonrpc: is required"),
    ({"jsonrpc": "2.0", "id": 1}, "method: is required"),
    ({"id": 1, "method": "ping"}, "jsonrpc: is required"),
    ({"jsonrpc": "1.0", "id": 1, "method": "ping"}, "jsonrpc must be the string 2.0"),
    ({"jsonrpc": 2.0, "id": 1, "method": "ping"}, "jsonrpc: expected `str`, got `float`"),
    ({"jsonrpc": "2.0", "id": 1, "method": 1}, "method: expected `str`, got `int`"),
    ({"jsonrpc": "2.0", "id": 1.5, "method": "x"}, "id: expected `int | str | null`, got `float`"),
    ({"jsonrpc": "2.0", "id": True, "method": "x"}, "id: expected `int | str | null`, got `bool`"),
    ({"jsonrpc": "2.0", "id": [1], "method": "x"}, "id: expected `int | str | null`, got `array`"),
    ({"jsonrpc": "2.0", "id": {}, "method": "x"}, "id: expected `int | str | null`, got `object`"),
    ({"jsonrpc": "2.0", "id": "x" * 257, "method": "x"}, "an id has at most 256 characters"),
    ({"jsonrpc": "2.0", "id": 2**63, "method": "x"}, "id: expected `int` <= 9223372036854775807"),
]


@codecs
@pytest.mark.parametrize(("envelope", "message"), ENVELOPES)
def test_what_is_no_request_is_said_in_words(codec: Codec, envelope: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        codec.request(encoded(codec, envelope))
    assert (caught.value.kind, caught.value.message) == ("invalid_request", message)


@codecs
@pytest.mark.parametrize("request_id", [0, -1, INT_MIN, INT_MAX, "", "x" * REQUEST_ID_CHARS_MAX])
def test_ids_up_to_their_limits_pass(codec: Codec, request_id: int | str) -> None:
    request = {"jsonrpc": "2.0", "id": request_id, "method": "ping"}
    assert codec.request(encoded(codec, request)).id == request_id


def test_an_id_that_messagepack_could_not_write_is_refused_in_json_too() -> None:
    with pytest.raises(RequestError, match="id: expected `int` <= "):
        JSON.request(b'{"jsonrpc":"2.0","id":%d,"method":"ping"}' % 10**30)


@codecs
def test_absent_parameters_are_an_empty_object(codec: Codec) -> None:
    request = codec.request(encoded(codec, {"jsonrpc": "2.0", "id": 1, "method": "exec.list"}))
    assert codec.params(request.params, METHODS["exec.list"]) == METHODS["exec.list"]()


@codecs
@pytest.mark.parametrize("params", [None, [], [1], 1, "x", True])
def test_parameters_are_an_object(codec: Codec, params: object) -> None:
    """JSON-RPC also knows them by position; runnerd does not."""
    request = {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": params}
    with pytest.raises(RequestError, match="params: expected `object`") as caught:
        codec.params(codec.request(encoded(codec, request)).params, METHODS["ping"])
    assert caught.value.data.field == "params"


def test_of_a_name_given_twice_the_last_counts() -> None:
    """Both libraries and RFC 8259 (4) leave it open; written down so that it does not drift."""
    assert JSON.params(msgspec.Raw(b'{"argv":["a"],"argv":["b"]}'), ExecStart).argv == ["b"]
    twice = b"\x82\xa4argv\x91\xa1a\xa4argv\x91\xa1b"
    assert MSGPACK.params(msgspec.Raw(twice), ExecStart).argv == ["b"]


# Garbage


def params_refusal(
    codec: Codec, params: bytes | msgspec.Raw, kind: type[Params]
) -> RequestError | None:
    """Decode parameters; what is refused is returned, and anything else that is raised escapes."""
    try:
        assert isinstance(codec.params(msgspec.Raw(params), kind), kind)
    except RequestError as error:
        return error
    return None


def outcome(codec: Codec, payload: bytes) -> str:
    """Take a payload the daemon's whole way: the kind of the refusal, or "value"."""
    refused: RequestError | None
    try:
        request = codec.request(payload)
    except RequestError as error:
        refused = error
    else:
        refused = params_refusal(codec, request.params, METHODS.get(request.method, ExecStart))
    if refused is None:
        return "value"
    assert 0 < len(refused.message) <= MESSAGE_CHARS_MAX
    assert codec.failure(None, refused)
    return refused.kind


def mutated(payload: bytes, edits: list[tuple[int, int, int]]) -> bytes:
    data = bytearray(payload)
    for place, byte, what in edits:
        at = place % (len(data) + 1)
        data[at : at + what % 3] = bytes([byte]) * (what % 5)
    return bytes(data)


@codecs
@given(payload=st.binary(max_size=300) | st.binary(max_size=300).map(b"{".__add__))
def test_random_bytes_give_a_refusal(codec: Codec, payload: bytes) -> None:
    assert outcome(codec, payload) in ("parse_error", "invalid_request")


@codecs
@given(
    data=st.data(), edits=st.lists(st.tuples(st.integers(0), st.integers(0, 255), st.integers(0)))
)
def test_a_damaged_request_gives_a_value_or_a_refusal(
    codec: Codec, data: st.DataObject, edits: list[tuple[int, int, int]]
) -> None:
    method = data.draw(st.sampled_from([*METHODS]))
    payload = unframed(codec, codec.call(1, method, data.draw(messages(METHODS[method]))))
    kinds = ("value", "parse_error", "invalid_request", "invalid_params")
    assert outcome(codec, mutated(payload, edits)) in kinds


@codecs
@given(
    data=st.data(), edits=st.lists(st.tuples(st.integers(0), st.integers(0, 255), st.integers(0)))
)
def test_damaged_parameters_alone_give_a_value_or_invalid_params(
    codec: Codec, data: st.DataObject, edits: list[tuple[int, int, int]]
) -> None:
    kind = METHODS[data.draw(st.sampled_from([*METHODS]))]
    damaged = mutated(encoded(codec, data.draw(messages(kind))), edits)
    refused = params_refusal(codec, damaged, kind)
    assert refused is None or (refused.kind == "invalid_params" and refused.data.field)


@codecs
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_a_request_cut_short_is_a_parse_error(
    codec: Codec, method: str, data: st.DataObject
) -> None:
    payload = unframed(codec, codec.call(1, method, data.draw(messages(METHODS[method]))))
    end = data.draw(st.integers(0, len(payload) - 1))
    assert outcome(codec, payload[:end]) == "parse_error"


ENVELOPE_JSON = b'{"jsonrpc":"2.0","id":1,"method":"exec.start","params":%s}'
ENVELOPE_MSGPACK = b"\x84\xa7jsonrpc\xa32.0\xa2id\x01\xa6method\xaaexec.start\xa6params"

HOSTILE_JSON: list[tuple[bytes, str]] = [
    (b"[" * DEEP, "parse_error"),
    (b'{"a":' * DEEP, "parse_error"),
    (b"[" * DEEP + b"]" * DEEP, "parse_error"),
    (b'{"argv":' + b"[" * DEEP + b"]" * DEEP + b"}", "parse_error"),
    (b'{"env":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", "parse_error"),
    (b'{"env":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", "invalid_params"),
    (b'{"argv":["a"],"deadline_s":1e999}', "invalid_params"),
    (b'{"argv":["a"],"deadline_s":-1e999}', "invalid_params"),
    (b'{"argv":["a"],"umask":1e999}', "invalid_params"),
    (b'{"argv":["a"],"deadline_s":NaN}', "parse_error"),
    (b'{"argv":["a"],"deadline_s":Infinity}', "parse_error"),
    (b'{"argv":["a"],"umask":' + b"9" * 100_000 + b"}", "invalid_params"),
    (b'{"argv":["a"],"umask":0022}', "parse_error"),
    (b'{"argv":["a"],"umask":+1}', "parse_error"),
    (b'{"argv":["a"],}', "parse_error"),
    (b"{'argv':['a']}", "parse_error"),
    (b'{"argv":["a"]} // comment', "parse_error"),
    (b'\xef\xbb\xbf{"argv":["a"]}', "parse_error"),
    (b'{"argv":["a\xff"]}', "invalid_params"),
    (b'{"argv":["a\xc3"]}', "invalid_params"),
    (b'{"argv":["\xed\xa0\x80"]}', "invalid_params"),
    (b'{"argv":["\xc0\x80"]}', "invalid_params"),
    (b'{"argv":["\\ud800"]}', "parse_error"),
    (b'{"argv":["\\ude00\\ud83d"]}', "parse_error"),
    (b'{"argv":["\x00"]}', "parse_error"),
    (b'{"argv":["\t"]}', "parse_error"),
    (b'{"' + b"x" * 1_000_000 + b'":1}', "invalid_params"),
    (b'{"argv":["a"],"env_mode":"' + b"x" * 1_000_000 + b'"}', "invalid_params"),
    (b'{"argv":["a"],"cwd":"' + b"x" * 1_000_000 + b'"}', "invalid_params"),
    (b'{"argv":["a"],"argv":["b"]}', "value"),
    (b'{"argv":["a"],"argv":1}', "invalid_params"),
    (b'{"argv":["a"],"env":{"X":1,"X":"x"}}', "invalid_params"),
    (b"", "parse_error"),
]

HOSTILE_MSGPACK: list[tuple[bytes, str]] = [
    (b"\x91" * DEEP + b"\xc0", "parse_error"),
    (b"\x81\xa1a" * DEEP + b"\xc0", "parse_error"),
    (b"\x81\xa4argv" + b"\x91" * DEEP + b"\xc0", "parse_error"),
    (b"\x81\x91\x01\x02", "invalid_params"),
    (b"\x81\x81\x01\x02\x03", "invalid_params"),
    (b"\x81\x01\x02", "invalid_params"),
    (b"\x81\xc0\x02", "invalid_params"),
    (b"\xdf\xff\xff\xff\xff", "parse_error"),
    (b"\xdd\xff\xff\xff\xff", "parse_error"),
    (b"\xdb\xff\xff\xff\xffa", "parse_error"),
    (b"\xc6\xff\xff\xff\xffa", "parse_error"),
    (b"\xc9\xff\xff\xff\xff\x01", "parse_error"),
    (b"\xc1", "parse_error"),
    (b"\x81\xa4argv\x91\xa1\xff", "invalid_params"),
    (b"\x81\xa4argv\x91\xc4\x01a", "invalid_params"),
    (b"\x81\xa4argv\x91\xd4\x05a", "invalid_params"),
    (b"\x81\xa1\xff\xc0", "invalid_params"),
    (b"\x81\xa4argv\x91\xd6\xff\0\0\0\0", "invalid_params"),
    (b"\x81\xa4argv\x91\xd7\xff" + b"\xff" * 8, "invalid_params"),
    (b"\x82\xa4argv\x91\xa1a\xa3env\x81\xa1X\xd7\xff" + b"\xff" * 8, "invalid_params"),
    (b"\x82\xa4argv\x91\xa1a\xaadeadline_s\xca\x7f\xc0\0\0", "invalid_params"),
    (b"\x82\xa4argv\x91\xa1a\xaadeadline_s\xca\x7f\x80\0\0", "invalid_params"),
    (b"\x81\xa4argv\x91\xa1a trailing", "parse_error"),
    (b"", "parse_error"),
]


@pytest.mark.parametrize(("params", "expected"), HOSTILE_JSON)
def test_hostile_json(params: bytes, expected: str) -> None:
    assert outcome(JSON, ENVELOPE_JSON % params) == expected
    assert outcome(JSON, params) in ("parse_error", "invalid_request")


@pytest.mark.parametrize(("params", "expected"), HOSTILE_MSGPACK)
def test_hostile_messagepack(params: bytes, expected: str) -> None:
    assert outcome(MSGPACK, ENVELOPE_MSGPACK + params) == expected
    assert outcome(MSGPACK, params) in ("parse_error", "invalid_request")


HOSTILE = [*[(JSON, p) for p, _ in HOSTILE_JSON], *[(MSGPACK, p) for p, _ in HOSTILE_MSGPACK]]


@pytest.mark.parametrize(("codec", "payload"), HOSTILE)
def test_hostile_parameters_alone(codec: Codec, payload: bytes) -> None:
    """Also where the envelope let them through, which a later decoder might."""
    refused = params_refusal(codec, payload, ExecStart)
    assert refused is None or (refused.kind == "invalid_params" and refused.data.field)


@pytest.mark.parametrize(("codec", "payload"), HOSTILE)
@pytest.mark.parametrize("around", [b"%s", b'{"id":1,"result":%s}', b"\x82\xa2id\x01\xa6result%s"])
def test_a_client_meets_hostile_bytes_with_a_value_or_a_decode_error(
    codec: Codec, payload: bytes, around: bytes
) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        incoming = codec.incoming(around.replace(b"%s", payload))
        codec.decode(incoming.result, OutputNote)


@codecs
@given(payload=st.binary(max_size=200))
def test_a_client_meets_random_bytes_with_a_decode_error(codec: Codec, payload: bytes) -> None:
    try:
        codec.incoming(payload)
    except msgspec.DecodeError:
        return
    assert codec is MSGPACK or payload.lstrip().startswith(b"{")


def test_nesting_the_client_does_not_know_is_a_decode_error() -> None:
    deep = b'{"from_the_future":' + b"[" * DEEP + b"]" * DEEP + b"}"
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        JSON.incoming(deep)
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        JSON.decode(msgspec.Raw(deep), OutputNote)


# Which field, and in which words

WORDS: list[tuple[type[Params], object, str, str]] = [
    (ExecInspect, {"exec_id": "a b"}, "exec_id",
     "has 1 to 128 characters, each of A-Z a-z 0-9 _ . : -"),
    (ExecStart, {"argv": ["a"], "env_mode": "x"}, "env_mode", "'x' is none of extend, replace"),
    (ExecStart, {"argv": ["a", 1]}, "argv[1]", "expected `str`, got `int`"),
    (ExecStart, {"argv": ["a"], "rlimits": {"cpu": [1, 2], "as": [1, "x"]}}, "rlimits['as'][1]",
     "'x' is none of unlimited, a number"),
    (ExecStart, {"argv": ["a"], "rlimits": {"as": [1]}}, "rlimits['as']",
     "expected `array` of length 2"),

    (ExecStart, {"argv": ["a"], "env": {"A": "a", "B": 1}}, "env['B']",
     "expected `str | null`, got `int`"),
    (ExecStart, {"argv": ["a"], "labels": {"` - at `$.x`": 1}}, "labels['` - at `$.x`']",
     "expected `str`, got `int`"),
    (ExecStart, {"argv": ["a"], "attach": {"streams": ["stdin"]}}, "attach.streams[0]",
     "'stdin' is none of stdout, stderr"),
    (ExecStart, {"argv": ["a"], "attach": {"x": 1}}, "attach.x", "unknown field"),
    (ExecStart, {"argv": ["a"], "attach": {"window_bytes": 0}}, "attach.window_bytes",
     "expected `int` >= 1"),
    (ExecStart, {}, "argv", "is required"),
    (ExecSignal, {"exec_id": "a", "signal": "NOPE"}, "signal", "'NOPE' is no signal"),
]  # fmt: skip


@codecs
@pytest.mark.parametrize(("kind", "params", "field", "reason"), WORDS)
def test_a_refusal_names_the_place_and_says_what_belongs_there(
    codec: Codec, kind: type[Params], params: object, field: str, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        codec.params(raw(codec, params), kind)
    assert caught.value.data.field == field
    assert caught.value.message.startswith(f"{field}: {reason}")


def test_a_hard_limit_beyond_64_bits_is_found() -> None:
    with pytest.raises(RequestError, match="does not fit 64 bits") as caught:
        JSON.params(raw(JSON, {"argv": ["a"], "rlimits": {"as": [1, 2**64]}}), ExecStart)
    assert caught.value.data.field == "rlimits['as'][1]"


@codecs
def test_a_huge_request_is_refused_without_walking_it_for_the_key(codec: Codec) -> None:
    """The daemon serves others meanwhile; the field is named all the same, and its choices."""
    large = {"argv": ["x" * 1_000_000]}
    with pytest.raises(RequestError) as caught:
        codec.params(raw(codec, large | {"env": {"A": 1}}), ExecStart)
    assert caught.value.data.field == "env[...]"
    with pytest.raises(RequestError, match="env_mode: 'x' is none of extend, replace"):
        codec.params(raw(codec, large | {"env_mode": "x"}), ExecStart)
    with pytest.raises(RequestError, match="UTF-8") as caught:
        codec.params(msgspec.Raw(encoded(codec, large).replace(b"xx", b"\xff\xff")), ExecStart)
    assert caught.value.data.field == "params"


@pytest.mark.parametrize(
    ("codec", "params", "field"),
    [
        (JSON, b'{"argv":["a","\xff"]}', "argv[1]"),
        (JSON, b'{"argv":["a"],"env":{"X":"\xff"}}', "env['X']"),
        (JSON, b'{"argv":["a"],"cwd":"/\xff"}', "cwd"),
        (MSGPACK, b"\x81\xa4argv\x92\xa1a\xa1\xff", "argv[1]"),
        (MSGPACK, b"\x81\xa3env\x81\xa1X\xa1\xff", "env['X']"),
    ],
)
def test_text_that_is_not_utf8_is_found(codec: Codec, params: bytes, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        codec.params(msgspec.Raw(params), ExecStart)
    assert caught.value.message == f"{field}: is not valid UTF-8 text"
    assert caught.value.data.field == field


@pytest.mark.parametrize(
    ("params", "place"),
    [
        (b'{"argv":["a\\udcff"]}', "params.argv[0]"),
        (b'{"argv":["a"],"env":{"X":"\\ud800 "}}', "params.env.X"),
        (b'{"argv":["a"],"env":{"\\ud800":"x"}}', "a key of params.env"),
    ],
)
def test_half_a_utf16_pair_is_found(params: bytes, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        JSON.request(ENVELOPE_JSON % params)
    assert caught.value.kind == "parse_error"
    assert caught.value.message == f"{place}: is not UTF-8 (a lone surrogate)"


def test_a_whole_utf16_pair_is_text() -> None:
    params = msgspec.Raw(b'{"argv":["\\ud83d\\ude00"]}')
    assert JSON.params(params, ExecStart).argv == ["\U0001f600"]


# Bytes


@given(st.binary(max_size=200))
@example(b"")
def test_bytes_are_base64_in_json_and_bytes_in_messagepack(data: bytes) -> None:
    assert encoded(JSON, {"d": data}) == b'{"d":"%s"}' % base64.b64encode(data)
    for codec in CODECS:
        params = ExecWrite(exec_id="x", data=data)
        assert codec.params(raw(codec, params), ExecWrite) == params


NOT_BASE64 = [
    *["Y", "YQ", "YQ=", "YWI", "YQ===", "=", "====", "YQ==YQ==", "YWJj=", "A===", "YQ=a"],
    *[" YQ==", "YQ== ", "YQ==\n", "Y Q==", "YWJj\r\nYWJj", "-_-_", "YWJ\u00e9", "YWJ\0"],
    *["YR==", "YW==", "Yf==", "YWJjYR==", "YWK=", "YWL=", "YWJjYWJ="],  # spare bits set
]


@pytest.mark.parametrize("text", NOT_BASE64)
def test_base64_is_strict(text: str) -> None:
    """One text for one value of bytes: no white space, no other alphabet, no spare bits."""
    with pytest.raises(RequestError, match="data: is not strict base64") as caught:
        JSON.params(raw(JSON, {"exec_id": "x", "data": text}), ExecWrite)
    assert caught.value.data.field == "data"


def strictly_decoded(text: str) -> bytes | None:
    """Say it again with the standard library: decode, and only what encodes to the same."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if base64.b64encode(data).decode() == text else None


@given(st.text("AQYgWv+/=09", max_size=12))
def test_base64_is_exactly_what_encoding_gives(text: str) -> None:
    try:
        data = JSON.params(raw(JSON, {"exec_id": "x", "data": text}), ExecWrite).data
    except RequestError:
        data = None
    assert data == strictly_decoded(text)


def test_text_is_not_taken_for_bytes_in_messagepack() -> None:
    with pytest.raises(RequestError, match="data: expected `bytes`, got `str`"):
        MSGPACK.params(raw(MSGPACK, {"exec_id": "x", "data": "YQ=="}), ExecWrite)
