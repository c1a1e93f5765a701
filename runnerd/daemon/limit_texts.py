"""What each limit limits, and what happens past it: the words of `runnerd serve --help`."""

from __future__ import annotations

from typing import Final

LIMIT_TEXTS: Final = {
    "frame_bytes_max": "bytes of one request or answer; a longer request is refused "
    "(frame_too_large) and its connection closed",
    "connections_max": "connections at once; one more is refused (busy)",
    "hello_s": "seconds a connection has to say hello; then it is closed",
    "stuck_reader_s": "seconds a client may take no byte while bytes wait for it; then its "
    "connection is closed, unless a command waits for it (flow block)",
    "pipelined_requests_max": "requests of one connection without an answer yet; one more is "
    "refused (busy)",
    "subscriptions_max": "subscriptions at once, over all connections; one more is refused (busy)",
    "live_execs_max": "execs not closed at once; one more start is refused (busy)",
    "stdin_queue_bytes_max": "bytes waiting for one command's stdin; a write of more waits, or is "
    "taken in part",
    "stdin_total_bytes_max": "the same over all commands; as much again may wait for room, and a "
    "write beyond that is refused (busy)",
    "tail_bytes_max": "memory for one exec's newest output; older output moves to the disk, or is "
    "dropped and announced as a gap, or the command waits (flow block)",
    "tail_bytes_min": "what that shrinks to where many execs share the total, and no further",
    "transcript_total_bytes_max": "memory for all execs' output; the oldest finished ones' goes "
    "first, then live ones shrink; starts are refused (busy) at twice as much",
    "finished_execs_max": "finished execs kept with their output; past it the oldest keep only "
    "how they ended",
    "finished_s_max": "seconds a finished exec is kept with its output; then likewise",
    "settled_execs_max": "execs of which only the end is known; past it the oldest are forgotten",
    "spool_bytes_max": "disk space for one exec's output; past it the oldest is dropped and "
    "announced as a gap",
    "spool_total_bytes_max": "disk space for all execs' output; the oldest finished ones' goes "
    "first",
    "parked_shims": "processes kept ready for starts, 50 kB each; a start that finds none waits "
    "for one, about a millisecond",
    "env_bytes_max": "bytes that env.set may lay over the boot environment; more is refused "
    "(invalid_params)",
    "incoming_total_bytes_max": "bytes of unfinished requests, over all connections; past it a "
    "connection that goes on sending is told busy and closed",
    "outgoing_bytes_max": "bytes of answers waiting for a client that does not read them; then "
    "its connection is closed",
    "outgoing_total_bytes_max": "the same over all connections; past it a client that asks on and "
    "does not read has its connection closed",
    "admit_memory_percent": "percent of the memory limit in use, above which a start is refused "
    "(busy); 0: never",
}
"""By field of Bounds."""
