"""What is written down of a change that was asked for: who, what, and what came of it. No I/O."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from .redaction import Redaction

LINE_BYTES_MAX: Final = 64 * 1024
TEXT_CHARS_MAX: Final = 1024
ITEMS_MAX: Final = 128
AUDIT_ENTRY_BYTES: Final = 512  # an entry beside what its request had

UNANSWERED: Final = "unanswered"


class Asked(NamedTuple):
    """A change that was asked for.

    Attributes:
        at: Unix seconds.
        connection: Its number, as in the log.
        pid, uid, gid: The peer's.
        client: What it calls itself.
        fence: What its hello brought.
        method: A key of METHODS.
        params: Without stdin data; None where they could not be read.
        stdin_bytes: The length of that data, where the request has some.
        cost_bytes: What it takes while it waits, roughly.
    """

    at: float
    connection: int
    pid: int
    uid: int
    gid: int
    client: str | None
    fence: int | None
    method: str
    params: msgspec.Struct | None
    stdin_bytes: int | None
    cost_bytes: int


class Settled(NamedTuple):
    """What came of it.

    Attributes:
        asked: The change.
        result: ok, an error's kind, or UNANSWERED: the connection ended before the answer.
        exec_id: The exec concerned, where there is one.
    """

    asked: Asked
    result: str
    exec_id: str | None


def audit_line(settled: Settled, redaction: Redaction) -> bytes:
    """Return one JSON object and a newline, at most LINE_BYTES_MAX."""
    asked = settled.asked
    params = None if asked.params is None else shown_params(asked.params, redaction)
    if params is not None and asked.stdin_bytes is not None:
        params["data_bytes"] = asked.stdin_bytes
    entry: dict[str, object] = {
        "at": round(asked.at, 6),
        "connection": asked.connection,
        "pid": asked.pid,
        "uid": asked.uid,
        "gid": asked.gid,
        "client": None if asked.client is None else _utf8(redaction.text(asked.client)),
        "fence": asked.fence,
        "method": asked.method,
        "params": params,
        "exec_id": settled.exec_id,
        "result": settled.result,
    }
    line = msgspec.json.encode(entry)
    if len(line) >= LINE_BYTES_MAX:
        line = msgspec.json.encode(entry | {"params": None, "cut": True})
    return line + b"\n"


def lost_line(at: float, lost: int) -> bytes:
    """Return the line that stands for those that could not be written."""
    return msgspec.json.encode({"at": round(at, 6), "lost": lost}) + b"\n"


def shown_params(params: msgspec.Struct, redaction: Redaction) -> dict[str, Any]:
    """Return what of a request differs from its defaults, secrets hidden, lengths bounded."""
    shown: dict[str, Any] = {}
    for name, default in _defaults(type(params)).items():
        value = getattr(params, name)
        if value is None or (value == default and type(value) is type(default)):
            continue
        if name == "argv":
            shown[name] = _items(redaction.words(map(_cut, value[:ITEMS_MAX])), len(value))
        else:
            shown[name] = _shown(name, value, redaction)
    return shown


def _shown(name: str, value: Any, redaction: Redaction) -> Any:
    if isinstance(value, str):
        return _utf8(redaction.value(name, _cut(value)))
    if isinstance(value, msgspec.Struct):
        return shown_params(value, redaction)
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, dict):
        pairs = [*value.items()][:ITEMS_MAX]
        found = {_utf8(_cut(key)): _shown(key, each, redaction) for key, each in pairs}
        return found if len(value) <= ITEMS_MAX else found | {"...": len(value) - ITEMS_MAX}
    if isinstance(value, list | tuple):
        return _items([_shown(name, each, redaction) for each in value[:ITEMS_MAX]], len(value))
    return value


def _items(shown: list[Any], total: int) -> list[Any]:
    left = [] if total <= ITEMS_MAX else [f"... {total - ITEMS_MAX} more"]
    return [*map(_utf8, shown), *left] if all(isinstance(each, str) for each in shown) else shown


def _cut(text: str) -> str:
    if len(text) <= TEXT_CHARS_MAX:
        return text
    return f"{text[:TEXT_CHARS_MAX]}... {len(text) - TEXT_CHARS_MAX} more"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, object]:
    return {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in msgspec.structs.fields(kind)
    }
