"""Messages to payloads and back, for both encodings, without I/O.

Strict on the daemon's side (a request with an unknown field is refused by name), tolerant on the
client's (an answer with an unknown field is read without it): in a fleet the new client meets
the old image. A payload that is no message raises a RequestError and nothing else.
"""

from __future__ import annotations

import binascii
from types import ModuleType
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import msgspec

from .errors import ErrorBody, RequestError, invalid
from .framing import HEADER_BYTES, Encoding

T = TypeVar("T", bound=msgspec.Struct)
RequestId = int | str

REQUEST_ID_CHARS_MAX: Final = 256
RequestIdRange = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# JSON has no end of integers; an id beyond 64 bits could not be written in the other encoding.


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request, or with no id a notification, its parameters not yet decoded."""

    jsonrpc: str
    method: str
    id: RequestIdRange | str | None = None
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
        self._is_binary = encoding is Encoding.MSGPACK
        self._module: Any = msgspec.msgpack if self._is_binary else msgspec.json
        self._encode_into = self._module.Encoder().encode_into
        self._request = self._module.Decoder(Request)
        self._incoming = self._module.Decoder(Incoming)
        self._decoders: dict[type[msgspec.Struct], Any] = {}
        self._texts: dict[type[msgspec.Struct], Any] = {}

    def request(self, payload: bytes) -> Request:
        """Decode a request's envelope.

        Raises:
            RequestError: parse_error where it is no object of this encoding, invalid_request
                where it is not a JSON-RPC 2.0 request.
        """
        try:
            request: Request = _decoded(self._request, payload)
        except msgspec.ValidationError as error:
            raise RequestError("invalid_request", _words().envelope_reason(error)) from error
        except msgspec.DecodeError as error:
            reason = _words().unparsed_reason(error, payload)
            raise RequestError("parse_error", reason) from error
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
            params = self.decode(raw, kind)
        except msgspec.DecodeError as error:
            raise _words().refusal(error, bytes(raw), kind, self._module) from error
        if self.encoding is Encoding.JSON:
            self._check_base64(raw, params)
        return params

    def decode(self, raw: msgspec.Raw, kind: type[T]) -> T:
        """Decode an answer's or notification's body, ignoring fields it does not know.

        Raises:
            msgspec.DecodeError: If it is no such body (ValidationError is a subclass).
        """
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = self._module.Decoder(kind)
        body: T = _decoded(decoder, raw or (b"\x80" if self._is_binary else b"{}"))
        return body

    def incoming(self, payload: bytes) -> Incoming:
        """Decode what a daemon sent.

        Raises:
            msgspec.DecodeError: If it is no message (ValidationError is a subclass).
        """
        message: Incoming = _decoded(self._incoming, payload)
        return message

    def call(self, request_id: RequestId, method: str, params: msgspec.Struct) -> bytearray:
        """Encode and frame a request."""
        return self._framed(_Call(request_id, method, params))

    def answer(self, request_id: RequestId | None, result: object) -> bytearray:
        """Encode and frame an answer."""
        return self._framed(_Answer(request_id, result))

    def failure(self, request_id: RequestId | None, error: RequestError) -> bytearray:
        """Encode and frame an error."""
        return self._framed(_Failure(request_id, error.body()))

    def note(self, method: str, params: msgspec.Struct) -> bytearray:
        """Encode and frame a notification."""
        return self._framed(_Note(method, params))

    def _framed(self, message: msgspec.Struct) -> bytearray:
        # Encoded behind the room for its header: a chunk of output is copied once, not twice.
        if self.encoding is Encoding.MSGPACK:
            buffer = bytearray(HEADER_BYTES)
            self._encode_into(message, buffer, HEADER_BYTES)
            buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
        else:
            buffer = bytearray()
            self._encode_into(message, buffer)
            buffer += b"\n"
        return buffer

    def _check_base64(self, raw: msgspec.Raw, params: msgspec.Struct) -> None:
        # msgspec accepts a last character whose spare bits are set, so that many texts would mean
        # the same bytes. Only texts that end in padding have spare bits; only they are looked at.
        kind = type(params)
        texts = self._texts.get(kind)
        if texts is None:
            names = [name for name, hint in get_type_hints(kind).items() if hint is bytes]
            fields = [(name, str, "") for name in names]
            texts = self._texts[kind] = msgspec.json.Decoder(msgspec.defstruct("Texts", fields))
        for name in texts.type.__struct_fields__:
            data: bytes = getattr(params, name)
            spare = len(data) % 3
            if spare and not getattr(texts.decode(raw), name).endswith(
                binascii.b2a_base64(data[-spare:], newline=False).decode()
            ):
                raise invalid(name, "is not strict base64 (the bits after the last byte are set)")


def _decoded(decoder: Any, payload: bytes | msgspec.Raw) -> Any:
    """Decode; whatever is wrong with the bytes is a DecodeError, in every version of msgspec."""
    try:
        return decoder.decode(payload)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("invalid UTF-8 encoded string") from error


def _words() -> ModuleType:
    # Of runnerctl's own time it would be a fiftieth, and it never refuses anything.
    from . import refusal  # noqa: PLC0415

    return refusal
