"""The bytes on their way to one command's stdin. No I/O.

Rule 1: a byte is taken once. A write names where it begins; what of it was taken before is
passed over, so a write repeated after a lost answer does not feed the command twice.
Rule 2: a write that begins beyond what was taken would leave a hole: refused whole.
Rule 3: end of file is taken only together with the last byte of its write.
"""

from __future__ import annotations

from collections import deque

from runnerd.protocol.errors import RequestError


class StdinQueue:
    """What was taken for one exec's stdin and not yet written to its pipe.

    Attributes:
        accepted_bytes: Bytes taken over the exec's life.
        queued_bytes: Bytes taken and not yet written.
        eof: End of file was taken.
        is_open: Whether more can be taken: not after eof, not once the command stopped reading.
    """

    def __init__(self) -> None:
        self.accepted_bytes = 0
        self.queued_bytes = 0
        self.eof = False
        self.is_open = True
        self._chunks: deque[memoryview] = deque()

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
                stdin_offset where the write would leave a hole.
        """
        begin = self.accepted_bytes if offset is None else offset
        if begin > self.accepted_bytes:
            raise RequestError(
                "stdin_offset",
                f"offset: {begin} leaves a hole; {self.accepted_bytes} bytes were taken",
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
        if taken:
            self._chunks.append(taken)
            self.accepted_bytes += len(taken)
            self.queued_bytes += len(taken)
        rest = len(fresh) - len(taken)
        self.eof = eof and not rest
        return rest

    def head(self) -> memoryview | None:
        """Return the next bytes to write, or None."""
        return self._chunks[0] if self._chunks else None

    def wrote(self, size: int) -> None:
        """`size` bytes of head() went into the pipe."""
        self.queued_bytes -= size
        chunk = self._chunks.popleft()
        if size < len(chunk):
            self._chunks.appendleft(chunk[size:])

    def close(self) -> int:
        """The command stopped reading: throw away what is queued; returns how many bytes."""
        lost = self.queued_bytes
        self.is_open = False
        self._chunks.clear()
        self.queued_bytes = 0
        return lost
