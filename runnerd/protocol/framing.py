"""Frames without I/O: bytes in, whole payloads out, for both encodings.

Rule 1: the first byte of a connection chooses its encoding: `{` is one JSON object a line, 0x00
is a 4-byte big-endian length and that many bytes of MessagePack. The two cannot be confused,
since a length whose first byte is not 0 would be over any frame limit.
Rule 2: how the bytes were split into reads makes no difference to the frames.
Rule 3: what cannot become a frame is an error at once, not after it has been buffered: at most
one frame and one read are ever held.
"""

from __future__ import annotations

import enum
from typing import Final

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
# A frame has to hold the largest request: argv and environment together. Linux allows them a
# quarter of the stack limit, 2 MiB by default (execve(2)); base64 adds a third.

HEADER_BYTES: Final = 4
_KEPT_BYTES: Final = 64 * 1024  # of frames taken already; more is let go of at once
_BLANK: Final = b" \t\r"  # JSON's own white space (RFC 8259, 2), no other


class Encoding(enum.Enum):
    """How messages are written on one connection."""

    JSON = "json"
    MSGPACK = "msgpack"


class FramingError(Exception):
    """The peer's bytes are no frame; the connection cannot go on.

    Attributes:
        too_large: True where a frame went over the limit, False where the first byte is none
            of the two encodings.
    """

    def __init__(self, message: str, *, too_large: bool) -> None:
        super().__init__(message)
        self.too_large = too_large


class FrameSplitter:
    """Cut a byte stream into payloads.

    Args:
        frame_bytes_max: The largest payload accepted, in bytes; may be changed between frames.
        encoding: The encoding, or None to let the first byte choose.
    """

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, encoding: Encoding | None = None
    ) -> None:
        self.encoding = encoding
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()
        self._start = 0
        self._searched = 0

    @property
    def pending_bytes(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._buffer) - self._start

    def drop(self) -> None:
        """Let go of everything held; nothing more is fed."""
        self._buffer = bytearray()
        self._start = self._searched = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Store bytes just read; next_frame parses."""
        if self._start:
            self._take_off()
        self._buffer += data

    def _take_off(self) -> None:
        del self._buffer[: self._start]
        self._searched -= self._start
        self._start = 0

    def next_frame(self) -> bytes | None:
        """Take the next complete payload off the buffer.

        Returns:
            The payload, never empty for JSON (blank lines are passed over), possibly empty for
            MessagePack; None if more bytes are needed.

        Raises:
            FramingError: If the peer announced or sent a frame over the limit, or its first
                byte is neither `{` nor 0x00.

        Source: PROTOCOL.md, "Framing".
        """
        if self.encoding is None and not self._choose():
            return None
        counted = self.encoding is Encoding.MSGPACK
        payload = self._next_counted() if counted else self._next_line()
        if payload is None and self._start > _KEPT_BYTES:
            self._take_off()  # who sent something large may be silent for days
        return payload

    def _choose(self) -> bool:
        if len(self._buffer) == self._start:
            return False
        first = self._buffer[self._start]
        if first == ord("{"):
            self.encoding = Encoding.JSON
        elif first == 0:
            self.encoding = Encoding.MSGPACK
        else:
            raise FramingError(
                f"first byte 0x{first:02x} is neither '{{' (JSON lines) nor 0x00 (MessagePack)",
                too_large=False,
            )
        return True

    def _next_counted(self) -> bytes | None:
        at = self._start
        if len(self._buffer) - at < HEADER_BYTES:
            return None
        length = int.from_bytes(self._buffer[at : at + HEADER_BYTES], "big")
        if length > self.frame_bytes_max:
            raise self._too_large(f"{length} bytes")
        end = at + HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        self._start = end
        return bytes(memoryview(self._buffer)[at + HEADER_BYTES : end])

    def _next_line(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\n", max(self._searched, self._start))
            if end < 0:
                self._searched = len(self._buffer)
                if self.pending_bytes > self.frame_bytes_max:
                    raise self._too_large(f"{self.pending_bytes} bytes or more")
                return None
            if end - self._start > self.frame_bytes_max:
                raise self._too_large(f"{end - self._start} bytes")
            line = bytes(memoryview(self._buffer)[self._start : end]).strip(_BLANK)
            self._start = self._searched = end + 1
            if line:
                return line

    def _too_large(self, size: str) -> FramingError:
        return FramingError(f"frame of {size}; the most is {self.frame_bytes_max}", too_large=True)


def frame(payload: bytes, encoding: Encoding) -> bytes:
    """Put one encoded message into its frame."""
    if encoding is Encoding.MSGPACK:
        return len(payload).to_bytes(HEADER_BYTES, "big") + payload
    return payload + b"\n"


def beside_payload_bytes(encoding: Encoding) -> int:
    """Return what a frame takes beside its payload, in bytes."""
    return HEADER_BYTES if encoding is Encoding.MSGPACK else len(b"\n")
