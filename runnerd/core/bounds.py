"""Every limit on what comes from outside, in one place; each is an option of `runnerd serve`.

A bound without a user fails a test, and so does one that nothing goes one past.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runnerd.protocol.daemon_answers import Limits
from runnerd.protocol.fields import LABELS_MAX

KIB: Final = 1024
MIB: Final = 1024 * KIB

CHUNK_BYTES: Final = 64 * KIB
# One record's most: a pipe's own capacity, pipe(7), so that one read can empty it.

RECORD_COST_BYTES: Final = 192
# What one record costs beside its bytes (object, bytes header, two ints; sys.getsizeof on
# CPython 3.11). Counted, or a command that writes byte by byte would hold 256 KiB of output in
# 40 MiB of objects.

DRAIN_S: Final = 0.5
# After the command's exit its pipes are read until EOF, at most this long. A `tee` behind a
# process substitution still delivers after 0.2 s; a background child holds the exit no longer.

START_TIMEOUT_S: Final = 5.0
END_RECEIPT_S: Final = 1.0
KILL_ROUNDS_S: Final = 1.0
STOP_DEADLINE_S: Final = 2.0
STOP_GRACE_S: Final = 1.5
STOP_FLUSH_S: Final = 1.8
NAMES_MAX: Final = 64  # of one exec's readers; of 128 characters they cost 27 kB
UNACKED_RECORDS_MAX: Final = 16384  # of one subscription with a window: 2 MB of bookkeeping
TOMBSTONE_S: Final = 900.0
TOMBSTONES_MAX: Final = 4096
HEARTBEAT_S: Final = 5.0
EVENTS_MAX: Final = 1024  # kept for readers that are slow; with the longest ids about 1 MiB
DISK_HUNG_S: Final = 5.0  # one read or write in flight for longer: the disk does not answer
JOURNAL_WAIT_S: Final = 0.05  # a start waits for the journal at most this long
FENCE_WAIT_S: Final = 1.0  # and so does a hello with a new fence: rare, and worse to forget
CLAIM_WAIT_S: Final = 1.0  # likewise a claim
PINS_MAX: Final = 16
HELLO_BYTES_MAX: Final = 64 * KIB  # of a frame, as long as nobody knows who sends it


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The limits in force. Units are in the names; see Limits in protocol/daemon_answers.py.

    Attributes:
        live_execs_max: min(1024, (hard nofile - 128) / 6): a live exec holds a control socket,
            three pipes, and room for two more.
        admit_memory_percent: A start is refused while more than this share of the memory limit is
            in use; 0 = never.
        tail_bytes_min: What a live tail shrinks to when many are live.
    """

    frame_bytes_max: int = 4 * MIB
    connections_max: int = 512
    hello_s: float = 10.0
    stuck_reader_s: float = 30.0
    pipelined_requests_max: int = 256
    subscriptions_max: int = 1024
    live_execs_max: int = 1024
    stdin_queue_bytes_max: int = 1 * MIB
    stdin_total_bytes_max: int = 16 * MIB
    tail_bytes_max: int = 256 * KIB
    tail_bytes_min: int = 16 * KIB
    transcript_total_bytes_max: int = 32 * MIB
    finished_execs_max: int = 1024
    finished_s_max: float = 3600.0
    settled_execs_max: int = 16384
    spool_bytes_max: int = 64 * MIB
    spool_total_bytes_max: int = 256 * MIB
    parked_shims: int = 3
    env_bytes_max: int = 1 * MIB
    incoming_total_bytes_max: int = 32 * MIB
    outgoing_bytes_max: int = 8 * MIB
    outgoing_total_bytes_max: int = 64 * MIB
    admit_memory_percent: int = 90


def limits_of(bounds: Bounds, *, has_spool: bool) -> Limits:
    """Return the limits as hello states them."""
    return Limits(
        frame_bytes=bounds.frame_bytes_max,
        connections=bounds.connections_max,
        hello_s=bounds.hello_s,
        stuck_reader_s=bounds.stuck_reader_s,
        pipelined_requests=bounds.pipelined_requests_max,
        subscriptions=bounds.subscriptions_max,
        live_execs=bounds.live_execs_max,
        stdin_queue_bytes=bounds.stdin_queue_bytes_max,
        stdin_total_bytes=bounds.stdin_total_bytes_max,
        tail_bytes=bounds.tail_bytes_max,
        transcript_total_bytes=bounds.transcript_total_bytes_max,
        finished_execs=bounds.finished_execs_max,
        finished_s=bounds.finished_s_max,
        settled=bounds.settled_execs_max,
        spool_bytes=bounds.spool_bytes_max if has_spool else 0,
        spool_total_bytes=bounds.spool_total_bytes_max if has_spool else 0,
        labels=LABELS_MAX,
        env_bytes=bounds.env_bytes_max,
        incoming_total_bytes=bounds.incoming_total_bytes_max,
        admit_memory_percent=bounds.admit_memory_percent,
        pins=PINS_MAX,
    )
