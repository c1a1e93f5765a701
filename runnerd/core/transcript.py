"""The numbered records of one exec, and the budget all transcripts share. No I/O.

Rule 1: one sequence from 1 over output chunks, then `exited`, then `closed`. A sequence is never
given twice and never skipped.
Rule 2: readers are cursors into the transcript, never queues of their own: fifty cost what one
does. A reader that asks for what is no longer kept is told what it missed.
Rule 3: bytes are counted so that total = kept + dropped holds to the byte, at every moment.

What is dropped is always the oldest. `protected_seq` holds back the dropping: nothing after it
goes, since a blocking subscriber has not taken it; whoever sets it stops the reading in time
(core/flow.py), so that it cannot make a transcript grow without end.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal, NamedTuple

from .bounds import RECORD_COST_BYTES, Bounds

StreamName = Literal["stdout", "stderr"]
STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")


class Record(NamedTuple):
    """One chunk of output.

    Attributes:
        seq: Its number, from 1.
        stream: 0 = stdout, 1 = stderr.
        offset: Where it begins in its stream, in bytes.
        data: 1 to 64 KiB.
        end_cost: What all records up to and with this one cost, in bytes.
    """

    seq: int
    stream: int
    offset: int
    data: bytes
    end_cost: int


class Transcript:
    """The records of one exec.

    Args:
        budget: The budget it belongs to.
        sha256: Whether to hash each stream.
    """

    def __init__(self, budget: TailBudget, *, sha256: bool = False) -> None:
        self._budget = budget
        self._records: list[Record] = []
        self._head = 0  # index of the oldest record kept; the list is compacted now and then
        self._evicted = False
        self.first_seq = 1
        self.last_seq = 0
        self.last_output_seq = 0
        self.exited_seq = 0
        self.closed_seq = 0
        self.total_bytes = [0, 0]
        self.dropped_bytes = [0, 0]
        self.end_cost = 0
        self.start_cost = 0
        self.protected_seq: int | None = None
        self._hashes = [hashlib.sha256(), hashlib.sha256()] if sha256 else None

    @property
    def cost(self) -> int:
        """What is kept costs this many bytes of memory."""
        return self.end_cost - self.start_cost

    @property
    def state(self) -> Literal["kept", "partial", "evicted"]:
        """Whether all output is kept, some, or none because the space was needed."""
        if self._evicted:
            return "evicted"
        return "partial" if self.first_seq > 1 else "kept"

    def append(self, stream: int, data: bytes) -> int:
        """Add one chunk and drop what no longer fits.

        Args:
            stream: 0 = stdout, 1 = stderr.
            data: Not empty.

        Returns:
            The record's sequence.
        """
        assert data
        assert not self.exited_seq, "output after exited"
        self.last_seq = self.last_output_seq = self.last_seq + 1
        cost = len(data) + RECORD_COST_BYTES
        self.end_cost += cost
        offset = self.total_bytes[stream]
        self._records.append(Record(self.last_seq, stream, offset, data, self.end_cost))
        self.total_bytes[stream] = offset + len(data)
        if self._hashes is not None:
            self._hashes[stream].update(data)
        self._budget.grew(self, cost)
        return self.last_seq

    def mark_exited(self) -> int:
        """Give `exited` its number: the highest but for `closed`."""
        assert not self.exited_seq
        self.last_seq += 1
        self.exited_seq = self.last_seq
        return self.last_seq

    def mark_closed(self) -> int:
        """Give `closed` its number: the highest."""
        assert self.exited_seq
        assert not self.closed_seq
        self.last_seq += 1
        self.closed_seq = self.last_seq
        return self.last_seq

    def record_after(self, seq: int) -> Record | None:
        """Return the oldest kept record with a higher sequence, or None."""
        at = self._head + max(0, seq + 1 - self.first_seq)
        return self._records[at] if at < len(self._records) else None

    def cost_up_to(self, seq: int) -> int:
        """Return what all records up to and with `seq` cost, kept or not."""
        if seq < self.first_seq:
            return self.start_cost
        at = self._head + seq - self.first_seq
        return self._records[at].end_cost if at < len(self._records) else self.end_cost

    def first_offsets(self) -> tuple[int, int]:
        """Return where each stream's kept part begins: all dropped bytes lie before it."""
        return self.dropped_bytes[0], self.dropped_bytes[1]

    def sha256(self, stream: int) -> str | None:
        """Return the hex digest of a whole stream so far, where asked for."""
        return None if self._hashes is None else self._hashes[stream].hexdigest()

    def trim(self, cost_max: int) -> int:
        """Drop the oldest records until the rest costs at most `cost_max`.

        Returns:
            The cost freed. Less than asked where `protected_seq` forbids it.
        """
        before = self.start_cost
        limit = self.last_output_seq if self.protected_seq is None else self.protected_seq
        while self.cost > cost_max and self._head < len(self._records):
            record = self._records[self._head]
            if record.seq > limit:
                break
            self.dropped_bytes[record.stream] += len(record.data)
            self.start_cost = record.end_cost
            self.first_seq = record.seq + 1
            self._records[self._head] = _DROPPED
            self._head += 1
        if self._head > 64 and self._head * 2 > len(self._records):
            del self._records[: self._head]
            self._head = 0
        return self.start_cost - before

    def evict(self) -> int:
        """Drop everything that nobody is waited for, for space; returns the cost freed."""
        freed = self.trim(0)
        self._evicted = self._evicted or (freed > 0 and not self.cost)
        return freed


_DROPPED: Final = Record(0, 0, 0, b"", 0)


class TailBudget:
    """Keep all transcripts' tails together under one limit.

    A live tail may have its full size while few are live; with many, all live ones shrink alike.
    Finished tails use what is left, and the oldest of them go first.

    Args:
        bounds: transcript_total_bytes_max, tail_bytes_max and tail_bytes_min are used.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._live: dict[Transcript, None] = {}
        self._finished: dict[Transcript, None] = {}
        self.used_bytes = 0
        self.tail_bytes = bounds.tail_bytes_max

    def add(self, transcript: Transcript) -> None:
        """Count a new, live transcript."""
        self._live[transcript] = None
        self._share()

    def finish(self, transcript: Transcript) -> None:
        """Its exec is closed: from now on it may be evicted, after the ones closed before it."""
        self._live.pop(transcript, None)
        self._finished[transcript] = None
        self._share()

    def remove(self, transcript: Transcript) -> None:
        """Its exec is forgotten."""
        self._live.pop(transcript, None)
        self._finished.pop(transcript, None)
        self.used_bytes -= transcript.cost
        self._share()

    def grew(self, transcript: Transcript, cost: int) -> None:
        """A live transcript took a record; drop what no longer fits, there and elsewhere."""
        self.used_bytes += cost
        if transcript.cost > self.tail_bytes:
            self.used_bytes -= transcript.trim(self.tail_bytes)
        if self.used_bytes > self._bounds.transcript_total_bytes_max:
            self.relieve()

    def _share(self) -> None:
        share = self._bounds.transcript_total_bytes_max // max(1, len(self._live))
        self.tail_bytes = max(self._bounds.tail_bytes_min, min(self._bounds.tail_bytes_max, share))

    def relieve(self) -> None:
        """Drop what is over the total: finished tails, then live ones down to their share."""
        for transcript in list(self._finished):
            if self.used_bytes <= self._bounds.transcript_total_bytes_max:
                return
            self.used_bytes -= transcript.evict()
            if not transcript.cost:
                del self._finished[transcript]
        for transcript in self._live:
            if self.used_bytes <= self._bounds.transcript_total_bytes_max:
                return
            self.used_bytes -= transcript.trim(self.tail_bytes)
