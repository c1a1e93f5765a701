"""What a start asks for, in 32 bytes: how a retry is told from another command. No I/O.

The digest is SHA-256 over the canonical MessagePack of every field of exec.start but those that
say who asks and how it wants to hear (exec_id, nonce, horizon, attach): a map with sorted keys,
in which a field at its default is left out. So a default means the same written out or absent,
and a field that a later version adds changes no digest of a start that does not use it.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Final, NamedTuple

import msgspec

from runnerd.protocol.requests import ExecStart

NOT_CONTENT: Final = frozenset({"exec_id", "nonce", "horizon", "attach"})
_CHECKSUM_BYTES: Final = 4
# Of a field: only to name the one that differs once the digest has said that something does.

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DEFAULTS: Final[dict[str, object]] = {
    field.name: field.default_factory()
    if field.default_factory is not msgspec.NODEFAULT
    else field.default  # of argv NODEFAULT itself, which no value equals
    for field in msgspec.structs.fields(ExecStart)
    if field.name not in NOT_CONTENT
}


class Content(NamedTuple):
    """What one repeatable start asks for; small, whatever its environment holds.

    Attributes:
        nonce: Its sender's mark.
        digest: Of all of it, 32 bytes.
        fields: A checksum of each field in the order of exec.start, end to end.
    """

    nonce: str
    digest: bytes
    fields: bytes

    def first_difference(self, other: Content) -> str | None:
        """Return the first field, in the order of exec.start, in which two starts differ."""
        for at, name in enumerate(_DEFAULTS):
            field = slice(at * _CHECKSUM_BYTES, (at + 1) * _CHECKSUM_BYTES)
            if self.fields[field] != other.fields[field]:
                return name
        return None


def content_of(params: ExecStart) -> Content | None:
    """Return what a start asks for; None for one without a nonce, which nothing can repeat."""
    if params.nonce is None:
        return None
    encoded: dict[str, msgspec.Raw] = {}
    fields = bytearray()
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value == default:
            fields += bytes(_CHECKSUM_BYTES)
            continue
        packed = _ENCODER.encode(value)
        encoded[name] = msgspec.Raw(packed)
        fields += zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES)
    digest = hashlib.sha256(_ENCODER.encode(encoded)).digest()
    return Content(params.nonce, digest, bytes(fields))
