"""The transcripts of a page: read them, play them against a daemon, say what was different.

The notation is defined in runnerd/PROTOCOL.md, "How to read the transcripts"; the table of
placeholders there is made from PLACEHOLDERS here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from runnerd.protocol.framing import Encoding, frame
from tests.raw import ClosedError, RawClient

Message = dict[str, Any]
ANSWER_S: Final = 15.0
_BARRIER: Final = "is-there-more"
_ROUND_TRIPS: Final = 3  # a ping is answered ahead of output that is ready


def _number(least: float, most: float = float("inf")) -> Callable[[object], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most  # type: ignore[operator]


def _integer(least: int, most: float = float("inf")) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


PLACEHOLDERS: Final[dict[str, tuple[str, Callable[[object], bool]]]] = {
    "pid": ("a process id, 2 or more", _integer(2)),
    "count": ("an integer, 0 or more", _integer(0)),
    "bytes": ("a size in bytes, 0 or more", _integer(0)),
    "seconds": ("a duration in seconds, 0 or more", _number(0)),
    "ms": ("a duration in milliseconds, 0 or more", _number(0)),
    "time": ("a time in Unix seconds", _number(1e9)),
    "score": (
        "an oom_score_adj, -1000 to 1000, or null",
        lambda value: value is None or _integer(-1000, 1000)(value),
    ),
    "hex": ("16 hexadecimal digits", lambda value: bool(re.fullmatch(r"[0-9a-f]{16}", str(value)))),
    "text": ("any text", lambda value: isinstance(value, str)),
    "any": ("anything, also null", lambda _: True),
}

_IN_TEXT: Final = {"hex": "([0-9a-f]{16})", "text": "(.*)", "any": "(.*)"}  # else: a number
_NAME: Final = re.compile(f"<({'|'.join(PLACEHOLDERS)})>")
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|\.\.\.|' + _NAME.pattern)
_MARK: Final = "$placeholder"
_MORE: Final = "..."


class Different(AssertionError):  # noqa: N818 - what a reader of the failure is told
    """The daemon does not do what the page says."""


class Step(NamedTuple):
    """One line of a transcript; `line` is its number in the page."""

    what: str  # send, expect, more, nothing, closed, connect
    text: str
    line: int


class Transcript(NamedTuple):
    """One block.

    Attributes:
        name: The heading it stands under, and its number there.
        steps: What happens.
        json_only: Whether it cannot be said in MessagePack.
        options: Of a daemon of its own; None = any daemon will do.
    """

    name: str
    steps: list[Step]
    json_only: bool
    options: tuple[str, ...] | None


class Block(NamedTuple):
    """A fenced block: the words after the fence, its lines, where, and under which heading."""

    info: list[str]
    lines: list[str]
    line: int
    heading: str


def blocks(page: str) -> Iterator[Block]:
    """Find the fenced blocks of a Markdown page."""
    heading, inside = "", None
    for number, line in enumerate(page.splitlines(), 1):
        if inside is None and line.startswith("```"):
            inside = Block(line[3:].split(), [], number, heading)
        elif inside is not None and line == "```":
            yield inside
            inside = None
        elif inside is not None:
            inside.lines.append(line)
        elif line.startswith("#") and not line.startswith("####"):
            heading = line.lstrip("# ")
    assert inside is None, "a block is not closed"


def transcripts(page: str) -> list[Transcript]:
    """Read every transcript of a page."""
    found: list[Transcript] = []
    seen: dict[str, int] = {}
    for block in blocks(page):
        if block.info[:1] != ["transcript"]:
            continue
        seen[block.heading] = seen.get(block.heading, 0) + 1
        words = block.info[1:]
        options = tuple(word for word in words if word not in ("json", "alone"))
        found.append(
            Transcript(
                f"{re.sub('[^a-z0-9]+', '-', block.heading.lower())}-{seen[block.heading]}",
                list(_steps(block)),
                "json" in words,
                options if options or "alone" in words else None,
            )
        )
    return found


_SAID: Final = {
    "--> (new connection)": "connect",
    "<-- (closed)": "closed",
    "<-- ...": "more",
    "<-- (nothing more)": "nothing",
}


def _steps(block: Block) -> Iterator[Step]:
    step: Step | None = None
    for number, line in enumerate(block.lines, block.line + 1):
        if step is not None and step.what == "expect" and line.startswith("    "):
            step = step._replace(text=f"{step.text} {line.strip()}")
            continue
        if step is not None:
            yield step
        step = None
        if line in _SAID:
            step = Step(_SAID[line], "", number)
        elif line.startswith("--> "):
            step = Step("send", line[4:], number)
        elif line.startswith("<-- "):
            step = Step("expect", line[4:], number)
        else:
            assert not line or line.startswith("#"), f"line {number} is no transcript: {line}"
    if step is not None:
        yield step


def pattern(text: str) -> Any:
    """Read an expected message: JSON, but for placeholders and `...`."""
    open_brackets: list[str] = []

    def plain(token: re.Match[str]) -> str:
        word = token[0]
        if word in ("{", "["):
            open_brackets.append(word)
        elif word in ("}", "]"):
            open_brackets.pop()
        elif word == _MORE:
            return f'"{_MORE}": 0' if open_brackets[-1] == "{" else f'"{_MORE}"'
        elif word.startswith("<"):
            return json.dumps({_MARK: word[1:-1]})
        return word

    return json.loads(_TOKEN.sub(plain, text))


def differences(expected: Any, value: Any, seen: dict[str, Any], at: str = "") -> list[str]:
    """Compare a value with a pattern; every place that differs, in words.

    Args:
        expected: What pattern() returned.
        value: What was received.
        seen: What placeholders stood for; added to.
        at: Where in the message this is.
    """
    if isinstance(expected, dict) and _MARK in expected:
        name = expected[_MARK]
        words, fits = PLACEHOLDERS[name]
        seen[name] = value
        return [] if fits(value) else [f"at {at}: expected {words}, got {json.dumps(value)}"]
    if isinstance(expected, dict) and isinstance(value, dict):
        return _differences_of_objects(expected, value, seen, at)
    if isinstance(expected, list) and isinstance(value, list):
        wanted = expected[:-1] if expected[-1:] == [_MORE] else expected
        if len(value) < len(wanted) or (len(value) > len(wanted) and wanted is expected):
            return [f"at {at}: expected {len(wanted)} items, got {len(value)}"]
        pairs = enumerate(zip(wanted, value, strict=False))
        return [each for n, (a, b) in pairs for each in differences(a, b, seen, f"{at}[{n}]")]
    if isinstance(expected, str) and isinstance(value, str) and _NAME.search(expected):
        texts, names = _NAME.split(expected)[::2], _NAME.findall(expected)
        parts = [_IN_TEXT.get(name, r"(\d+)") for name in names]
        regex = "".join(a + b for a, b in zip(map(re.escape, texts), [*parts, ""], strict=True))
        found = re.fullmatch(regex, value, re.DOTALL)
        if found:
            seen.update(zip(names, found.groups(), strict=True))
            return []
    elif type(expected) is type(value) and expected == value:
        return []
    return [f"at {at}: expected {json.dumps(expected)}, got {json.dumps(value)}"]


def _differences_of_objects(
    expected: dict[str, Any], value: dict[str, Any], seen: dict[str, Any], at: str
) -> list[str]:
    missing = expected.keys() - {_MORE} - value.keys()
    found = [f"at {at}: {key} is missing" for key in missing]
    if _MORE not in expected:
        found += [f"at {at}: {key} is not on the page" for key in value.keys() - expected.keys()]
    for key, wanted in expected.items():
        if key in value:
            found += differences(wanted, value[key], seen, f"{at}.{key}".lstrip("."))
    return found


class Player:
    """Plays one transcript against a daemon.

    Answers are found by their id. What concerns one subscription must come in the page's order;
    between subscriptions and answers no order is promised, and none is checked.

    Args:
        path: The daemon's socket.
        encoding: What to speak.
        page: The page's name, for messages.
    """

    def __init__(self, path: str, encoding: Encoding, page: str = "page") -> None:
        self._path = path
        self._encoding = encoding
        self._page = page
        self._client: RawClient | None = None
        self._closed = False
        self._pending: list[Message] = []
        self._seen: dict[str, Any] = {}

    def play(self, transcript: Transcript) -> None:
        """Send and compare, line by line.

        Raises:
            Different: If the daemon says something else, less or more.
        """
        steps = transcript.steps
        try:
            if steps[0].what != "connect":
                self._connect(hello='"method": "hello"' not in steps[0].text)
            for step in steps:
                self._take(step)
            if steps[-1].what != "more":
                self._check_no_more(steps[-1])
        finally:
            if self._client is not None:
                self._client.sock.close()

    def _connect(self, *, hello: bool) -> None:
        if self._client is not None:
            self._client.sock.close()
        self._pending.clear()
        self._client = RawClient(self._path, encoding=self._encoding, hello=hello)

    def _take(self, step: Step) -> None:
        if step.what == "connect":
            self._connect(hello=False)
        elif step.what == "send":
            self._send(step.text)
        elif step.what == "expect":
            self._expect(step)
        elif step.what == "nothing":
            self._check_no_more(step)
        elif step.what == "closed":
            self._expect_close(step)

    def _sock_send(self, payload: bytes) -> None:
        assert self._client is not None
        self._client.sock.sendall(payload)

    def _send(self, text: str) -> None:
        text = re.sub(f'"{_NAME.pattern}"|{_NAME.pattern}', self._value, text)
        if self._encoding is Encoding.JSON:
            self._sock_send(text.encode() + b"\n")
            return
        message = json.loads(text)
        if message["method"] == "exec.write" and "data" in message["params"]:
            message["params"]["data"] = base64.b64decode(message["params"]["data"])
        self._sock_send(frame(msgspec.msgpack.encode(message), self._encoding))

    def _value(self, placeholder: re.Match[str]) -> str:
        return json.dumps(self._seen[placeholder[1] or placeholder[2]])

    def _receive(self) -> Message:
        assert self._client is not None
        message = self._client.receive(ANSWER_S)
        return message if self._encoding is Encoding.JSON else _as_json(message)

    def _expect(self, step: Step) -> None:
        expected = pattern(step.text)
        channel = _channel(expected)
        while True:
            for message in self._pending:
                if _channel(message) == channel:
                    self._pending.remove(message)
                    self._compare(step, expected, message)
                    return
            try:
                self._pending.append(self._receive())
            except (TimeoutError, ClosedError) as error:
                why = "closed the connection" if isinstance(error, ClosedError) else "said nothing"
                raise self._different(step, [f"the daemon {why}"], self._pending) from None

    def _compare(self, step: Step, expected: Any, message: Message) -> None:
        found = differences(expected, message, self._seen)
        if found:
            raise self._different(step, found, [message])

    def _expect_close(self, step: Step) -> None:
        try:
            self._pending.append(self._receive())
        except ClosedError:
            self._closed = True
            return
        except TimeoutError:
            pass
        raise self._different(step, ["the daemon did not close the connection"], self._pending)

    def _check_no_more(self, step: Step) -> None:
        for _ in range(0 if self._closed else _ROUND_TRIPS):
            self._send(json.dumps({"jsonrpc": "2.0", "id": _BARRIER, "method": "ping"}))
            while (message := self._receive()).get("id") != _BARRIER:
                self._pending.append(message)
        if self._pending:
            raise self._different(step, ["the daemon said more than this"], self._pending)

    def _different(self, step: Step, found: list[str], received: list[Message]) -> Different:
        lines = [f"{self._page}:{step.line}: not what the daemon does ({self._encoding.value})"]
        lines += [f"  on the page <-- {step.text}"]
        lines += [f"  received    <-- {json.dumps(each)}" for each in received]
        lines += [f"  {each}" for each in found]
        return Different("\n".join(lines))


def _channel(message: Message) -> tuple[object, ...]:
    """Return what a message belongs to; only within it is there an order."""
    if "method" not in message:
        return ("answer", message.get("id"))
    number = message["params"].get("subscription")
    return ("note", message["method"]) if number is None else ("subscription", number)


def _as_json(value: Any, name: str = "") -> Any:
    """Write a MessagePack message as the JSON encoding would: bytes as base64."""
    if isinstance(value, dict):
        return {key: _as_json(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if name == "data" and isinstance(value, str):
        return f"text instead of bytes: {value}"
    return value
