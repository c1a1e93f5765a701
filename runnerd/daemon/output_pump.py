"""Read one exec's output into its transcript, and know when that is done.

Three times, three rules. While the command runs, pipes are read as long as its gate is open. At
its exit, what is in them then is read whatever the gate or the clock says, and more until EOF or
the end of the drain: one chunk of each whatever the gate says, the rest as it does. Once the exit
is published, leftovers are read slowly and thrown away: closed pipes would kill a server at its
next log line, full ones would stop it. A terminal is hung up then instead, once, as when its
window is closed.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Literal

from runnerd.core.bounds import CHUNK_BYTES
from runnerd.core.execs import Exec
from runnerd.core.flow import chunk_bytes

from .pipes import BigPipes, Streams, bytes_waiting
from .poller import EPOLLET, EPOLLIN, Owner, Poller, Timer
from .resting import Rests

_DISCARD_PAUSE_S = 0.05  # 64 KiB each: leftovers write 1.3 MB/s at most, at 20 wake-ups a second
_READS_MAX = 4  # of one pipe in a turn, while each finds a whole chunk
_PATIENCE_S = 0.02  # a blocking reader that took nothing for so long is not waited for
_BULK_READS = 16  # whole chunks after which a stream is a bulk one
_PIPE_BYTES_MAX = 1 << 20  # what a pipe holds at most, /proc/sys/fs/pipe-max-size
_STREAMS: tuple[Literal[0], Literal[1]] = (0, 1)


class OutputPump:
    """The reading side of one exec.

    Args:
        its_exec: Whose output; gets output().
        pipes: Whose descriptors; closed here at EOF.
        tail_bytes: Says what its tail may cost now.
        owner: Who is told of a failure.
        on_output: Called after records were added.
        on_eof: Called once both pipes are at EOF.
        big_pipes: Where a bulk stream gets a bigger pipe.
        rests: When a bulk stream is not to be read.

    Attributes:
        on_shut: Called when there is something to be read and the gate is shut: perhaps more was
            taken by now than is known.
    """

    def __init__(
        self,
        its_exec: Exec,
        pipes: Streams,
        poller: Poller,
        *,
        tail_bytes: Callable[[], int],
        owner: Owner,
        on_output: Callable[[], None],
        on_eof: Callable[[], None],
        big_pipes: BigPipes,
        rests: Rests,
    ) -> None:
        self._exec = its_exec
        self._pipes = pipes
        self._poller = poller
        self._tail_bytes = tail_bytes
        self._owner = owner
        self._on_output = on_output
        self._on_eof = on_eof
        self.on_shut: Callable[[], None] = lambda: None
        self._big_pipes = big_pipes
        self._rests = rests
        self._is_resting = [False, False]
        self._whole_chunks = [0, 0]
        self._is_big = [False, False]
        self._watching = [False, False]
        self._discarding = False
        self._nobody_has_it = False  # a terminal that no process has open, for now
        self._past_gate = [0, 0]  # bytes of each that are read though the gate is shut
        self._resume: Timer | None = None
        self._patience: Timer | None = None

    @property
    def at_eof(self) -> bool:
        """Whether nothing can come any more."""
        return self._pipes.output == [None, None]

    @property
    def is_waiting(self) -> bool:
        """Whether the gate holds the reading back."""
        return self._resume is None and any(
            fd is not None and not watched
            for fd, watched in zip(self._pipes.output, self._watching, strict=True)
        )

    def start(self) -> None:
        """Begin to read."""
        self.gate_changed()

    def gate_changed(self) -> None:
        """Watch the pipes if the gate is open; to be called whenever a reader got further."""
        if self._discarding:
            return
        is_open = self._may_read()
        for stream in _STREAMS:
            if is_open or self._past_gate[stream]:
                self._watch(stream)

    def _may_read(self) -> bool:
        gate = self._exec.gate
        if gate.may_read(self._exec.transcript, self._tail_bytes()):
            return True
        if self._patience is None and not gate.spills and self._exec.transcript.spool.is_on:
            lost_patience = functools.partial(self._lost_patience, gate.position)
            until_s = time.monotonic() + _PATIENCE_S
            self._patience = self._poller.call_at(until_s, self._owner, lost_patience)
        return False

    def _lost_patience(self, position: int) -> None:
        self._patience = None
        gate = self._exec.gate
        gate.spills = gate.spills or gate.position == position
        self.gate_changed()

    def _watch(self, stream: Literal[0, 1]) -> None:
        fd = self._pipes.output[stream]
        if fd is None or self._watching[stream] or self._is_resting[stream]:
            return
        self._watching[stream] = True
        events = EPOLLIN | EPOLLET if self._nobody_has_it else EPOLLIN
        self._poller.watch(fd, events, lambda _events: self._readable(stream), self._owner)

    def _unwatch(self, stream: int) -> None:
        fd = self._pipes.output[stream]
        if fd is not None and self._watching[stream]:
            self._watching[stream] = False
            self._poller.unwatch(fd)

    def _readable(self, stream: Literal[0, 1]) -> None:
        if self._discarding:
            self._discard(stream)
            return
        if self._whole_chunks[stream] >= _BULK_READS and self._rests_now(stream):
            return
        if self._may_read():
            for _ in range(_READS_MAX):
                if self._read(stream) < CHUNK_BYTES or not self._may_read():
                    break
        elif self._past_gate[stream]:
            self._read_past_gate(stream)
        else:
            # Unwatched, not watched for nothing: a hang-up is reported all the same.
            for each in _STREAMS:
                if not self._past_gate[each]:
                    self._unwatch(each)
            self.on_shut()
            return
        if self.at_eof:
            self._on_eof()

    def _rests_now(self, stream: Literal[0, 1]) -> bool:
        now_s = time.monotonic()
        if not self._rests.is_on(now_s):
            return False
        self._unwatch(stream)
        self._is_resting[stream] = True
        self._rests.rest(now_s, functools.partial(self._rested, stream))
        return True

    def _rested(self, stream: Literal[0, 1]) -> None:
        self._is_resting[stream] = False
        self._watch(stream)  # the gate is looked at once there is something to be read

    def _read_past_gate(self, stream: Literal[0, 1]) -> None:
        self._past_gate[stream] -= self._read(stream, self._past_gate[stream])

    def _read(self, stream: Literal[0, 1], bytes_max: int = CHUNK_BYTES) -> int:
        """Read once; returns the bytes, 0 at EOF or where nothing waits."""
        fd = self._pipes.output[stream]
        if fd is None:
            return 0
        try:
            data = self._pipes.read(fd, min(bytes_max, chunk_bytes(self._tail_bytes())))
        except BlockingIOError:
            return 0
        if not data:
            self._at_end(stream)
            return 0
        if self._nobody_has_it:
            self._nobody_has_it = False
            self._watch_anew(stream)
        self._exec.output(stream, data, time.monotonic())
        self._on_output()
        if len(data) == CHUNK_BYTES:
            self._whole_chunks[stream] += 1
            if self._whole_chunks[stream] == _BULK_READS:
                self._is_big[stream] = self._big_pipes.grow(fd)
        return len(data)

    def _at_end(self, stream: Literal[0, 1]) -> None:
        if not self._pipes.is_terminal or self._exec.status is not None:
            self._close(stream)
        elif not self._nobody_has_it:
            # Its command lives, and may open /dev/tty again; closed, it would be sent SIGHUP.
            self._nobody_has_it = True
            self._watch_anew(stream)

    def _watch_anew(self, stream: Literal[0, 1]) -> None:
        if self._watching[stream]:
            self._unwatch(stream)
            self._watch(stream)

    def _close(self, stream: int) -> None:
        fd = self._pipes.output[stream]
        if fd is not None:
            self._unwatch(stream)
            self._pipes.output[stream] = None
            os.close(fd)
            self._big_pipes.given -= self._is_big[stream]

    def drain(self) -> bool:
        """Read all that is in the pipes now, whatever the gate says.

        A command with CAP_SYS_RESOURCE can make a pipe of gigabytes. Those would all be read here,
        at one go, and kept: what is beyond a pipe's usual size is read as the gate says.

        Returns:
            Whether both are at EOF; else go on until on_eof or the drain's end.
        """
        for stream in _STREAMS:
            fd = self._pipes.output[stream]
            if fd is None:
                continue
            rest = min(self._pipes.waiting_bytes(fd), _PIPE_BYTES_MAX)
            while rest > 0:
                size = self._read(stream)
                if not size:
                    break
                rest -= size
            self._past_gate[stream] = CHUNK_BYTES
            if rest <= 0:
                self._read_past_gate(stream)  # most often EOF, which spares the wait for it
        if not self.at_eof:
            self.gate_changed()
        return self.at_eof

    def discard(self) -> None:
        """From now on throw away what comes; it is counted. A terminal is hung up."""
        self._discarding = True
        if self._pipes.is_terminal:
            self._hang_up()
            return
        for stream in _STREAMS:
            self._watch(stream)

    def _hang_up(self) -> None:
        fd = self._pipes.output[0]
        rest = 0 if fd is None else self._pipes.waiting_bytes(fd)
        while rest > 0 and (size := self._read(0)):  # what leftovers wrote last is counted too
            rest -= size
        self.close()

    def _discard(self, stream: Literal[0, 1]) -> None:
        self._read(stream)
        self._unwatch(0)
        self._unwatch(1)
        if not self.at_eof and self._resume is None:
            self._resume = self._poller.call_at(
                time.monotonic() + _DISCARD_PAUSE_S, self._owner, self._resumed
            )

    def _resumed(self) -> None:
        self._resume = None
        for stream in _STREAMS:
            self._watch(stream)

    def close(self) -> None:
        """Close what is open; nothing is called any more."""
        for timer in (self._resume, self._patience):
            if timer is not None:
                timer.cancel()
        for stream in _STREAMS:
            self._close(stream)

    def bytes_left(self) -> int:
        """Return how many bytes nobody has read."""
        return sum(bytes_waiting(fd) for fd in self._pipes.output if fd is not None)

    def links(self) -> set[str]:
        """Return what /proc/PID/fd shows of those who could still write what is read here."""
        return {self._pipes.link(fd) for fd in self._pipes.output if fd is not None}
