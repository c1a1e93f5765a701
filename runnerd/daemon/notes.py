"""Each thing a subscription hands out, as the notification its peer gets."""

from __future__ import annotations

from runnerd.core.blocks import Record
from runnerd.core.execs import Exec
from runnerd.core.flow import Gap, Subscription, Terminal
from runnerd.core.transcript import STREAMS
from runnerd.protocol.codec import Codec
from runnerd.protocol.notes import ClosedNote, ExitedNote, GapNote, HeartbeatNote, OutputNote


def item_note(
    codec: Codec, subscription: Subscription, its_exec: Exec, item: Record | Gap | Terminal
) -> bytearray:
    """Return one item of a subscription, encoded."""
    number = subscription.number
    match item:
        case Record():
            return codec.note(
                "exec.output",
                OutputNote(
                    subscription=number,
                    exec_id=its_exec.exec_id,
                    seq=item.seq,
                    stream=STREAMS[item.stream],
                    offset=item.offset,
                    data=item.data,
                ),
            )
        case Gap():
            return codec.note(
                "exec.gap",
                GapNote(
                    subscription=number,
                    exec_id=its_exec.exec_id,
                    first_seq=item.first_seq,
                    last_seq=item.last_seq,
                    stdout_bytes=item.lost_bytes[0],
                    stderr_bytes=item.lost_bytes[1],
                    stdout_offset=item.next_offsets[0],
                    stderr_offset=item.next_offsets[1],
                ),
            )
        case Terminal(what="exited"):
            assert its_exec.exit is not None
            return codec.note(
                "exec.exited",
                ExitedNote(
                    subscription=number,
                    exec_id=its_exec.exec_id,
                    seq=item.seq,
                    exit=its_exec.exit,
                ),
            )
        case _:
            assert its_exec.closed is not None
            return codec.note(
                "exec.closed",
                ClosedNote(
                    subscription=number,
                    exec_id=its_exec.exec_id,
                    seq=item.seq,
                    closed=its_exec.closed,
                ),
            )


def heartbeat_note(codec: Codec, subscription: Subscription, its_exec: Exec) -> bytearray:
    """Return that there is nothing to say, encoded."""
    return codec.note(
        "exec.heartbeat",
        HeartbeatNote(
            subscription=subscription.number,
            exec_id=its_exec.exec_id,
            last_seq=its_exec.transcript.last_seq,
            state=its_exec.state.shown,  # type: ignore[arg-type]
        ),
    )
