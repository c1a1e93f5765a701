"""Whatever is wrong with a field, the refusal names that field. No field can be forgotten.

Wrong types are made from the structs' own types. Wrong values are written down in BAD, because
rows made from the limits would vanish with the limits; a field without a row fails a test.
"""

import math
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as mi

from runnerd.protocol.answers import ANSWERS
from runnerd.protocol.codec import Codec
from runnerd.protocol.daemon_requests import (
    DaemonDrain,
    DaemonMetrics,
    DaemonStop,
    EnvSet,
    Hello,
    SandboxActivity,
    SandboxClaim,
    SandboxPin,
)
from runnerd.protocol.errors import RequestError
from runnerd.protocol.fields import (
    PATTERNS,
    RLIM_INFINITY,
    RLIMITS,
    NoParams,
    Params,
    rlimit_number,
)
from runnerd.protocol.framing import FRAME_BYTES_MAX, HEADER_BYTES, Encoding
from runnerd.protocol.requests import (
    METHODS,
    Attach,
    ExecAck,
    ExecAttach,
    ExecCancel,
    ExecDetach,
    ExecForget,
    ExecInspect,
    ExecList,
    ExecResize,
    ExecSignal,
    ExecStart,
    ExecWait,
    ExecWrite,
    Pty,
)

from .strategies import messages

CODECS = [Codec(encoding) for encoding in Encoding]
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.encoding.value)

# Wrong values by what a field means. Those no JSON can hold are tried in MessagePack only.

EXEC_ID: Final = ["", "x" * 129, "a b", "a/b", "a\n", "a\0", "\u00e9", "\uff41", "\u0661"]
BOOL: Final = [0, 1, "true", "false", ""]
INT_OF_63_BITS: Final = [-1, 2**63, 10**30, 1.5, 1e300, math.nan, math.inf]
FROM_ONE: Final = [0, *INT_OF_63_BITS]
WINDOW: Final = [0, -1, 2**40 + 1, 10**30, 0.5]
SECONDS: Final = [
    *[0, 0.0, -0.0, -1, -5e-324, 1e9 + 1, 10**30, 1e300, "5"],
    *[math.nan, math.inf, -math.inf],
]
GRACE: Final = [bad for bad in SECONDS if bad != 0]
SIDE: Final = [0, -1, 65536, 70_000, 10**30, 24.5, "24", True]
STREAMS: Final = [[], ["stdin"], ["stdout", "stdout"], ["stdout", 1], ["STDOUT"], [None]]
LABELS: Final[list[object]] = [
    *[{"": "x"}, {"x" * 64: "x"}, {"\u00e9" * 32: "x"}, {"a\0": "x"}, {"a": "\0"}, {"a": 1}],
    *[{"a": "x" * 257}, {"a": "\u00e9" * 129}, {"a": None}, {"a": ["x"]}],
    {str(at): "" for at in range(33)},
]

# Parts of exec.start, by the field they are.
PARTS: Final[dict[type[Params], str]] = {Attach: "attach", Pty: "pty"}

BAD: Final[dict[type[Params], dict[str, list[Any]]]] = {
    NoParams: {},
    Hello: {
        "protocol": [[-1], [2**31], [True], ["1"], [1.0], [None], [1] * 65],
        "client": ["x" * 257, "a\0"],
        "incarnation": ["x" * 65, "\0"],
        "fence": [*FROM_ONE, "", "Current", "1"],
        "token": ["x" * 1025],
    },
    Attach: {
        "streams": STREAMS,
        "subscriber": EXEC_ID,
        "generation": [*FROM_ONE, 1],  # 1 is refused without a subscriber
        "window_bytes": WINDOW,
    },
    Pty: {"rows": SIDE, "cols": SIDE, "term": ["", "a\0", "x" * 129]},
    ExecStart: {
        "argv": [[], [""], ["", "a"], ["a", "b\0"], ["\0"], ["a", 1], ["a", None], [["a"]]],
        "exec_id": EXEC_ID,
        "nonce": [*EXEC_ID, "x"],  # x is refused without an exec_id
        "horizon": INT_OF_63_BITS,
        "env": [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "\0"}, {"A": 1}, {"A": True}],
        "env_mode": ["", "Extend", "merge"],
        "cwd": ["", "relative", "./x", "~", "/a\0b", " /"],
        "user": ["", "a\0", "x" * 521],
        "umask": [-1, 0o1000, 1.5, 10**30, "022", math.nan],
        "rlimits": [
            *[{"": [1, 1]}, {"NOFILE": [1, 1]}, {"RLIMIT_CPU": [1, 1]}, {"cpu": 1}, {"cpu": [1]}],
            *[{"cpu": [1, 2, 3]}, {"cpu": [2, 1]}, {"cpu": ["unlimited", 1]}, {"cpu": [-1, 1]}],
            *[{"cpu": [0, 2**64]}, {"cpu": [2**64, 2**64]}, {"cpu": [1, "infinity"]}],
            *[{"cpu": [1.5, 2]}, {"cpu": [True, 2]}, {"cpu": [None, 1]}, {"cpu": [1, math.inf]}],
        ],
        "nice": [-21, 20, 1.5, 10**30],
        "oom_score_adj": [899, 1001, 0, -1000, 900.5],
        "no_new_privs": BOOL,
        "stdin": ["", "inherit", "NULL"],
        "stderr": ["", "stdin", "merge"],
        "pty": [{"rows": 0}, {"cols": 65536}, {"term": ""}, {"nope": 1}, True, [24, 80]],
        "deadline_s": SECONDS,
        "orphan_ttl_s": SECONDS,
        "stall_s": SECONDS,
        "grace_s": GRACE,
        "leftovers": ["", "leave"],
        "flow": ["", "wait"],
        "hold_s": GRACE,
        "sha256": BOOL,
        "labels": LABELS,
        "admission": ["", "force"],
        "attach": [{"streams": []}, {"window_bytes": 0}, {"nope": 1}, True],
    },
    # True is refused without if_idle_for_s.
    DaemonDrain: {"if_idle_for_s": GRACE, "leftovers_count": [*BOOL, True]},
    DaemonStop: {"if_idle_for_s": GRACE, "leftovers_count": [*BOOL, True]},
    SandboxClaim: {
        "owner": ["", "x" * 257, "a\0"],
        "expect": ["", "Claimed", "owned"],
        "nonce": EXEC_ID,
    },
    SandboxPin: {"reason": ["", "x" * 257, "a\0"], "ttl_s": SECONDS, "unpin": BOOL},
    SandboxActivity: {"if_idle_for_s": GRACE, "leftovers_count": BOOL},
    ExecAttach: {
        "exec_id": EXEC_ID,
        "after": [*INT_OF_63_BITS, "", "head", "0"],
        "tail_bytes": [*WINDOW, 1],  # 1 is refused without after "tail"
        "streams": STREAMS,
        "subscriber": EXEC_ID,
        "generation": [*FROM_ONE, 1],
        "window_bytes": WINDOW,
    },
    ExecDetach: {"subscription": INT_OF_63_BITS},
    ExecAck: {"subscription": INT_OF_63_BITS, "seq": INT_OF_63_BITS},
    ExecWrite: {
        "exec_id": EXEC_ID,
        "data": ["x", "YR==", "Y Q=="],
        "offset": INT_OF_63_BITS,
        "eof": BOOL,
        "wait_s": SECONDS,
    },
    ExecResize: {"exec_id": EXEC_ID, "rows": SIDE, "cols": SIDE},
    ExecSignal: {
        "exec_id": EXEC_ID,
        "signal": [0, 65, -9, 10**30, "", "NOPE", "TERM\0", "0", "65", "x" * 100_000, 1.5],
        "to": ["", "session", "all"],
    },
    ExecCancel: {
        "exec_id": EXEC_ID,
        "grace_s": GRACE,
        "if_nonce": EXEC_ID,
        "wait": BOOL,
        "tombstone": BOOL,
    },
    ExecWait: {"exec_id": EXEC_ID, "until": ["", "started"], "timeout_s": SECONDS},
    ExecInspect: {"exec_id": EXEC_ID, "usage": BOOL, "tree": BOOL},
    ExecList: {
        "state": [["ended"], [1], [""], [None], "running"],
        "labels": LABELS,
        "cursor": INT_OF_63_BITS,
        "limit": [0, -1, 1001, 10**30, 1.5],
        "usage": BOOL,
    },
    ExecForget: {"exec_id": EXEC_ID},
    EnvSet: {
        "set": [
            *[{"": "v"}, {"a=b": "v"}, {"a\0": "v"}, {"a": "\0"}, {"a": None}, {"a": 1}],
            *[{"RUNNERD_SOCKET": "/x"}, {"RUNNERD_": ""}],
        ],
        "unset": [[""], ["a=b"], ["a\0"], [1], ["RUNNERD_X"]],
    },
    DaemonMetrics: {"format": ["", "json"]},
}

REQUIRED: Final[dict[type[Params], dict[str, Any]]] = {
    SandboxClaim: {"owner": "o", "expect": "any"},
    SandboxPin: {"reason": "r"},
    Hello: {"protocol": [1]},
    ExecStart: {"argv": ["true"]},
    ExecAttach: {"exec_id": "x"},
    ExecDetach: {"subscription": 1},
    ExecAck: {"subscription": 1, "seq": 1},
    ExecWrite: {"exec_id": "x"},
    ExecResize: {"exec_id": "x", "rows": 24, "cols": 80},
    ExecSignal: {"exec_id": "x", "signal": "TERM"},
    ExecCancel: {"exec_id": "x"},
    ExecWait: {"exec_id": "x"},
    ExecInspect: {"exec_id": "x"},
    ExecForget: {"exec_id": "x"},
}
"""The least each request needs; each of these removed must be missed by name."""


def all_params(kind: type[Params] = Params) -> list[type[Params]]:
    """Every class derived from Params, also one that no method uses yet."""
    return [found for sub in kind.__subclasses__() for found in [sub, *all_params(sub)]]


def fields_of(kind: type[msgspec.Struct]) -> tuple[mi.Field, ...]:
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return info.fields


JSON_VALUES: Final[list[tuple[object, type[mi.Type]]]] = [
    (None, mi.NoneType),
    (True, mi.BoolType),
    (False, mi.BoolType),
    (7, mi.IntType),
    (7.5, mi.FloatType),
    ("", mi.StrType),
    ("no such word!", mi.StrType),
    ([], mi.ListType),
    ([[]], mi.ListType),
    ({}, mi.DictType),
    ({"nope": 1}, mi.DictType),
]


def kinds_taken(kind: mi.Type) -> set[type[mi.Type]]:
    match kind:
        case mi.UnionType(types=types):
            return set().union(*[kinds_taken(part) for part in types])
        case mi.FloatType():
            return {mi.FloatType, mi.IntType}
        case mi.LiteralType():
            return {mi.StrType}
        case mi.StructType():
            return {mi.DictType}
        case mi.BytesType():
            return {mi.StrType}
        case _:
            return {type(kind)}


WRONG_TYPE = [
    (kind, field.name, value)
    for kind in BAD
    for field in fields_of(kind)
    for value, value_kind in JSON_VALUES
    if value_kind not in kinds_taken(field.type)
]
WRONG_VALUE = [
    (kind, field, value)
    for kind, rows in BAD.items()
    for field, bad in rows.items()
    for value in bad
]


def request(codec: Codec, kind: type[Params], params: dict[str, Any]) -> Params:
    """Take parameters the whole way: encoded, as a request, decoded."""
    if kind in PARTS:
        kind, params = ExecStart, {"argv": ["true"], PARTS[kind]: params}
    envelope = {"jsonrpc": "2.0", "id": 1, "method": "x", "params": params}
    data: bytes = codec._module.encode(envelope)
    return codec.params(codec.request(data).params, kind)


def can_write(codec: Codec, value: object) -> bool:
    """JSON has no NaN and no infinity, MessagePack no integers beyond 64 bits."""
    try:
        data = codec._module.encode(value)
    except OverflowError:
        return False
    return bool(codec._module.decode(data) == value)


def check_refused(codec: Codec, kind: type[Params], params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        request(codec, kind, params)
    error = caught.value
    assert (error.kind, error.code) == ("invalid_params", -32602)
    named = error.data.field
    assert named is not None
    path = f"{PARTS[kind]}.{field}" if kind in PARTS else field
    assert named == path or named.startswith((f"{path}[", f"{path}.")), error.message
    assert error.message.startswith(named)
    assert len(error.message) < 2_000
    for word in (*PATTERNS, "malformed", "truncated", "regex", "enum"):
        assert word not in error.message


# No field can be forgotten


def test_every_params_struct_has_its_bad_inputs() -> None:
    aliases = {kind for kind in all_params() if issubclass(kind, NoParams)}
    assert set(all_params()) - aliases == BAD.keys() - {NoParams}
    assert all(not fields_of(kind) for kind in aliases)


@pytest.mark.parametrize("kind", all_params(), ids=lambda kind: kind.__name__)
def test_every_field_has_bad_inputs(kind: type[Params]) -> None:
    rows = BAD.get(kind, {})
    assert rows.keys() == {field.name for field in fields_of(kind)}
    assert all(rows.values())


@pytest.mark.parametrize("kind", all_params(), ids=lambda kind: kind.__name__)
def test_every_required_field_is_listed(kind: type[Params]) -> None:
    required = {field.name for field in fields_of(kind) if field.required}
    assert REQUIRED.get(kind, {}).keys() == required


@pytest.mark.parametrize("kind", all_params(), ids=lambda kind: kind.__name__)
def test_every_number_and_text_is_tried_beyond_its_limits(kind: type[Params]) -> None:
    for field in fields_of(kind):
        rows, taken = BAD[kind][field.name], kinds_taken(field.type)
        numbers = [row for row in rows if type(row) in (int, float)]
        if mi.FloatType in taken:
            assert {"nan", "inf", "-inf"} <= {str(number) for number in numbers}, field.name
        if taken & {mi.IntType, mi.FloatType}:
            good = getattr(msgspec.convert(REQUIRED.get(kind, {}), kind), field.name)
            middle = good if type(good) in (int, float) else 1
            assert min(numbers) < middle < max(filter(math.isfinite, numbers)), field.name


@pytest.mark.parametrize("kind", all_params(), ids=lambda kind: kind.__name__)
def test_every_params_struct_refuses_unknown_fields_and_is_keyword_only(kind: type[Params]) -> None:
    assert kind.__struct_config__.forbid_unknown_fields
    assert kind.__struct_config__.omit_defaults


def test_every_method_has_parameters_and_an_answer() -> None:
    assert METHODS.keys() == ANSWERS.keys()


# Each of them


@codecs
@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, rows in REQUIRED.items() for field in rows]
)
def test_a_missing_field_is_named(codec: Codec, kind: type[Params], field: str) -> None:
    params = {name: value for name, value in REQUIRED[kind].items() if name != field}
    check_refused(codec, kind, params, field)


@codecs
@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_an_unknown_field_is_named(codec: Codec, kind: type[Params]) -> None:
    for name in ("nope", "", "a b", "`", "\u00e9"):
        params = REQUIRED.get(kind, {}) | {name: 1}
        with pytest.raises(RequestError, match="unknown field") as caught:
            request(codec, kind, params)
        assert (caught.value.data.field or "").endswith(name or ("." if kind in PARTS else ""))


@codecs
@pytest.mark.parametrize(("kind", "field", "value"), WRONG_TYPE)
def test_a_wrong_type_is_refused(
    codec: Codec, kind: type[Params], field: str, value: object
) -> None:
    check_refused(codec, kind, REQUIRED.get(kind, {}) | {field: value}, field)


@codecs
@pytest.mark.parametrize(("kind", "field", "value"), WRONG_VALUE)
def test_a_wrong_value_is_refused(
    codec: Codec, kind: type[Params], field: str, value: object
) -> None:
    if not can_write(codec, value) and not (
        codec.encoding is Encoding.MSGPACK and isinstance(value, float)
    ):
        return
    check_refused(codec, kind, REQUIRED.get(kind, {}) | {field: value}, field)


@codecs
@pytest.mark.parametrize("kind", [kind for kind in BAD if kind not in PARTS])
@given(data=st.data())
def test_one_bad_field_spoils_any_good_request(
    codec: Codec, kind: type[Params], data: st.DataObject
) -> None:
    good = msgspec.to_builtins(data.draw(messages(kind)), builtin_types=(bytes,))
    bad = [(field, value) for other, field, value in WRONG_TYPE if other is kind]
    if bad:
        field, value = data.draw(st.sampled_from(bad))
        check_refused(codec, kind, good | {field: value}, field)


# The edges that pass

GOOD: Final[list[tuple[type[Params], dict[str, Any]]]] = [
    (Hello, {"protocol": []}),
    (Hello, {"protocol": [0, 2**31 - 1] * 32, "client": "x" * 256, "incarnation": "x" * 64}),
    (ExecStart, {"argv": ["a", "", "\n", "\u00e9" * 1000], "exec_id": "x" * 128}),
    (ExecStart, {"argv": ["a"], "exec_id": "AZaz09_.:-"}),
    (ExecStart, {"argv": ["a"], "exec_id": "x", "nonce": "x" * 128, "horizon": 2**63 - 1}),
    (ExecStart, {"argv": ["a"], "horizon": 0}),
    (ExecCancel, {"exec_id": "x", "if_nonce": "AZaz09_.:-"}),
    (ExecStart, {"argv": ["a"], "env": {"A": "", "B": None, " ": "=", "1": "\n"}}),
    (ExecStart, {"argv": ["a"], "cwd": "/", "user": "0:0", "umask": 0, "nice": -20}),
    (ExecStart, {"argv": ["a"], "user": "x" * 520, "umask": 0o777, "nice": 19}),
    (ExecStart, {"argv": ["a"], "oom_score_adj": 1000, "grace_s": 0, "hold_s": 0}),
    (ExecStart, {"argv": ["a"], "oom_score_adj": 900, "deadline_s": 1e9, "grace_s": 1e9}),
    (ExecStart, {"argv": ["a"], "deadline_s": 5e-324}),
    (ExecStart, {"argv": ["a"], "rlimits": {name: [0, "unlimited"] for name in RLIMITS}}),
    (ExecStart, {"argv": ["a"], "rlimits": {"as": [RLIM_INFINITY, RLIM_INFINITY]}}),
    (ExecStart, {"argv": ["a"], "rlimits": {"as": [RLIM_INFINITY, "unlimited"]}}),
    (ExecStart, {"argv": ["a"], "labels": {"x" * 63: "x" * 256, "\u00e9" * 31: "\u00e9" * 128}}),
    (ExecStart, {"argv": ["a"], "labels": {str(at): "" for at in range(32)}}),
    (Attach, {"streams": ["stderr"], "window_bytes": 1}),
    (Attach, {"streams": ["stderr", "stdout"], "window_bytes": 2**40}),
    (Pty, {"rows": 1, "cols": 1, "term": "x" * 128}),
    (Pty, {"rows": 65535, "cols": 65535}),
    (ExecStart, {"argv": ["a"], "pty": {}, "stdin": "pipe", "stderr": "pipe"}),
    (ExecResize, {"exec_id": "x", "rows": 1, "cols": 1}),
    (ExecResize, {"exec_id": "x", "rows": 65535, "cols": 65535}),
    (ExecAttach, {"exec_id": "x", "after": "tail", "tail_bytes": 1}),
    (ExecAttach, {"exec_id": "x", "after": "tail"}),
    (ExecAttach, {"exec_id": "x", "after": 2**63 - 1}),
    (ExecAck, {"subscription": 0, "seq": 0}),
    (ExecSignal, {"exec_id": "x", "signal": 1}),
    (ExecSignal, {"exec_id": "x", "signal": 64}),
    (ExecList, {"limit": 1, "state": []}),
    (ExecList, {"limit": 1000, "cursor": 0}),
]


@codecs
@pytest.mark.parametrize(("kind", "params"), GOOD)
def test_a_value_at_its_limit_passes(
    codec: Codec, kind: type[Params], params: dict[str, Any]
) -> None:
    request(codec, kind, params)


@pytest.mark.parametrize(
    "make",
    [
        lambda bad: ExecStart(argv=["a"], deadline_s=bad),
        lambda bad: ExecStart(argv=["a"], grace_s=bad),
        lambda bad: ExecStart(argv=["a"], hold_s=bad),
        lambda bad: ExecWrite(exec_id="x", wait_s=bad),
        lambda bad: ExecCancel(exec_id="x", grace_s=bad),
        lambda bad: ExecWait(exec_id="x", timeout_s=bad),
    ],
)
def test_nan_is_refused_without_the_decoders_help(make: Any) -> None:
    with pytest.raises(RequestError, match="_s: NaN is no duration"):
        make(math.nan)


def test_the_defaults_are_the_designs() -> None:
    start = ExecStart(argv=["a"])
    assert (start.umask, start.grace_s, start.hold_s, start.oom_score_adj) == (0o022, 5, 30, 900)
    assert (start.leftovers, start.env_mode, start.flow) == ("keep", "extend", None)
    assert (start.stdin, start.stderr, start.no_new_privs) == ("null", "pipe", False)
    assert (Pty().rows, Pty().cols, Pty().term) == (24, 80, "xterm-256color")
    assert Attach().streams == ["stdout", "stderr"]
    assert ExecCancel(exec_id="x").tombstone
    assert ExecAttach(exec_id="x").after == 0


@pytest.mark.parametrize("stderr", ["stdout", "null"])
def test_a_terminal_is_one_stream(stderr: Any) -> None:
    with pytest.raises(RequestError, match="stderr: a terminal is one stream"):
        ExecStart(argv=["a"], pty=Pty(), stderr=stderr)


def test_no_request_shares_a_mutable_default_with_another() -> None:
    first, second = ExecStart(argv=["a"]), ExecStart(argv=["a"])
    first.env["A"] = "x"
    first.labels["a"] = "x"
    assert (second.env, second.labels) == ({}, {})


def test_limits_as_the_kernel_takes_them() -> None:
    assert rlimit_number("unlimited") == RLIM_INFINITY
    assert rlimit_number(7) == 7
    assert sorted(RLIMITS.values()) == [*range(16)]


def test_a_signal_has_its_number() -> None:
    assert ExecSignal(exec_id="x", signal="SIGHUP").number == 1


def test_a_frame_holds_the_kernels_largest_argument_list_in_either_encoding() -> None:
    """2 MiB, a quarter of the default stack limit, in strings as long as one may be."""
    longest = 32 * 4096 - 1  # MAX_ARG_STRLEN, execve(2), with its NUL
    params = ExecStart(argv=["a" * longest] * 16)
    for codec in CODECS:
        assert len(codec.call(1, "exec.start", params)) <= FRAME_BYTES_MAX + HEADER_BYTES


def test_every_pattern_has_its_words() -> None:
    """A pattern is for programs; what a person reads is in PATTERNS."""
    found = set()

    def look(kind: mi.Type) -> None:
        if isinstance(kind, mi.StrType) and kind.pattern is not None:
            found.add(kind.pattern)
        for part in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
            look(part)
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(kind, name):
                look(getattr(kind, name))

    for kind in all_params():
        for field in fields_of(kind):
            look(field.type)
    assert found == PATTERNS.keys()
