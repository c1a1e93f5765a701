"""Bytes become frames, or one error; nothing else, and in bounded memory."""

import itertools
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runnerd.protocol.framing import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    Encoding,
    FrameSplitter,
    FramingError,
    frame,
)

LIMIT = 64

json_payloads = st.binary(max_size=LIMIT - 1).map(
    lambda data: b"{" + data.replace(b"\n", b"x").rstrip(b" \t\r")
)
msgpack_payloads = st.binary(max_size=LIMIT)
conversations = st.one_of(
    st.tuples(st.just(Encoding.JSON), st.lists(json_payloads)),
    st.tuples(st.just(Encoding.MSGPACK), st.lists(msgpack_payloads)),
)


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    """Split data at places, taken modulo its length; empty pieces happen and must not matter."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    for start, end in itertools.pairwise(edges):
        yield data[start:end]


def drain(splitter: FrameSplitter) -> list[bytes]:
    frames = []
    while (payload := splitter.next_frame()) is not None:
        frames.append(payload)
    return frames


def read_all(splitter: FrameSplitter, pieces: Iterator[bytes]) -> tuple[list[bytes], str | None]:
    """Return the frames, and the error that ended the stream."""
    frames: list[bytes] = []
    for piece in pieces:
        splitter.feed(piece)
        try:
            while (payload := splitter.next_frame()) is not None:
                frames.append(payload)
        except FramingError as error:
            return frames, "too large" if error.too_large else "no encoding"
        assert splitter.pending_bytes <= LIMIT + HEADER_BYTES
    return frames, None


@given(conversations, st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_how_bytes_were_split_into_reads_makes_no_difference(
    conversation: tuple[Encoding, list[bytes]], places: list[int], is_told: bool
) -> None:
    encoding, payloads = conversation
    data = b"".join(frame(payload, encoding) for payload in payloads)
    splitter = FrameSplitter(LIMIT, encoding if is_told else None)
    assert read_all(splitter, cut(data, places)) == (payloads, None)
    assert splitter.pending_bytes == 0
    assert splitter.encoding is (encoding if is_told or data else None)


@given(conversations)
def test_byte_by_byte_is_as_good_as_whole(conversation: tuple[Encoding, list[bytes]]) -> None:
    encoding, payloads = conversation
    data = b"".join(frame(payload, encoding) for payload in payloads)
    pieces = (data[at : at + 1] for at in range(len(data)))
    assert read_all(FrameSplitter(LIMIT), pieces) == (payloads, None)


garbage = st.one_of(
    st.binary(max_size=3 * LIMIT),
    st.binary(max_size=3 * LIMIT).map(b"{".__add__),
    st.binary(max_size=3 * LIMIT).map(b"\0\0\0".__add__),
)


@given(garbage, st.lists(st.integers(0, 10_000), max_size=10), st.sampled_from([None, *Encoding]))
@example(b"\xef\xbb\xbf{}\n", [], None)
@example(b"\xff\xff\xff\xff", [], Encoding.MSGPACK)
@example(b"\0\0\0\0", [], None)
@example(b"\n\n \n", [], Encoding.JSON)
def test_garbage_gives_frames_or_one_framing_error_however_it_is_split(
    data: bytes, places: list[int], encoding: Encoding | None
) -> None:
    whole = read_all(FrameSplitter(LIMIT, encoding), iter([data]))
    split = read_all(FrameSplitter(LIMIT, encoding), cut(data, places))
    assert split == whole


@pytest.mark.parametrize("first", range(256))
def test_the_first_byte_chooses_the_encoding_and_only_two_are_one(first: int) -> None:
    splitter = FrameSplitter()
    splitter.feed(bytes([first]))
    if first not in (0, ord("{")):
        with pytest.raises(FramingError, match=f"first byte 0x{first:02x} is neither") as caught:
            splitter.next_frame()
        assert not caught.value.too_large
        assert splitter.encoding is None
        return
    assert splitter.next_frame() is None
    assert splitter.encoding is (Encoding.JSON if first else Encoding.MSGPACK)


def test_a_byte_order_mark_is_no_encoding() -> None:
    splitter = FrameSplitter()
    splitter.feed(b"\xef\xbb\xbf{}\n")
    with pytest.raises(FramingError, match="0xef"):
        splitter.next_frame()


def test_no_byte_chooses_nothing() -> None:
    splitter = FrameSplitter()
    assert splitter.next_frame() is None
    splitter.feed(b"")
    assert splitter.next_frame() is None
    assert splitter.encoding is None


@pytest.mark.parametrize("limit", [1, 2, LIMIT, FRAME_BYTES_MAX])
@pytest.mark.parametrize("encoding", Encoding)
def test_a_frame_of_exactly_the_limit_passes(encoding: Encoding, limit: int) -> None:
    payload = b"{" + b"x" * (limit - 1)
    splitter = FrameSplitter(limit, encoding)
    splitter.feed(frame(payload, encoding))
    assert splitter.next_frame() == payload


@pytest.mark.parametrize("limit", [1, 2, LIMIT, FRAME_BYTES_MAX])
@pytest.mark.parametrize("encoding", Encoding)
def test_a_frame_of_one_byte_more_is_refused(encoding: Encoding, limit: int) -> None:
    splitter = FrameSplitter(limit, encoding)
    splitter.feed(frame(b"{" * (limit + 1), encoding))
    with pytest.raises(FramingError, match=f"of {limit + 1} bytes; the most is {limit}") as caught:
        splitter.next_frame()
    assert caught.value.too_large


def test_a_line_is_refused_before_its_newline_arrives() -> None:
    splitter = FrameSplitter(LIMIT)
    splitter.feed(b"{" * LIMIT)
    assert splitter.next_frame() is None
    splitter.feed(b"{")
    with pytest.raises(FramingError, match=f"{LIMIT + 1} bytes or more; the most is {LIMIT}"):
        splitter.next_frame()


def test_a_length_is_refused_before_its_payload_arrives() -> None:
    splitter = FrameSplitter(LIMIT, Encoding.MSGPACK)
    header = (LIMIT + 1).to_bytes(HEADER_BYTES, "big")
    splitter.feed(header[:-1])
    assert splitter.next_frame() is None
    splitter.feed(header[-1:])
    with pytest.raises(FramingError, match=f"frame of {LIMIT + 1} bytes; the most is {LIMIT}"):
        splitter.next_frame()


def test_a_length_is_not_judged_before_it_is_whole() -> None:
    splitter = FrameSplitter(LIMIT)
    splitter.feed(b"\0\0\xff")
    assert splitter.next_frame() is None


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x80000000, 0x01000000, FRAME_BYTES_MAX + 1])
def test_a_huge_length_is_refused_and_nothing_is_reserved_for_it(length: int) -> None:
    splitter = FrameSplitter(encoding=Encoding.MSGPACK)
    splitter.feed(length.to_bytes(HEADER_BYTES, "big"))
    with pytest.raises(FramingError, match=f"frame of {length} bytes"):
        splitter.next_frame()
    assert splitter.pending_bytes == HEADER_BYTES


def test_an_error_stays() -> None:
    """A caller that asks again is told again, and gets no frame from behind the fault."""
    for data in (b"{" * (LIMIT + 1) + b"\n{}\n", b"\0\0\0\xff" + b"\0\0\0\1x", b"x\n{}\n"):
        splitter = FrameSplitter(LIMIT)
        splitter.feed(data)
        for _ in range(3):
            with pytest.raises(FramingError):
                splitter.next_frame()


def test_a_frame_of_no_bytes_is_a_frame_in_messagepack_only() -> None:
    splitter = FrameSplitter()
    splitter.feed(b"\0\0\0\0\0\0\0\1x")
    assert drain(splitter) == [b"", b"x"]


def test_blank_lines_and_carriage_returns_are_passed_over() -> None:
    splitter = FrameSplitter()
    splitter.feed(b"{}\r\n\n \t\r\n {}\n")
    assert drain(splitter) == [b"{}", b"{}"]


def test_white_space_that_json_does_not_know_is_kept_for_the_parser_to_refuse() -> None:
    splitter = FrameSplitter(encoding=Encoding.JSON)
    splitter.feed(b"\x0b\x0c\n")
    assert drain(splitter) == [b"\x0b\x0c"]


def test_a_frame_cut_off_by_the_end_is_never_delivered() -> None:
    for data in (b'{"a":1}', b"\0\0\0\2x", b"\0\0\0"):
        splitter = FrameSplitter()
        splitter.feed(data)
        assert splitter.next_frame() is None
        assert splitter.pending_bytes == len(data)


@pytest.mark.parametrize("encoding", Encoding)
def test_a_long_connection_holds_one_read_at_most(encoding: Encoding) -> None:
    one = frame(b"{" + b"x" * 50, encoding)
    splitter = FrameSplitter(LIMIT)
    stream = one * 1000
    for at in range(0, len(stream), 37):
        splitter.feed(stream[at : at + 37])
        drain(splitter)
        assert splitter.pending_bytes <= len(one)
        assert len(splitter._buffer) <= len(one) + 37


@pytest.mark.parametrize("encoding", Encoding)
def test_what_was_large_and_is_taken_is_not_held(encoding: Encoding) -> None:
    """Of a connection that then says nothing for days, and of one that is gone."""
    large = frame(b"{" + b"x" * 1_000_000, encoding)
    splitter = FrameSplitter(2_000_000)
    splitter.feed(large)
    splitter.feed(large[:10])
    assert len(drain(splitter)) == 1
    assert sys.getsizeof(splitter._buffer) < 1000
    splitter.feed(large[10:])
    assert len(drain(splitter)) == 1
    splitter.feed(large[:-1])
    splitter.drop()
    assert splitter.pending_bytes == 0
    assert sys.getsizeof(splitter._buffer) < 1000


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_can_be_fed_and_reused(view: type) -> None:
    data = bytearray(b"{}\n")
    splitter = FrameSplitter()
    splitter.feed(view(data))
    data[:] = b"xxx"
    assert splitter.next_frame() == b"{}"
