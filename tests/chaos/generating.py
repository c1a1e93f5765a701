"""Requests made at random from the protocol's own structs, right and wrong ones, fast.

A method, or a field, that is added to METHODS is generated without a change here. What keeps a
command harmless, and the daemon serving, is in SPECIAL and WEIGHTS; everything else comes from the
types. The source of chance is passed in, so a seed tells all that follows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec
from msgspec import inspect as mi

from runnerd.protocol import daemon_requests, fields, requests
from runnerd.protocol.framing import Encoding, frame
from runnerd.protocol.requests import METHODS

Make = Callable[[Random], Any]

NAMES_MAX: Final = 6
"""Of execs in one conversation: few, so that requests meet those that exist."""
WEIGHTS: Final = {
    "hello": 0.1,
    "daemon.stop": 0.0,  # it would be obeyed
    "daemon.drain": 0.05,  # it lasts until the next undrain
    "exec.start": 0.6,
    "exec.list": 0.2,
    "daemon.info": 0.2,
    "daemon.metrics": 0.05,
}
"""How often a method comes, where that is not 1: what costs much comes less."""

_TEXT: Final = "abcXYZ019 _.:-=/\\\"'\t\n{}[]\u00e4\u20ac\U0001f600\u2028"
_NESTED: Final = json.loads("[" * 200 + "]" * 200)


def _text(chance: Random) -> str:
    return "".join(chance.choices(_TEXT, k=chance.randrange(12)))


def _pick(*values: object) -> Make:
    return lambda chance: chance.choice(values)


def _word(prefix: str, count: int) -> Make:
    return lambda chance: f"{prefix}{chance.randrange(count)}"


def _dictionary(key: Make, value: Make, most: int = 4) -> Make:
    return lambda chance: {key(chance): value(chance) for _ in range(chance.randrange(most + 1))}


def _listing(item: Make, most: int) -> Make:
    return lambda chance: [item(chance) for _ in range(chance.randrange(most + 1))]


def _limits(chance: Random) -> list[object]:
    values = sorted(int(2 ** (chance.random() * 63)) for _ in range(2))
    return ["unlimited" if value > 2**60 else value for value in values]


def _streams(chance: Random) -> list[str]:
    return chance.choice((["stdout"], ["stderr"], ["stdout", "stderr"], ["stderr", "stdout"]))


def _fence(chance: Random) -> object:
    # The highest is in force for good: one that carries less may only look from then on.
    return "current" if chance.random() < 0.98 else chance.randrange(1, 1000)


_COMMANDS: Final[tuple[list[str], ...]] = (
    ["true"],
    ["false"],
    ["sh", "-c", "exit 3"],
    ["sh", "-c", "echo out; echo err >&2"],
    ["head", "-c", "200000", "/dev/zero"],
    ["sleep", "0.05"],
    ["sleep", "1"],
    ["cat"],
    ["/nonexistent/program"],
    ["", "x"],
    [],
)
"""What a start runs: nothing that writes to a disk or outlives a cancel."""

_labels: Final = _dictionary(_word("l", 4), _text)
SPECIAL: Final[dict[tuple[type[msgspec.Struct], str], Make]] = {
    (requests.ExecStart, "argv"): lambda chance: list(chance.choice(_COMMANDS)),
    (requests.ExecStart, "env"): _dictionary(_word("V", 4), _text),
    (requests.ExecStart, "cwd"): _pick(None, "/", "/tmp", "/nonexistent", "not/absolute"),
    (requests.ExecStart, "user"): _pick(None, None, "nobody", "0", "no-such-user", "65534:65534"),
    (requests.ExecStart, "labels"): _labels,
    (requests.ExecStart, "rlimits"): _dictionary(
        lambda chance: chance.choice([*fields.RLIMITS]), _limits, 1
    ),
    (requests.Attach, "streams"): _streams,
    (requests.ExecAttach, "streams"): _streams,
    (requests.ExecList, "labels"): _labels,
    (requests.ExecSignal, "signal"): _pick("TERM", "KILL", "sigusr1", "RTMIN+1", 9, 0, 65, 19, 18),
    (requests.ExecCancel, "tombstone"): lambda chance: chance.random() < 0.1,
    (daemon_requests.EnvSet, "set"): _dictionary(_word("S", 10), _text),
    (daemon_requests.EnvSet, "unset"): _listing(_word("U", 10), 4),
    (daemon_requests.Hello, "protocol"): _pick([1], [1], [1, 2], [2], []),
    (daemon_requests.Hello, "incarnation"): _pick(None, None, None, "0123456789abcdef"),
    (daemon_requests.Hello, "fence"): _fence,
}


@functools.cache
def params_of(struct: type[msgspec.Struct]) -> Make:
    """Return what makes the parameters of one struct, as plain values; most of them valid."""
    info = mi.type_info(struct)
    assert isinstance(info, mi.StructType)
    required: list[tuple[str, Make]] = []
    optional: list[tuple[str, Make]] = []
    for field in info.fields:
        make = SPECIAL.get((struct, field.name)) or _values(field.type)
        (required if field.required else optional).append((field.encode_name, make))

    def make_all(chance: Random) -> dict[str, Any]:
        found = {name: make(chance) for name, make in required}
        if optional:
            for name, make in chance.choices(optional, k=chance.randrange(4)):
                found[name] = make(chance)
        return found

    return make_all


def _values(kind: mi.Type) -> Make:
    match kind:
        case mi.StructType(cls=cls):
            return params_of(cls)
        case mi.UnionType(types=types):
            makes = [_values(part) for part in types]
            return lambda chance: chance.choice(makes)(chance)
        case mi.ListType(item_type=item, max_length=longest):
            return _listing(_values(item), min(longest or 3, 3))
        case mi.TupleType(item_types=items):
            parts = [_values(item) for item in items]
            return lambda chance: [make(chance) for make in parts]
        case mi.DictType(key_type=key, value_type=value):
            return _dictionary(_values(key), _values(value))
        case mi.LiteralType(values=values):
            return _pick(*values)
        case _:
            return _scalars(kind)


def _scalars(kind: mi.Type) -> Make:
    match kind:
        case mi.NoneType():
            return _pick(None)
        case mi.BoolType():
            return _pick(True, False)
        case mi.IntType(ge=low, le=high):
            return _integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        case mi.FloatType():
            return _pick(0.001, 0.01, 0.05, 0.3, 1, 2.5, 1e6, 0)
        case mi.StrType(pattern=pattern):
            return _text if pattern is None else _word("e", NAMES_MAX)
        case mi.BytesType():
            return lambda chance: chance.randbytes(chance.choice((0, 1, 7, 64, 5000)))
        case _:
            return _pick(None, 1, "x")  # a type that comes later: a value at random for now


def _integers(low: int, high: int) -> Make:
    def make(chance: Random) -> int:
        if chance.random() < 0.1:
            return chance.choice((low, high))
        return min(high, max(low, 0) + int(2 ** (chance.random() * 20)) - 1)

    return make


# ---------------------------------------------------------------------------- what is wrong

_WRONG: Final[tuple[Any, ...]] = (
    None,
    -1,
    2**63,
    1e300,
    "",
    "\0",
    [],
    {},
    True,
    1.5,
    "x" * 2000,
    [{}],
    _NESTED,
)


def _spoil_params(chance: Random, params: dict[str, Any]) -> object:
    match chance.randrange(4):
        case 0 if params:
            del params[chance.choice([*params])]
        case 1:
            params[chance.choice(("nope", "", "exec_id", "argv", "seq"))] = chance.choice(_WRONG)
        case 2 if params:
            params[chance.choice([*params])] = chance.choice(_WRONG)
        case _:
            return chance.choice((None, [], 7, "x", [params]))
    return params


def _spoil_envelope(chance: Random, message: dict[str, Any]) -> object:
    match chance.randrange(6):
        case 0:
            del message[chance.choice([*message])]
        case 1:
            message["jsonrpc"] = chance.choice(("1.0", 2.0, None, "2.0\n"))
        case 2:
            message["id"] = chance.choice((1.5, [1], True, "x" * 300, {}, 2**63 - 1, "", None))
        case 3:
            message["method"] = chance.choice(("no.such", "", 7, None, "exec.start\0", "x" * 5000))
        case 4:
            message[chance.choice(("extra", "result"))] = 1
        case _:
            return chance.choice(([], [message], "x", 7, None, {}))
    return message


def _spoil_bytes(chance: Random, payload: bytes) -> bytes:
    at = chance.randrange(len(payload))
    match chance.randrange(4):
        case 0:
            return payload[:at]
        case 1:
            return payload[:at] + chance.randbytes(chance.randrange(1, 9)) + payload[at:]
        case 2:
            return (
                payload[:at] + bytes([payload[at] ^ (1 << chance.randrange(8))]) + payload[at + 1 :]
            )
        case _:
            return payload[at:] + payload[:at]


def method(chance: Random) -> str:
    """Return a method, by its weight."""
    return chance.choices(_METHODS, _METHOD_WEIGHTS)[0]


def request(
    chance: Random,
    encoding: Encoding,
    request_id: object,
    *,
    names: str,
    spoilt: float,
    bytes_too: bool,
) -> bytes:
    """Return one frame.

    Args:
        chance: What decides.
        encoding: How it is written.
        request_id: Its id.
        names: What the ids of this conversation's execs begin with.
        spoilt: How likely something is wrong with it, 0 to 1.
        bytes_too: Whether its bytes may be wrong as well: then it may carry any id.
    """
    name = method(chance)
    params = params_of(METHODS[name])(chance)
    if "exec_id" in params or name == "exec.start":
        params["exec_id"] = f"{names}{chance.randrange(NAMES_MAX)}"
    message: Any = {"jsonrpc": "2.0", "id": request_id, "method": name, "params": params}
    how = chance.random() / spoilt if spoilt else 1.0
    if how < 0.5:
        message["params"] = _spoil_params(chance, message["params"])
    elif how < 0.75:
        message = _spoil_envelope(chance, message)
    payload = encoded(encoding, message)
    if 0.75 <= how < 1.0 and bytes_too:
        payload = _spoil_bytes(chance, payload)
        if encoding is Encoding.JSON:
            payload = payload.replace(b"\n", b" ")
    return frame(payload, encoding)


def encoded(encoding: Encoding, message: object) -> bytes:
    """Write a message; bytes are base64 in JSON."""
    if encoding is Encoding.JSON:
        return _JSON.encode(message)
    return _MSGPACK.encode(message)


_JSON: Final = msgspec.json.Encoder()
_MSGPACK: Final = msgspec.msgpack.Encoder()
_METHODS: Final = [*METHODS]
_METHOD_WEIGHTS: Final = [WEIGHTS.get(name, 1.0) for name in _METHODS]
