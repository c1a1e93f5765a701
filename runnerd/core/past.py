"""What stays known of an exec once its record has gone, or its daemon. No I/O.

A Past is kept packed: 16,384 of them are a few megabytes as bytes, and ten times that as objects.
The journal keeps the same bytes, so that what one incarnation knew the next one answers.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runnerd.protocol.answers import Closed, Exit, TranscriptState


class Past(msgspec.Struct, array_like=True, kw_only=True):
    """An exec that is over, as far as it is known.

    Fields are positional when packed: new ones go last, with a default.

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
    def is_lost(self) -> bool:
        """Whether nobody saw its end."""
        return self.exit is None


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Past)


def pack_past(past: Past) -> bytes:
    """Return it as bytes."""
    return _ENCODER.encode(past)


def unpack_past(packed: bytes) -> Past:
    """Return what pack_past packed.

    Raises:
        msgspec.DecodeError: If it is not that.
    """
    return _DECODER.decode(packed)
