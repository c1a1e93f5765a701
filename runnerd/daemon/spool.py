"""What the spool does in the loop: hands batches to the disk, and blocks to readers.

A batch is handed over as soon as a transcript has enough for one and the one before it is
written. A reader that is behind memory asks for a block and is woken when it is there; many that
want the same one share one read. Whatever fails, fills up or hangs costs its transcript the part
on disk, is logged and counted, and nobody waits for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from runnerd.core.blocks import Batch, Block, BlockCache
from runnerd.core.budget import TailBudget
from runnerd.core.flow import Subscription
from runnerd.core.slots import SLOT_BYTES
from runnerd.core.transcript import Transcript

from .disk import Disk
from .poller import Poller, Timer
from .spool_file import SpoolPlace

if TYPE_CHECKING:
    from .counters import Counters
    from .log import Log

_PACE_S: Final = 0.0015
# Between two times that batches are handed over. Each costs the loop a turn with the other thread
# about the GIL, so what comes at 500 MB/s goes over in pieces of half a MiB, not of an eighth.

Wake = Callable[[Subscription], None]


class Spooler:
    """The spool of all transcripts.

    Args:
        place: The file; nothing is ever written where there is none.
        budget: Says which transcripts want to be written.
        poller: For what comes back from the disk.
        counters: spool_degraded is counted.
        log: Told of it, now and then.
        on_stray: Told of a failure of our own.
    """

    def __init__(
        self,
        place: SpoolPlace,
        budget: TailBudget,
        poller: Poller,
        *,
        counters: Counters,
        log: Log,
        on_stray: Callable[[Exception], None],
    ) -> None:
        self.place = place
        self._budget = budget
        self._poller = poller
        self._next_s = 0.0
        self._paced: Timer | None = None
        self._counters = counters
        self._log = log
        self.stray = on_stray
        self._cache = BlockCache()
        self._reading: dict[Block, dict[Subscription, Wake]] = {}
        self._can_punch = True
        self._failure: str | None = None
        budget.on_degraded = self._degraded
        if place.file is not None and place.slots is not None:
            self._file, self._slots = place.file, place.slots
            if self._file.plain_reason is not None:
                log.warning("spool_plain", reason=self._file.plain_reason)
            self._disk = Disk(poller, self, self._hung, name="spool")
            budget.on_want = self._wanted
            self._slots.on_freed = lambda: poller.defer(self, self._give_back)

    @property
    def trouble(self) -> str | None:
        """Say what is wrong with the disk: at boot, with the last batch or block, or right now."""
        if self.place.is_broken:
            return self.place.reason
        if self.place.file is not None and self._disk.is_hung:
            return "the disk does not answer"
        return self._failure

    @property
    def used_bytes(self) -> int:
        """How much of the file is taken."""
        return 0 if self.place.slots is None else self.place.slots.used * SLOT_BYTES

    # ------------------------------------------------------------------ writing

    def _wanted(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._poller.defer(self, self._hand_over)
        elif self._paced is None:
            self._paced = self._poller.call_at(self._next_s, self, self._hand_over)

    def _hand_over(self) -> None:
        self._paced = None
        self._next_s = time.monotonic() + _PACE_S
        wanting = self._budget.wanting
        while wanting:
            transcript = next(iter(wanting))
            del wanting[transcript]
            if not transcript.wants_writing(self._budget.tail_bytes):
                continue
            if self._disk.is_hung:
                transcript.degrade("the disk does not answer", is_readable=False)
                continue
            batch = transcript.take_batch()
            if batch is not None:
                self._disk.submit(
                    functools.partial(self._file.write, batch),
                    functools.partial(self._written, transcript, batch),
                )

    def _written(self, transcript: Transcript, batch: Batch, result: list[int] | Exception) -> None:
        self._failure = None if isinstance(result, list) else f"cannot write: {_said(result)}"
        if isinstance(result, list):
            transcript.written(batch, result)
        elif transcript.spool.batch is batch:
            transcript.degrade(f"cannot write: {_said(result)}", is_readable=True)

    def _give_back(self) -> None:
        slots = self._slots.take_freed()
        all_free = not self._slots.used
        if slots and (all_free or self._can_punch):
            self._disk.submit(
                functools.partial(self._file.give_back, slots, all_free=all_free), self._gave_back
            )

    def _gave_back(self, result: Exception | None) -> None:
        if isinstance(result, Exception) and self._can_punch:
            self._can_punch = False
            self._log.info("spool_space", reason=_said(result))

    # ------------------------------------------------------------------ reading

    def read(
        self, transcript: Transcript, block: Block, subscription: Subscription, wake: Wake
    ) -> None:
        """Read a block, and wake who wants it: it is in the cache then, or dropped."""
        readers = self._reading.get(block)
        if readers is not None:
            readers[subscription] = wake  # perhaps again: what is written meanwhile wakes it too
            return
        self._reading[block] = {subscription: wake}
        extents = transcript.spool.extents(block.start, block.used_bytes)
        self._disk.submit(
            functools.partial(self._file.read, extents, block.crc),
            functools.partial(self._was_read, transcript, block),
        )

    def _was_read(self, transcript: Transcript, block: Block, result: bytes | Exception) -> None:
        readers = self._reading.pop(block, {})
        self._failure = None if isinstance(result, bytes) else f"cannot read: {_said(result)}"
        if not block.is_dropped:
            if isinstance(result, bytes):
                self._cache.put(block, result)
            else:
                transcript.degrade(f"cannot read: {_said(result)}", is_readable=False)
        for subscription, wake in readers.items():
            wake(subscription)

    # ------------------------------------------------------------------ failures

    def _hung(self) -> None:
        for transcript in self._slots.holders():
            transcript.degrade("the disk does not answer", is_readable=False)
        reading, self._reading = self._reading, {}
        for readers in reading.values():
            for subscription, wake in readers.items():
                wake(subscription)

    def _degraded(self, transcript: Transcript) -> None:
        self._counters.spool_degraded += 1
        self._log.warning(
            "spool_degraded", exec_id=transcript.exec_id, reason=transcript.spool.reason
        )


def _said(error: Exception) -> str:
    return error.strerror or repr(error) if isinstance(error, OSError) else repr(error)
