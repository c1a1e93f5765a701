"""What stays known of an exec once its record has gone, or its daemon. No I/O.

A Past is kept packed, without the names of its fields: about 310 bytes instead of 680, so that
16,384 markers are 9 MB with their index. The journal keeps the same bytes: what one incarnation
knew the next one answers. Whoever adds a field, to Past or to anything in it, adds it last and
with a default.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from runnerd.protocol.answers import TranscriptState
from runnerd.protocol.exits import Closed, Exit, Oom, Phases, StreamCount


class Past(msgspec.Struct, kw_only=True):
    """An exec that is over, as far as it is known.

    Attributes:
        exec_id: The exec.
        number: Its number in order of acceptance, from 1; grows over incarnations.
        incarnation: The daemon start it belongs to.
        nonce: Of its start, if that was repeatable.
        digest: SHA-256 of its start's content, 32 bytes; None without a nonce.
        accepted_at: Unix seconds, for people.
        pid: The command's pid, None where it is not known to have started.
        oom_score_adj: As its start was answered.
        journaled: As its start was answered.
        exit: How it ended; None = lost with its daemon.
        closed: Once nothing of it was left.
        transcript: What became of its output.
        argv: Cut as shown; None once only the marker is kept.
        cwd: As started; None with argv.
        user: As started.
        labels: As started; None with argv.
    """

    exec_id: str
    number: int
    incarnation: str
    nonce: str | None
    digest: bytes | None
    accepted_at: float
    pid: int | None
    oom_score_adj: int | None
    journaled: bool
    exit: Exit | None
    closed: Closed | None
    transcript: TranscriptState
    argv: list[str] | None = None
    cwd: str | None = None
    user: str | None = None
    labels: dict[str, str] | None = None

    @property
    def is_record(self) -> bool:
        """Whether more than the marker is kept."""
        return self.argv is not None

    @property
    def is_lost(self) -> bool:
        """Whether nobody saw its end."""
        return self.exit is None


def _positional(kind: type[msgspec.Struct], **nested: Any) -> Any:
    """Return a twin of a struct that is packed without the names of its fields."""
    fields = [
        (field.name, nested.get(field.name, field.type))
        if field.required
        else (field.name, nested.get(field.name, field.type), field.default)
        for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(
        f"_{kind.__name__}Row", fields, array_like=True, kw_only=True, gc=False
    )


_COUNT: Final = _positional(StreamCount)
_EXIT: Final = _positional(
    Exit, oom=_positional(Oom), phases=_positional(Phases), stdout=_COUNT, stderr=_COUNT
)
_PAST: Final = _positional(Past, exit=_EXIT | None, closed=_positional(Closed) | None)
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_PAST)


def pack_past(past: Past) -> bytes:
    """Return it as bytes."""
    # Copied: what the encoder returns may sit in a block a third larger than it needs.
    return bytes(bytearray(_ENCODER.encode(msgspec.convert(past, _PAST, from_attributes=True))))


class PackedPast(NamedTuple):
    """A past that stays packed, and the little that has to be known of it at boot.

    Attributes:
        number: Its number in order of acceptance.
        exec_id: The exec.
        is_record: Whether more than the marker is kept.
        ended_at: When nothing of it was left, or else its exit, Unix seconds; None = lost.
        packed: As pack_past packed it.
    """

    number: int
    exec_id: str
    is_record: bool
    ended_at: float | None
    packed: bytes


def look_into(packed: bytes) -> PackedPast:
    """Check that bytes are a past, without unpacking it: 2 µs instead of 8 (DECISIONS.md).

    Raises:
        msgspec.DecodeError: If they are not.
    """
    row = _DECODER.decode(packed)
    ended_at = None
    if row.exit is not None:
        ended_at = row.exit.ended_at if row.closed is None else row.closed.closed_at
    return PackedPast(row.number, row.exec_id, row.argv is not None, ended_at, packed)


def unpack_past(packed: bytes) -> Past:
    """Return what pack_past packed.

    Raises:
        msgspec.DecodeError: If it is not that.
    """
    return msgspec.convert(_DECODER.decode(packed), Past, from_attributes=True)
