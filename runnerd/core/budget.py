"""The memory that all transcripts share. No I/O.

Live tails come first, finished ones use what is left. Before that runs out finished tails are
moved to the disk, the oldest first, so that what is dropped at last has had its chance to be
kept; a disk that is too slow for that is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from .bounds import Bounds
from .slots import Slots
from .transcript import Transcript


class TailBudget:
    """Keep all transcripts' tails together under one limit.

    A live tail may have its full size while few are live; with many, all live ones shrink alike.
    Finished tails use what is left; the oldest go first, to the disk where there is one.

    Args:
        bounds: transcript_total_bytes_max, tail_bytes_max and tail_bytes_min are used.
        slots: Where the spool's blocks lie, or None where there is no spool.

    Attributes:
        wanting: Transcripts with something to write, in order.
        on_want: Called when one was added to them.
        on_degraded: Called when a transcript's spool was given up.
    """

    def __init__(self, bounds: Bounds, slots: Slots | None = None) -> None:
        self._bounds = bounds
        self.slots = slots
        self.wanting: dict[Transcript, None] = {}
        self.on_want: Callable[[], None] = lambda: None
        self.on_degraded: Callable[[Transcript], None] = lambda _transcript: None
        self._live: dict[Transcript, None] = {}
        self._finished: dict[Transcript, None] = {}
        self._moving: dict[Transcript, int] = {}  # older than those, and what they are to free
        self._moving_bytes = 0
        self._owed: dict[Transcript, None] = {}  # removed, but for what a reader waits for
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
        transcript.spool.finish(transcript)
        self.want(transcript)
        self._share()
        self._move_out()

    def remove(self, transcript: Transcript) -> None:
        """Its exec is forgotten: all of it goes but what a waiting reader is still owed.

        That is counted, and keeps its slots on the disk, until the reader has taken it or is
        waited for no more: else forgetting what nobody reads would fill both without anybody
        noticing.
        """
        self._live.pop(transcript, None)
        self._finished.pop(transcript, None)
        self._moving_bytes -= self._moving.pop(transcript, 0)
        self.wanting.pop(transcript, None)
        self._owed[transcript] = None
        self._free_owed(transcript)
        self._share()

    def read_on(self, transcript: Transcript) -> None:
        """A reader of it got further, or left: more of it may be written, or let go of."""
        if transcript in self._owed:
            self._free_owed(transcript)
        else:
            self.want(transcript)

    def _free_owed(self, transcript: Transcript) -> None:
        self.used_bytes -= transcript.forget()
        if not transcript.cost and not transcript.slot_count:
            del self._owed[transcript]

    def grew(self, transcript: Transcript, cost: int) -> None:
        """A live transcript took a record; drop what no longer fits, there and elsewhere."""
        self.used_bytes += cost
        if transcript.cost > self.tail_bytes:
            self.used_bytes -= transcript.trim(self.tail_bytes)
        self.want(transcript)
        self._move_out()
        if self.is_over:
            self.relieve()
        if transcript.spool.is_on and self._lags(transcript):
            transcript.lag(self.tail_bytes)
            self.want(transcript)  # what was on its way is not any more

    @property
    def is_over(self) -> bool:
        """Whether more is used than the total: what is waited for, and not written yet."""
        return self.used_bytes > self._bounds.transcript_total_bytes_max

    def _lags(self, transcript: Transcript) -> bool:
        # Of what is waited for nothing could be let go: its command waits instead (may_grow).
        half = self._bounds.transcript_total_bytes_max // 2
        return (
            transcript.cost > self.tail_bytes
            and (transcript.cost > half or self.is_over)
            and transcript.free_cost > self.tail_bytes
        )

    def want(self, transcript: Transcript) -> None:
        """Have a batch of it written, if there is one to write."""
        if transcript not in self.wanting and transcript.wants_writing(self.tail_bytes):
            self.wanting[transcript] = None
            self.on_want()

    def settle(self, transcript: Transcript) -> None:
        """More of it may be let go of than before: something was written, or given up."""
        if transcript in self._moving:
            self.used_bytes -= transcript.trim(0)
            self._count_moving(transcript)
        elif transcript in self._live or transcript in self._finished:
            self.used_bytes -= transcript.trim(self.tail_bytes)
        else:
            return
        self.want(transcript)

    def _move_out(self) -> None:
        """Have finished tails written, the oldest first, before their memory is needed."""
        if self.slots is None:
            return
        above = self._bounds.transcript_total_bytes_max * 3 // 4
        while self._finished and self.used_bytes - self._moving_bytes > above:
            transcript = next(iter(self._finished))
            del self._finished[transcript]
            self._moving[transcript] = 0
            transcript.moves_out = True
            self.settle(transcript)

    def _count_moving(self, transcript: Transcript) -> None:
        to_free = transcript.cost if transcript.spool.is_on else 0
        self._moving_bytes += to_free - self._moving[transcript]
        self._moving[transcript] = to_free
        if not transcript.cost:
            del self._moving[transcript]

    def _share(self) -> None:
        share = self._bounds.transcript_total_bytes_max // max(1, len(self._live))
        self.tail_bytes = max(self._bounds.tail_bytes_min, min(self._bounds.tail_bytes_max, share))

    def relieve(self) -> None:
        """Drop what is over the total: finished tails, then live ones down to their share."""
        for transcript in list(self._owed):
            self._free_owed(transcript)
        for transcript in [*self._moving, *self._finished]:
            if not self.is_over:
                return
            self.used_bytes -= transcript.evict()
            if transcript in self._moving:
                self._count_moving(transcript)
            elif not transcript.cost:
                del self._finished[transcript]
        for transcript in self._live:
            if not self.is_over:
                return
            self.used_bytes -= transcript.trim(self.tail_bytes)
            self.want(transcript)
