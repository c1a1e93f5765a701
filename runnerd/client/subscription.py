"""What one subscription may be told next: the promises of the stream, checked.

Rule 1: sequences rise strictly; a gap stands for the sequences it names.
Rule 2: a stream's offsets are contiguous, but for the bytes a gap counts.
Rule 3: `exited` comes once, after all output; `closed` comes last. To one that begins behind the
exit only `closed` is told, and that may be the record it said it had.
Rule 4: where a stream was followed from its first byte, what came and what gaps counted add up
to the total its exit states; and where it was hashed and no gap took a part of it, its SHA-256 is
the one its exit states.
Rule 5: none of this begins anew with a new connection: a subscription that is resumed after its
last sequence goes on with the same state, so that a record told twice, or left out between two
connections, is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import DigestMismatch, ProtocolViolation

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Iterable

    from runnerd.protocol.events import EventNote
    from runnerd.protocol.notes import ClosedNote, ExitedNote, GapNote, HeartbeatNote, OutputNote


class Subscription:
    """The state of one subscription.

    Args:
        exec_id: The exec.
        streams: The streams subscribed to.
        after_seq: The sequence before the first that may come.
        from_start: Whether the first byte of each stream is the first that may come.
        hashes: Whether to hash what comes, from the first byte on.

    Attributes:
        last_seq: The last sequence told, in a record or a gap.
        gap_bytes: Bytes announced as no longer kept, both streams together, as far as known.
        has_exited: Whether the exit came.
    """

    def __init__(
        self,
        exec_id: str,
        streams: Iterable[str],
        *,
        after_seq: int,
        from_start: bool,
        hashes: bool = False,
    ) -> None:
        assert from_start or not hashes, "a digest is of a stream from its first byte"
        self.exec_id = exec_id
        self.last_seq = after_seq
        self._began_after = after_seq
        self.gap_bytes = 0
        self.has_exited = False
        self._offsets: dict[str, int | None] = dict.fromkeys(streams, 0 if from_start else None)
        self._hashes = _new_hashes(self._offsets) if hashes else {}

    @property
    def streams(self) -> list[str]:
        """The streams subscribed to."""
        return [*self._offsets]

    def output(self, note: OutputNote) -> None:
        """Check a chunk.

        Raises:
            ProtocolViolation: If it may not come now, or is not the stream's next byte.
        """
        self._advance(note.exec_id, note.seq, note.seq)
        if self.has_exited:
            raise self._violation(f"output at sequence {note.seq} after the exit")
        if note.stream not in self._offsets:
            raise self._violation(f"output of {note.stream}, which was not subscribed to")
        expected = self._offsets[note.stream]
        if expected is not None and note.offset != expected:
            raise self._violation(
                f"{note.stream} goes on at offset {note.offset} instead of {expected}"
            )
        self._offsets[note.stream] = note.offset + len(note.data)
        if note.stream in self._hashes:
            self._hashes[note.stream].update(note.data)

    def gap(self, note: GapNote) -> None:
        """Check a gap, count its bytes, and go on where it says.

        Where the daemon cannot know how much was lost, since an attach began inside it, the
        note is given the count that follows from where this subscription stood.

        Raises:
            ProtocolViolation: If it may not come now, or its bytes and offsets disagree.
        """
        if note.last_seq < note.first_seq:
            raise self._violation(f"a gap from {note.first_seq} to {note.last_seq}")
        self._advance(note.exec_id, note.first_seq, note.last_seq)
        if self.has_exited:
            raise self._violation(f"a gap at sequence {note.first_seq} after the exit")
        note.stdout_bytes = self._pass_over("stdout", note.stdout_bytes, note.stdout_offset)
        note.stderr_bytes = self._pass_over("stderr", note.stderr_bytes, note.stderr_offset)

    def _pass_over(self, stream: str, lost_bytes: int | None, offset: int) -> int | None:
        if stream not in self._offsets:
            return lost_bytes
        expected = self._offsets[stream]
        if expected is not None:
            if offset < expected or lost_bytes not in (None, offset - expected):
                raise self._violation(
                    f"a gap of {lost_bytes} bytes in {stream} from {expected} to {offset}"
                )
            lost_bytes = offset - expected
        self.gap_bytes += lost_bytes or 0
        self._offsets[stream] = offset
        if lost_bytes != 0:
            self._hashes.pop(stream, None)
        return lost_bytes

    def exited(self, note: ExitedNote) -> None:
        """Check an exit.

        Raises:
            ProtocolViolation: If it is the second, or states other totals than were seen.
            DigestMismatch: If it states another SHA-256 than what was seen has.
        """
        if self.has_exited:
            raise self._violation("a second exit")
        self._advance(note.exec_id, note.seq, note.seq)
        totals = {
            "stdout": note.exit.stdout.total_bytes,
            "stderr": note.exit.stderr.total_bytes,
        }
        for stream, seen in self._offsets.items():
            if seen is not None and seen != totals[stream]:
                raise self._violation(
                    f"the exit states {totals[stream]} bytes of {stream}; {seen} were told"
                )
        self._check_digests(note)
        self.has_exited = True

    def _check_digests(self, note: ExitedNote) -> None:
        stated = {"stdout": note.exit.stdout.sha256, "stderr": note.exit.stderr.sha256}
        for stream, seen in self._hashes.items():
            digest = stated[stream]
            if digest is not None and digest != seen.hexdigest():
                raise DigestMismatch(self.exec_id, stream, digest, seen.hexdigest())

    def heartbeat(self, note: HeartbeatNote) -> None:
        """Check a heartbeat; it moves nothing on.

        Raises:
            ProtocolViolation: If it knows of less than was told.
        """
        if note.last_seq < self.last_seq:
            raise self._violation(f"a heartbeat at sequence {note.last_seq} after {self.last_seq}")

    def closed(self, note: ClosedNote) -> None:
        """Check the end.

        Raises:
            ProtocolViolation: If no exit came before it, and none can have been missed.
        """
        if note.seq != self._began_after:
            self._advance(note.exec_id, note.seq, note.seq)
        is_only_news = self._began_after and note.seq - self._began_after <= 1
        if not self.has_exited and not is_only_news:
            raise self._violation("closed without an exit")

    def _advance(self, exec_id: str, first_seq: int, last_seq: int) -> None:
        if exec_id != self.exec_id:
            raise self._violation(f"a record of '{exec_id}'")
        if first_seq <= self.last_seq:
            raise self._violation(f"sequence {first_seq} after {self.last_seq}")
        self.last_seq = last_seq

    def _violation(self, what: str) -> ProtocolViolation:
        return ProtocolViolation(f"subscription of '{self.exec_id}': {what}")


class EventChecks:
    """What a subscription to events may be told next: none left out that is not said to be.

    Args:
        number: Of the last event before those to come.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def take(self, note: EventNote) -> None:
        """Check an event.

        Raises:
            ProtocolViolation: If it is not the next one.
        """
        step = 1
        if note.kind == "heartbeat":
            step = 0
        elif note.kind == "events_lost":
            step = note.lost or 0
        if note.number != self._number + step or (note.kind == "events_lost" and step < 1):
            raise ProtocolViolation(f"event {note.number} ({note.kind}) after event {self._number}")
        self._number = note.number


def _new_hashes(streams: Iterable[str]) -> dict[str, hashlib._Hash]:
    # Imported where it is needed: it loads OpenSSL, which a command line should not pay for.
    import hashlib  # noqa: PLC0415

    return {stream: hashlib.sha256() for stream in streams}
