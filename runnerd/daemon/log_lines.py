"""What a log line looks like: JSON for machines, or text for people. No I/O.

A line is cut to what a pipe takes whole. Fields come from commands and peers: no control character
and no bytes that are no text reach a terminal or a line's end.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

import msgspec

LINE_BYTES_MAX: Final = 4096  # with its end: PIPE_BUF on Linux, pipe(7)
_SHORT: Final = LINE_BYTES_MAX // 8

_encode = msgspec.json.Encoder(enc_hook=repr).encode


def json_line(at: dt.datetime, level: str, event: str, fields: dict[str, object]) -> bytes:
    """Return one JSON object and a newline; one that was too long says `cut`."""
    head: dict[str, object] = {
        "ts": at.isoformat(timespec="milliseconds"),
        "level": level,
        "event": event,
    }
    try:
        line = _encode(head | fields)
    except UnicodeEncodeError:  # a path that is no UTF-8
        fields = {key: _utf8(str(value)) for key, value in fields.items()}
        line = _encode(head | fields)
    if len(line) >= LINE_BYTES_MAX:
        head["cut"] = True
        line = _encode(head | {key: str(value)[:_SHORT] for key, value in fields.items()})
        if len(line) >= LINE_BYTES_MAX:
            line = _encode(head)
    return line + b"\n"


def text_line(at: dt.datetime, level: str, event: str, fields: dict[str, object]) -> bytes:
    """Return one line for people, in local time, and a traceback below it."""
    below = str(fields.get("traceback", "")).rstrip().splitlines()
    words = [f"{at.astimezone():%H:%M:%S}.{at.microsecond // 1000:03}", f"{level:7}", event]
    words += [
        f"{key}={_shown(value)}"
        for key, value in fields.items()
        if key != "traceback" and value is not None
    ]
    lines = [" ".join(words), *(f"    {_printable(each)}" for each in below)]
    data = "\n".join(lines).encode("utf-8", "replace")
    if len(data) >= LINE_BYTES_MAX:
        data = data[: LINE_BYTES_MAX - 4].decode("utf-8", "ignore").encode() + b"..."
    return data + b"\n"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else _plain(value)
    bare = text and not any(char in " \"'=\\" for char in text) and text.isprintable()
    return text if bare else '"' + _printable(text.replace("\\", r"\\").replace('"', r"\"")) + '"'


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:
        return repr(value)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
