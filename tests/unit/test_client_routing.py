"""One exec that nobody reads costs the others nothing, not even what came in the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runnerd.client.errors import OutputOverflow
from runnerd.client.pending import QUEUE_BYTES_MAX
from runnerd.client.routing import Router
from runnerd.client.session import Answer
from runnerd.protocol.answers import Empty
from runnerd.protocol.daemon_requests import Ping
from runnerd.protocol.notes import ExitedNote, OutputNote
from tests.unit.fake_daemon import make_exit
from tests.unit.scripted_peer import conversation

if TYPE_CHECKING:
    from runnerd.client.conversation import Occurrence
    from runnerd.client.routing import Record, Reply


def output(subscription: int, seq: int, size: int) -> OutputNote:
    return OutputNote(
        subscription=subscription,
        exec_id=f"x{subscription}",
        seq=seq,
        stream="stdout",
        offset=0,
        data=bytes(size),
    )


def test_what_came_behind_an_overflow_is_handed_out_before_it_is_raised() -> None:
    router = Router(conversation(), lambda: None)
    records: list[Record] = []
    replies: list[Reply] = []
    router.follow(3, records.append)
    asked = router.request("ping", Ping(), replies.append)
    exited = ExitedNote(subscription=3, exec_id="x3", seq=2, exit=make_exit("x3"))
    read: list[Occurrence] = [output(3, 1, 5), exited]
    answered = Answer(asked, "ping", Empty())
    with pytest.raises(OutputOverflow) as caught:
        router.hand_out([output(1, 1, QUEUE_BYTES_MAX + 1), *read, answered])
    assert caught.value.exec_id == "x1"
    assert records == read
    assert replies == [answered]


def test_each_exec_that_overflows_is_said() -> None:
    router = Router(conversation(), lambda: None)
    with pytest.raises(OutputOverflow, match="x1's"):
        router.hand_out([output(1, 1, QUEUE_BYTES_MAX + 1), output(2, 1, 5), output(1, 2, 5)])
    with pytest.raises(OutputOverflow, match="x2's") as caught:
        router.hand_out([output(2, 2, 5)])
    assert caught.value.last_seq == 2
    kept = [(each.subscription, each.seq) for each in router.take_events()]  # type: ignore[union-attr]
    assert kept == [(1, 1), (2, 1), (2, 2)]
    router.hand_out([output(3, 1, 5)])  # taken: there is room again
