"""Who reads an exec's output, how far they are, and when the command has to wait. No I/O.

A Subscription is a cursor into a transcript. It hands out the next thing to send; what it has
handed out counts as sent. With a window, output sent and not acknowledged is bounded; exited,
closed and gaps ignore the window.

A Gate decides whether an exec's pipes may be read. Under `drop` always. Under `block` the
daemon stops reading before anything would have to be dropped that the blocking subscriber has
not been sent and, with a window, acknowledged. A reader with a name comes back: the wait is kept
for that name alone, and without a window what the daemon has written counts only once the peer
has read it from its socket.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal, NamedTuple

from runnerd.protocol.errors import RequestError

from .blocks import HEADER, Block, Record
from .bounds import CHUNK_BYTES, RECORD_COST_BYTES, UNACKED_RECORDS_MAX
from .transcript import STREAMS, StreamName, Transcript

_TAIL_RECORDS: Final = 4


def chunk_bytes(tail_bytes: int) -> int:
    """Return the most to read at once while a tail may cost `tail_bytes`.

    A tail smaller than one record would drop each at its own arrival, before any reader had a
    turn: with hundreds of execs live, one that writes fast would be nothing but gaps.
    """
    return max(1, min(CHUNK_BYTES, tail_bytes // _TAIL_RECORDS))


class Gap(NamedTuple):
    """Records lost to a subscriber; bytes are None where it alone knows where it stood."""

    first_seq: int
    last_seq: int
    lost_bytes: tuple[int | None, int | None]
    next_offsets: tuple[int, int]


class Terminal(NamedTuple):
    """The record `exited` or `closed` is next."""

    what: Literal["exited", "closed"]
    seq: int


class Subscription:
    """One reader of one exec.

    Args:
        number: The subscription's number on its connection.
        transcript: What it reads.
        streams: Which streams it is sent.
        after: The sequence it has, or "tail".
        begins_at: It is sent no record that begins before so many bytes of output, both streams
            together; see Transcript.tail.
        window_bytes: The most output sent and not acknowledged, or None.
        subscriber: The name under which this reader comes back, or None.

    Attributes:
        over: Whether nothing more is sent: `closed` was, or a newer one took its place.
        quiet_since_s: When something was last sent; the edges set it.

    Raises:
        RequestError: cursor_invalid where `after` lies beyond the last record.
    """

    def __init__(
        self,
        number: int,
        transcript: Transcript,
        *,
        streams: list[StreamName],
        after: int | Literal["tail"] = 0,
        begins_at: int = 0,
        window_bytes: int | None = None,
        subscriber: str | None = None,
    ) -> None:
        last = transcript.last_seq
        if isinstance(after, int) and after > last:
            raise RequestError(
                "cursor_invalid", f"after: {after} is beyond the last sequence, {last}"
            )
        self.number = number
        self.transcript = transcript
        self.subscriber = subscriber
        self.over = False
        self.quiet_since_s = 0.0
        # Not `last`: whoever comes after the exit is told it too.
        self.cursor_seq = transcript.last_output_seq if after == "tail" else after
        self._begins_at = begins_at
        self._streams = frozenset(STREAMS.index(stream) for stream in streams)
        self._window_bytes = window_bytes
        self._needs_acks = window_bytes is not None
        self._unacked: deque[tuple[int, int]] = deque()
        self._unacked_bytes = 0
        self._block: Block | None = None  # where on disk it reads, and how far it got there
        self._position = 0
        self._refused_size = 0  # of the record the window had no room for
        self._offsets = self._known_offsets()

    def _known_offsets(self) -> list[int | None]:
        if self.cursor_seq == 0:
            return [0, 0]
        if self.cursor_seq + 1 < self.transcript.mem_first_seq:
            return [None, None]  # lost, or on disk: known once its block is read
        offsets: list[int | None] = list(self.transcript.total_bytes)
        seen: set[int] = set()
        seq = self.cursor_seq
        while len(seen) < len(STREAMS):
            record = self.transcript.record_after(seq)
            if record is None:
                break
            if record.stream not in seen:
                seen.add(record.stream)
                offsets[record.stream] = record.offset
            seq = record.seq
        return offsets

    @property
    def released_seq(self) -> int:
        """Up to where a blocking subscriber allows dropping: it needs nothing before that again.

        Records it was never to be sent (the other stream's) count as taken once passed: nobody
        acknowledges them, and a command that writes only those would wait for good.
        """
        return self._unacked[0][0] - 1 if self._unacked else self.cursor_seq

    def next_item(self) -> Record | Gap | Terminal | Block | None:
        """Hand out what comes next, or None where there is nothing or the window is full.

        A block is no item: it has to be read from disk first; then ask again.
        """
        transcript = self.transcript
        while self.cursor_seq < transcript.last_output_seq:
            if self.cursor_seq + 1 < transcript.first_seq:
                gap = self._pass_gap()
                if gap is not None:
                    return gap
                continue
            record = self._next_record()
            if not isinstance(record, Record):
                return record
            if record.stream not in self._streams:
                self.cursor_seq = record.seq
            elif self._fits(len(record.data)):
                return self._hand_out(record)
            else:
                self._refused_size = len(record.data)
                return None
        return self._next_terminal()

    def _hand_out(self, record: Record) -> Record:
        self._refused_size = 0
        self.cursor_seq = record.seq
        self._offsets[record.stream] = record.offset + len(record.data)
        if self._needs_acks:
            self._unacked.append((record.seq, len(record.data)))
            self._unacked_bytes += len(record.data)
        return record

    def _next_record(self) -> Record | Block | None:
        """Return the record after the cursor, or the block it is in where that has to be read."""
        transcript = self.transcript
        if self.cursor_seq + 1 >= transcript.mem_first_seq:
            return transcript.record_after(self.cursor_seq)
        if not self._fits(self._refused_size):
            return None  # nothing is read from disk for a window that is still shut
        block = transcript.spool.block_with(self.cursor_seq + 1)
        data = block.data
        if data is None:
            return block
        if self._block is not block:
            self._block, self._position = block, 0
            known = zip(self._offsets, block.start_offsets, strict=True)
            self._offsets = [start if offset is None else offset for offset, start in known]
        while self._position < len(data):
            seq, offset, size, stream = HEADER.unpack_from(data, self._position)
            begin = self._position + HEADER.size
            if seq > self.cursor_seq:
                assert seq == self.cursor_seq + 1, "a block with a hole"
                if sum(at or 0 for at in self._offsets) >= self._begins_at:
                    return Record(seq, stream, offset, data[begin : begin + size], 0)
                self.cursor_seq = seq
            self._position = begin + size
            self._offsets[stream] = offset + size
        return block  # read before this record was added to it

    def _fits(self, size: int) -> bool:
        # A window smaller than one chunk still lets one through, or it would stall for good. A
        # huge one of tiny records is bounded by their number: each costs memory here.
        window = self._window_bytes
        if window is None:
            return True
        if len(self._unacked) >= UNACKED_RECORDS_MAX:
            return False
        return not self._unacked_bytes or self._unacked_bytes + size <= window

    def _pass_gap(self) -> Gap | None:
        transcript = self.transcript
        first, last = self.cursor_seq + 1, transcript.first_seq - 1
        offsets = transcript.first_offsets()
        lost: list[int | None] = [0, 0]
        for stream in self._streams:
            known = self._offsets[stream]
            lost[stream] = None if known is None else offsets[stream] - known
            self._offsets[stream] = offsets[stream]
        self.cursor_seq = last
        if lost == [0, 0]:
            return None  # only the stream it does not want has lost something
        return Gap(first, last, (lost[0], lost[1]), offsets)

    def _next_terminal(self) -> Terminal | None:
        transcript = self.transcript
        if transcript.exited_seq and self.cursor_seq < transcript.exited_seq:
            self.cursor_seq = transcript.exited_seq
            return Terminal("exited", transcript.exited_seq)
        if transcript.closed_seq and not self.over:
            self.cursor_seq = transcript.closed_seq
            self.over = True
            return Terminal("closed", transcript.closed_seq)
        return None

    @property
    def counts_arrivals(self) -> bool:
        """Whether the edges are to acknowledge for it what its peer has read; see Gate."""
        return self._needs_acks and self._window_bytes is None

    def count_arrivals(self) -> None:
        """From now on what is sent counts as needed until it is acknowledged, window or not."""
        self._needs_acks = True

    def ack(self, seq: int) -> None:
        """Take an acknowledgement, cumulative; a lower one than before changes nothing.

        Raises:
            RequestError: cursor_invalid where `seq` was never sent.
        """
        if seq > self.cursor_seq:
            raise RequestError(
                "cursor_invalid", f"seq: {seq} was not sent yet; {self.cursor_seq} was"
            )
        while self._unacked and self._unacked[0][0] <= seq:
            self._unacked_bytes -= self._unacked.popleft()[1]


class Gate:
    """Whether an exec's pipes may be read.

    Args:
        flow: block or drop.
        hold_s: How long a lost blocking subscriber is waited for.
        now_s: Monotonic; a blocking exec nobody is attached to yet is held from here on.
        subscriber: The name that is waited for from the start; None = whoever comes first.

    Attributes:
        holder: The subscription the command waits for, None while that is lost or yet to come.
        subscriber: The only name that may take the wait over, or None: anybody may.
        spills: Whether what the subscriber has not taken may go beyond memory, onto the disk. A
            reader that takes what comes is served from memory, at the pace of a pipe; one that
            is lost, or takes nothing for a moment, does not hold the command while there is room.
    """

    def __init__(
        self,
        flow: Literal["block", "drop"],
        hold_s: float,
        now_s: float,
        subscriber: str | None = None,
    ) -> None:
        self.flow = flow
        self.subscriber = subscriber if flow == "block" else None
        self.holder: Subscription | None = None
        self._hold_s = hold_s
        self._lost_seq = 0
        self.spills = False
        self.held_until_s: float | None = now_s + hold_s if flow == "block" else None

    def taken_by(self, subscription: Subscription) -> None:
        """Make a subscription the one the command waits for, if the wait is free and its own."""
        name = self.subscriber
        if self.flow == "block" and self.holder is None and name in (None, subscription.subscriber):
            self.holder = subscription
            self.subscriber = subscription.subscriber
            self.held_until_s = None
            if subscription.subscriber is not None:
                subscription.count_arrivals()
            # At once: it may stand further back than the one before it, and another exec's
            # output can make this transcript shrink before its own pipes are read again.
            position, transcript = subscription.released_seq, subscription.transcript
            transcript.protected_seq = position
            self.spills = position + 1 < transcript.mem_first_seq

    def lost(self, subscription: Subscription, now_s: float) -> None:
        """Its connection is gone: hold the wait for a while."""
        if subscription is self.holder:
            self._lost_seq = subscription.released_seq
            self.holder = None
            self.spills = True
            self.held_until_s = now_s + self._hold_s

    def left(self, subscription: Subscription) -> None:
        """It detached on purpose: nobody is waited for any more."""
        if subscription is self.holder:
            self.open_for_good()

    def open_for_good(self) -> None:
        """From now on it is `drop`."""
        self.flow = "drop"
        self.holder = self.subscriber = None
        self.held_until_s = None

    @property
    def position(self) -> int:
        """Up to where the subscriber has taken everything."""
        return self._lost_seq if self.holder is None else self.holder.released_seq

    def may_read(self, transcript: Transcript, tail_bytes: int) -> bool:
        """Say whether one more chunk can be taken without dropping what is waited for.

        Args:
            transcript: The exec's; its protected_seq is set.
            tail_bytes: What its tail may cost now.
        """
        if self.flow == "drop":
            transcript.protected_seq = None
            return True
        transcript.protected_seq = position = self.position
        cost_max = chunk_bytes(tail_bytes) + RECORD_COST_BYTES
        if transcript.fits_tail(position, cost_max, tail_bytes):
            self.spills = False
        elif not self.spills:
            return False
        return transcript.may_grow(position, cost_max, tail_bytes)
