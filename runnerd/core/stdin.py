"""The bytes on their way to one command's stdin. No I/O.

Rule 1: a byte is taken once. A write names where it begins; what of it was taken before is
passed over, so a write repeated after a lost answer does not feed the command twice.
Rule 2: a write that begins beyond what was taken would leave a hole: refused whole.
Rule 3: end of file is taken only together with the last byte of its write, and only where that
is the last byte taken.
Rule 4: what is queued costs its bytes and no more. Kept as the writes came, a byte at a time or a
few bytes of a large frame, it would hold hundreds of times what it is counted as.
"""

from __future__ import annotations

from runnerd.protocol.errors import RequestError

from .bounds import CHUNK_BYTES


class StdinQueue:
    """What was taken for one exec's stdin and not yet written to its pipe.

    Attributes:
        accepted_bytes: Bytes taken over the exec's life.
        eof: End of file was taken.
        is_open: Whether more can be taken: not after eof, not once the command stopped reading.
    """

    def __init__(self) -> None:
        self.accepted_bytes = 0
        self.eof = False
        self.is_open = True
        self._queued = bytearray()

    @property
    def queued_bytes(self) -> int:
        """Bytes taken and not yet written."""
        return len(self._queued)

    def offer(self, data: bytes, *, offset: int | None, eof: bool, room_bytes: int) -> int:
        """Take as much of a write as there is room for.

        Args:
            data: The write's bytes.
            offset: Where they begin in the stream, or None to append.
            eof: Whether end of file follows them.
            room_bytes: The most to take now.

        Returns:
            How many bytes of the write are not taken yet; eof is taken when it is 0.

        Raises:
            RequestError: stdin_closed after end of file or once the command stopped reading;
                stdin_offset where the write would leave a hole, or ends the stream before
                what was taken.
        """
        begin = self.accepted_bytes if offset is None else offset
        if begin > self.accepted_bytes:
            raise RequestError(
                "stdin_offset",
                f"offset: {begin} leaves a hole; {self.accepted_bytes} bytes were taken",
                accepted_bytes=self.accepted_bytes,
            )
        end = begin + len(data)
        if eof and end < self.accepted_bytes:
            raise RequestError(
                "stdin_offset",
                f"offset: end of file at {end}, but {self.accepted_bytes} bytes were taken",
                accepted_bytes=self.accepted_bytes,
            )
        fresh = memoryview(data)[self.accepted_bytes - begin :]
        if self.eof and not fresh:
            return 0  # the repeat of what was taken, with its end of file
        if not self.is_open or self.eof:
            raise RequestError(
                "stdin_closed",
                "stdin is closed: end of file was sent, or the command stopped reading it",
                accepted_bytes=self.accepted_bytes,
            )
        taken = fresh[: max(0, room_bytes)]
        self._queued += taken
        self.accepted_bytes += len(taken)
        rest = len(fresh) - len(taken)
        self.eof = eof and not rest
        return rest

    def head(self) -> bytearray | None:
        """Return the next bytes to write, at most 64 KiB, or None."""
        return self._queued[:CHUNK_BYTES] if self._queued else None

    def wrote(self, size: int) -> None:
        """`size` bytes of head() went into the pipe."""
        del self._queued[:size]

    def close(self) -> int:
        """The command stopped reading: throw away what is queued; returns how many bytes."""
        lost = self.queued_bytes
        self.is_open = False
        self._queued.clear()
        return lost
