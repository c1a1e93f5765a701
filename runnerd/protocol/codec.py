"""Messages to payloads and back, for both encodings, without I/O.

Strict on the daemon's side (a request with an unknown field is refused by name), tolerant on the
client's (an answer with an unknown field is read without it): in a fleet the new client meets
the old image. A payload that is no message raises a RequestError and nothing else.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from .errors import ErrorBody, RequestError, invalid
from .framing import Encoding, frame

T = TypeVar("T", bound=msgspec.Struct)
RequestId = int | str

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_NAMED: Final = re.compile(r"(?:unknown|required) field `([^`]*)`")
REQUEST_ID_CHARS_MAX: Final = 256


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request, or with no id a notification, its parameters not yet decoded."""

    jsonrpc: str
    method: str
    id: int | str | None = None
    params: msgspec.Raw = msgspec.Raw()


class Incoming(msgspec.Struct):
    """What a client receives: an answer, an error or a notification."""

    method: str | None = None
    id: int | str | None = None
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: ErrorBody | None = None


class _Answer(msgspec.Struct):
    id: int | str | None
    result: object
    jsonrpc: str = "2.0"


class _Failure(msgspec.Struct):
    id: int | str | None
    error: ErrorBody
    jsonrpc: str = "2.0"


class _Call(msgspec.Struct):
    id: int | str
    method: str
    params: object
    jsonrpc: str = "2.0"


class _Note(msgspec.Struct):
    method: str
    params: object
    jsonrpc: str = "2.0"


class Codec:
    """Encode and decode the messages of one connection.

    Args:
        encoding: JSON or MessagePack.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        binary = encoding is Encoding.MSGPACK
        self._module: Any = msgspec.msgpack if binary else msgspec.json
        self._encode = self._module.Encoder().encode
        self._request = self._module.Decoder(Request)
        self._incoming = self._module.Decoder(Incoming)
        self._decoders: dict[type[msgspec.Struct], Any] = {}

    def request(self, payload: bytes) -> Request:
        """Decode a request's envelope.

        Raises:
            RequestError: parse_error where it is no object of this encoding, invalid_request
                where it is not a JSON-RPC 2.0 request.
        """
        try:
            request: Request = self._request.decode(payload)
        except msgspec.ValidationError as error:
            raise RequestError("invalid_request", _lower(str(error))) from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError("parse_error", _lower(str(error))) from error
        if request.jsonrpc != "2.0":
            raise RequestError("invalid_request", "jsonrpc must be the string 2.0")
        if isinstance(request.id, str) and len(request.id) > REQUEST_ID_CHARS_MAX:
            raise RequestError(
                "invalid_request", f"an id has at most {REQUEST_ID_CHARS_MAX} characters"
            )
        return request

    def params(self, raw: msgspec.Raw, kind: type[T]) -> T:
        """Decode parameters; absent ones are an empty object.

        Raises:
            RequestError: invalid_params naming the field at fault.
        """
        try:
            return self.decode(raw, kind)
        except msgspec.ValidationError as error:
            raise _invalid_params(str(error)) from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            field = self._surrogate_field(bytes(raw))
            if field is not None:
                raise invalid(field, "is not valid UTF-8 text (a lone surrogate)") from error
            raise invalid("params", _lower(str(error))) from error

    def decode(self, raw: msgspec.Raw, kind: type[T]) -> T:
        """Decode an answer's or notification's body, ignoring fields it does not know."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = self._module.Decoder(kind)
        body: T = decoder.decode(raw or (b"\x80" if self.encoding is Encoding.MSGPACK else b"{}"))
        return body

    def incoming(self, payload: bytes) -> Incoming:
        """Decode what a daemon sent.

        Raises:
            msgspec.DecodeError: If it is no message (ValidationError is a subclass).
        """
        message: Incoming = self._incoming.decode(payload)
        return message

    def call(self, request_id: RequestId, method: str, params: msgspec.Struct) -> bytes:
        """Encode and frame a request."""
        return self._framed(_Call(request_id, method, params))

    def answer(self, request_id: RequestId | None, result: object) -> bytes:
        """Encode and frame an answer."""
        return self._framed(_Answer(request_id, result))

    def failure(self, request_id: RequestId | None, error: RequestError) -> bytes:
        """Encode and frame an error."""
        return self._framed(_Failure(request_id, error.body()))

    def note(self, method: str, params: msgspec.Struct) -> bytes:
        """Encode and frame a notification."""
        return self._framed(_Note(method, params))

    def _framed(self, message: msgspec.Struct) -> bytes:
        return frame(self._encode(message), self.encoding)

    def _surrogate_field(self, raw: bytes) -> str | None:
        # msgspec reports an escaped lone surrogate as truncated input, without its place; the
        # standard library decodes it, so the walk below finds the field for the error.
        if self.encoding is not Encoding.JSON:
            return None
        import json  # noqa: PLC0415  # rare here, and a tenth of runnerctl's own time elsewhere

        try:
            return _find_surrogate(json.loads(raw), "")
        except (ValueError, RecursionError):
            return None


def _find_surrogate(value: object, path: str) -> str | None:
    if isinstance(value, str):
        return path if any("\ud800" <= char <= "\udfff" for char in value) else None
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        for key in value:
            if _find_surrogate(key, path or "params"):
                return path or "params"
    elif isinstance(value, list):
        items = [(f"{path}[{at}]", item) for at, item in enumerate(value)]
    for where, item in items:
        found = _find_surrogate(item, where)
        if found is not None:
            return found
    return None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text else "malformed message"


def _invalid_params(text: str) -> RequestError:
    """Turn msgspec's message into ours: the field in front, the reason behind it."""
    path = _PATH.search(text)
    reason = _lower(_PATH.sub("", text))
    named = _NAMED.search(text)
    where = path.group(1) if path else ""
    if named:
        where = f"{where}.{named.group(1)}" if where else named.group(1)
        reason = "unknown field" if "unknown" in text else "is required"
    return invalid(where or "params", reason)
