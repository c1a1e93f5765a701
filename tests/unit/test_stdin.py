"""A byte of stdin is delivered once, in its place, however often it is sent."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.core.bounds import CHUNK_BYTES
from runnerd.core.stdin import StdinQueue
from runnerd.protocol.errors import RequestError

PLENTY = 10**9


def content(size: int) -> bytes:
    """Bytes that no shift maps onto themselves within the tests' lengths."""
    return bytes((at * 37 + at // 251) % 256 for at in range(size))


def refusal(queue: StdinQueue, data: bytes, offset: int | None, *, eof: bool) -> RequestError:
    with pytest.raises(RequestError) as caught:
        queue.offer(data, offset=offset, eof=eof, room_bytes=PLENTY)
    return caught.value


def write_out(queue: StdinQueue, size: int) -> bytes:
    """Take up to `size` bytes of what is queued, as a pipe with that much room would."""
    wrote = bytes((queue.head() or b"")[:size])
    if wrote:
        queue.wrote(len(wrote))
    return wrote


writes = st.tuples(
    st.integers(0, 60),  # how far before what was taken it begins
    st.integers(0, 80),  # its length
    st.integers(0, 50),  # the room there is
    st.integers(0, 50),  # what the pipe takes afterwards
    st.booleans(),  # whether it says eof where it reaches the end
)


@given(st.integers(0, 300), st.lists(writes, max_size=40))
def test_any_mix_of_repeats_overlaps_and_partial_writes_delivers_each_byte_once(
    size: int, mix: list[tuple[int, int, int, int, bool]]
) -> None:
    whole = content(size)
    queue, delivered = StdinQueue(), b""
    for back, length, room, takes, says_eof in mix:
        begin = max(0, queue.accepted_bytes - back)
        data = whole[begin : begin + length]
        end = begin + len(data)
        eof = says_eof and end == size
        taken_before = queue.accepted_bytes
        rest = queue.offer(data, offset=begin, eof=eof, room_bytes=room)
        fresh = max(0, end - taken_before)
        assert queue.accepted_bytes == taken_before + min(fresh, room)
        assert rest == fresh - min(fresh, room)
        if eof:
            assert queue.eof == (queue.accepted_bytes == size)
        delivered += write_out(queue, takes)
        assert delivered == whole[: len(delivered)]
        assert queue.accepted_bytes == len(delivered) + queue.queued_bytes
    queue.offer(
        whole[queue.accepted_bytes :], offset=queue.accepted_bytes, eof=True, room_bytes=PLENTY
    )
    assert queue.eof
    while queue.head() is not None:
        delivered += write_out(queue, 7)
    assert delivered == whole


def test_a_write_without_an_offset_is_appended() -> None:
    queue = StdinQueue()
    for data in (b"ab", b"", b"cd"):
        assert queue.offer(data, offset=None, eof=False, room_bytes=PLENTY) == 0
    assert write_out(queue, 10) == b"abcd"


@pytest.mark.parametrize("eof", [False, True])
def test_a_write_that_would_leave_a_hole_is_refused_whole(eof: bool) -> None:
    queue = StdinQueue()
    queue.offer(b"abc", offset=0, eof=False, room_bytes=PLENTY)
    error = refusal(queue, b"efg", 4, eof=eof)
    assert error.kind == "stdin_offset"
    assert error.data.accepted_bytes == 3
    assert (queue.accepted_bytes, queue.queued_bytes, queue.eof) == (3, 3, False)
    assert queue.offer(b"def", offset=3, eof=False, room_bytes=PLENTY) == 0


def test_end_of_file_is_taken_only_with_the_last_byte_of_its_write() -> None:
    queue = StdinQueue()
    assert queue.offer(b"abcd", offset=0, eof=True, room_bytes=3) == 1
    assert not queue.eof
    assert queue.offer(b"d", offset=3, eof=True, room_bytes=0) == 1
    assert not queue.eof
    assert queue.offer(b"d", offset=3, eof=True, room_bytes=1) == 0
    assert queue.eof


def test_an_end_of_file_before_what_was_taken_is_refused() -> None:
    """Taken as it stands it would end the stream elsewhere than its sender says."""
    queue = StdinQueue()
    queue.offer(b"abcdef", offset=0, eof=False, room_bytes=PLENTY)
    error = refusal(queue, b"abc", 0, eof=True)
    assert error.kind == "stdin_offset"
    assert error.data.accepted_bytes == 6
    assert not queue.eof
    assert queue.offer(b"", offset=6, eof=True, room_bytes=0) == 0
    assert queue.eof


def test_after_end_of_file_a_repeat_is_answered_and_more_is_refused() -> None:
    queue = StdinQueue()
    queue.offer(b"abc", offset=0, eof=True, room_bytes=PLENTY)
    for begin in range(4):
        repeat = b"abc"[begin:]
        assert queue.offer(repeat, offset=begin, eof=True, room_bytes=PLENTY) == 0
    for offset in (None, 3, 1):
        error = refusal(queue, b"bcd", offset, eof=False)
        assert error.kind == "stdin_closed"
        assert error.data.accepted_bytes == 3
    assert write_out(queue, 10) == b"abc"


def test_once_the_command_stopped_reading_everything_is_refused() -> None:
    queue = StdinQueue()
    queue.offer(b"abcdef", offset=0, eof=False, room_bytes=PLENTY)
    write_out(queue, 2)
    assert queue.close() == 4
    assert (queue.head(), queue.queued_bytes, queue.accepted_bytes) == (None, 0, 6)
    for data, eof in ((b"", True), (b"", False), (b"g", False)):
        assert refusal(queue, data, 6, eof=eof).kind == "stdin_closed"
    assert queue.close() == 0


def test_no_room_takes_nothing() -> None:
    queue = StdinQueue()
    for room in (0, -5):
        assert queue.offer(b"abcdefgh", offset=0, eof=False, room_bytes=room) == 8
    assert queue.accepted_bytes == queue.queued_bytes == 0
    assert queue.head() is None


def test_the_head_is_at_most_one_chunk() -> None:
    queue = StdinQueue()
    whole = content(CHUNK_BYTES * 2 + 5)
    queue.offer(whole, offset=0, eof=False, room_bytes=PLENTY)
    heads = []
    while (head := queue.head()) is not None:
        heads.append(bytes(head))
        queue.wrote(len(head))
    assert [len(each) for each in heads] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert b"".join(heads) == whole


@pytest.mark.parametrize(("size", "room", "times"), [(1, 1, 20_000), (100_000, 16, 1_250)])
def test_what_is_queued_costs_its_bytes_and_no_more(size: int, room: int, times: int) -> None:
    """Byte by byte, or a little of many large frames: 20 kB queued are about 20 kB of memory."""
    queue = StdinQueue()
    tracemalloc.start()
    try:
        for _ in range(times):
            queue.offer(bytes(size), offset=None, eof=False, room_bytes=room)
        assert queue.queued_bytes == 20_000
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * queue.queued_bytes
