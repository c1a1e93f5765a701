"""From the decoder's complaint to a refusal a person can act on.

msgspec says what is wrong and roughly where; it names no dictionary key, no choices and no
allowed characters, and of text that is not UTF-8 not even the field. Here the payload is walked
once more, on the error path only, for what is missing. A payload that can no longer be walked
keeps msgspec's own place and words.
"""

from __future__ import annotations

import re
import types
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from .errors import RequestError, invalid
from .fields import PATTERNS

if TYPE_CHECKING:
    from collections.abc import Iterator

UNREADABLE: Final = (msgspec.DecodeError, RecursionError, ValueError, TypeError)

_TEXT: Final = re.compile(
    r"(?P<reason>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>(?:\.\w+|\[\d+\]|\[\.\.\.\])*)`)?",
    re.DOTALL,
)
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_NAMED: Final = re.compile(
    r"Object (?:contains|missing) (unknown|required) field `(.*)`", re.DOTALL
)
_ENUM: Final = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_REGEX: Final = re.compile(r"Expected `str` matching regex (.*)", re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_WALK_BYTES_MAX: Final = 512 * 1024  # a walk of a whole frame would take the loop 0.4 s
_DEPTH_MAX: Final = 8  # no field lies deeper; a hostile payload is not followed further
_PROPER: Final = ("JSON", "MessagePack")  # what keeps its capital inside a message


def refusal(error: Exception, raw: bytes, kind: type[msgspec.Struct], module: Any) -> RequestError:
    """Make the invalid_params error for parameters that did not decode.

    Args:
        error: What the decoder raised.
        raw: The parameters as they came.
        kind: The struct they should have been.
        module: msgspec.json or msgspec.msgpack.

    Returns:
        A RequestError that names the field at fault, and in words what it should be.
    """
    if isinstance(error, msgspec.ValidationError):
        path, name, reason = _split(str(error))
        named, leaf = _walk(path, raw, kind, module)
        return invalid(_join(named, name) or "params", _words(reason, leaf))
    place = _unreadable(raw, "", module, 0) if len(raw) <= _WALK_BYTES_MAX else None
    if place is None or not place[0]:
        return invalid("params", sentence(str(error)))
    return invalid(*place)


def envelope_reason(error: Exception) -> str:
    """Return what is wrong with a request's envelope: the field in front, the reason behind."""
    path, name, reason = _split(str(error))
    where = _join(path, name)
    return f"{where}: {sentence(reason)}" if where else sentence(reason)


def unparsed_reason(error: Exception, payload: bytes) -> str:
    """Return why a payload could not be parsed, naming a lone surrogate where that is the cause.

    JSON can escape half a UTF-16 pair, and other languages' clients do so for file names that are
    not UTF-8. msgspec reports it as truncated input.
    """
    if not _SURROGATE.search(payload):
        return sentence(str(error))
    import json  # noqa: PLC0415  # rare here; of runnerctl's own time it would be a thirtieth

    try:
        place = _surrogate(json.loads(payload), "")
    except (ValueError, RecursionError):
        place = None
    return sentence(str(error)) if place is None else f"{place}: is not UTF-8 (a lone surrogate)"


def sentence(text: str) -> str:
    """Return a decoder's message in the style of ours: no capital but a name's."""
    if not text:
        return "malformed message"
    text = text.replace("got `None`", "got `null`")
    return text if text.startswith(_PROPER) else text[0].lower() + text[1:]


def _split(text: str) -> tuple[str, str | None, str]:
    """Take msgspec's message apart: a path like `.a[...][1]`, a field's name, the reason."""
    found = _TEXT.fullmatch(text)
    assert found is not None
    path = found["path"] or ""
    if found["key"]:
        return path, None, "a key is not text"
    named = _NAMED.fullmatch(found["reason"])
    if named:
        return path, named[2], "unknown field" if named[1] == "unknown" else "is required"
    return path, None, found["reason"]


def _join(path: str, name: str | None) -> str:
    where = path.removeprefix(".")
    if name is None:
        return where
    return f"{where}.{name}" if where else name


def _words(reason: str, leaf: Any) -> str:
    """Say in words what belongs at a place of this type."""
    enum, pattern = _ENUM.fullmatch(reason), _REGEX.fullmatch(reason)
    if enum:
        parts = [*_parts(leaf)]
        literals = [part for part in parts if get_origin(part) is Literal]
        choices = [str(choice) for part in literals for choice in get_args(part)]
        choices += ["a number"] if int in parts else []
        return f"{enum[1]} is none of {', '.join(choices)}" if choices else sentence(reason)
    if pattern:
        known = {repr(known): words for known, words in PATTERNS.items()}
        return known.get(pattern[1], sentence(reason))
    if reason == "Invalid base64 encoded string":
        return "is not strict base64 (A-Z a-z 0-9 + / and = padding, no white space)"
    return sentence(reason)


def _walk(path: str, raw: bytes, kind: type[msgspec.Struct], module: Any) -> tuple[str, Any]:
    """Follow a path through the payload and its type; name the keys it leaves open."""
    named, hint = "", kind
    here = raw if len(raw) <= _WALK_BYTES_MAX else b""
    for step in _STEP.finditer(path):
        hint = _inside(hint, *step.groups())
        token, here = _step(step, here, hint, module)
        named += token
    return named, hint


def _step(step: re.Match[str], raw: bytes, hint: Any, module: Any) -> tuple[str, bytes]:
    """Return the step with its key named and the payload behind it, empty if out of reach."""
    name, index = step.groups()
    try:
        if index is not None:
            return step[0], bytes(module.decode(raw, type=list[msgspec.Raw])[int(index)])
        items = module.decode(raw, type=dict[str, msgspec.Raw])
        if name is not None:
            return step[0], bytes(items[name])
        key = _failing(items, hint, module)
        return f"[{key!r}]", bytes(items[key])
    except (*UNREADABLE, LookupError):
        return step[0], b""


def _failing(items: dict[str, msgspec.Raw], hint: Any, module: Any) -> str:
    decoder = module.Decoder(hint)
    for key, item in items.items():
        try:
            decoder.decode(item)
        except UNREADABLE:
            return key
    raise LookupError


def _inside(hint: Any, name: str | None, index: str | None) -> Any:
    """Return the type one step further in."""
    for part in _parts(hint):
        args = get_args(part)
        if name is not None and isinstance(part, type) and issubclass(part, msgspec.Struct):
            return get_type_hints(part, include_extras=True).get(name)
        if index is not None and get_origin(part) is tuple:
            return args[int(index)]
        if name is None and get_origin(part) in (list, dict):
            return args[-1]
    return None


def _parts(hint: Any) -> Iterator[Any]:
    """Take unions and Annotated apart."""
    if get_origin(hint) is Annotated:
        yield from _parts(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def _unreadable(raw: bytes, path: str, module: Any, depth: int) -> tuple[str, str] | None:
    """Find the innermost value that cannot be read at all: its place, and why."""
    try:
        module.decode(raw)
    except UNREADABLE as error:
        is_text = isinstance(error, UnicodeError) or "UTF-8" in str(error)
        reason = "is not valid UTF-8 text" if is_text else sentence(str(error))
    else:
        return None
    for place, item in _items(raw, path, module) if depth < _DEPTH_MAX else ():
        inner = _unreadable(item, place, module, depth + 1)
        if inner is not None:
            return inner
    return path, reason


def _items(raw: bytes, path: str, module: Any) -> Iterator[tuple[str, bytes]]:
    try:
        items = module.decode(raw, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except UNREADABLE:
        return
    if isinstance(items, dict):
        for key, item in items.items():
            yield (f"{path}[{key!r}]" if path else key), bytes(item)
    else:
        for at, item in enumerate(items):
            yield f"{path}[{at}]", bytes(item)


def _surrogate(value: object, path: str) -> str | None:
    if isinstance(value, str):
        return path if any("\ud800" <= char <= "\udfff" for char in value) else None
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        if _surrogate("".join(value), path) is not None:
            return f"a key of {path or 'the request'}"
        inner = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{at}]", item) for at, item in enumerate(value)]
    found = (_surrogate(item, where) for where, item in inner)
    return next((place for place in found if place is not None), None)
