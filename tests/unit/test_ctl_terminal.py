"""runnerctl's part of a terminal that is no terminal: keys that detach, screens shown again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.client.errors import Ambiguous, ClientError, RemoteError
from runnerd.ctl.detaching import DEFAULT_KEYS, DetachScanner, detach_keys
from runnerd.ctl.keys import KeyFeeder
from runnerd.ctl.main import build_parser
from runnerd.ctl.screen import Modes, without_queries
from runnerd.protocol.answers import WriteAnswer
from runnerd.protocol.errors import RequestError


@pytest.mark.parametrize("command", [["run", "--", "x"], ["attach", "x"]])
def test_both_commands_have_the_same_keys_by_default(command: list[str]) -> None:
    options = build_parser(command).parse_args(command)
    assert options.detach_keys == DEFAULT_KEYS
    assert detach_keys(DEFAULT_KEYS) == b"\x10\x11"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a", b"a"),
        ("ctrl-a", b"\x01"),
        ("ctrl-z,x,ctrl-@", b"\x1ax\0"),
        ("ctrl-[,ctrl-\\,ctrl-],ctrl-^,ctrl-_", b"\x1b\x1c\x1d\x1e\x1f"),
        ("", b""),
    ],
)
def test_dockers_notation_of_keys(text: str, keys: bytes) -> None:
    assert detach_keys(text) == keys


@pytest.mark.parametrize(
    "text", ["ctrl-", "ctrl-aa", "ctrl-1", "ctrl-A", "ab", "é", "a,", ",", "^P"]
)
def test_what_is_no_key_is_named(text: str) -> None:
    with pytest.raises(ClientError, match="is no key"):
        detach_keys(text)


def scanned(keys: bytes, *typed: bytes) -> tuple[bytes, bool]:
    scanner = DetachScanner(keys)
    passed = b""
    for each in typed:
        more, leaves = scanner.take(each)
        passed += more
        if leaves:
            return passed, True
    return passed, False


@pytest.mark.parametrize(
    ("keys", "typed", "passed", "leaves"),
    [
        (b"\x10\x11", b"ab", b"ab", False),
        (b"\x10\x11", b"a\x10", b"a", False),
        (b"\x10\x11", b"a\x10b\x11", b"a\x10b\x11", False),
        (b"\x10\x11", b"a\x10\x10\x11b", b"a\x10", True),
        (b"\x10\x11", b"\x11\x10\x11", b"\x11", True),
        (b"aab", b"aaab", b"a", True),
        (b"", b"\x10\x11", b"\x10\x11", False),
    ],
)
def test_the_keys_are_found_and_no_other_is_kept_back(
    keys: bytes, typed: bytes, passed: bytes, leaves: bool
) -> None:
    assert scanned(keys, typed) == (passed, leaves)
    assert scanned(keys, *[typed[at : at + 1] for at in range(len(typed))]) == (passed, leaves)


@given(keys=st.binary(min_size=1, max_size=4), typed=st.binary(max_size=40), cut=st.integers(0, 40))
def test_everything_before_the_keys_is_passed_on_and_nothing_else(
    keys: bytes, typed: bytes, cut: int
) -> None:
    passed, leaves = scanned(keys, typed[:cut], typed[cut:])
    if leaves:
        assert passed == typed[: typed.index(keys)]
    else:
        assert keys not in typed
        held = typed[len(passed) :]
        assert typed.startswith(passed)
        assert keys.startswith(held)
        assert len(held) < len(keys)


@pytest.mark.parametrize(
    "query",
    [
        *[b"\x1b[c", b"\x1b[0c", b"\x1b[>c", b"\x1b[>0c", b"\x1b[=c", b"\x1b[5n", b"\x1b[6n"],
        *[b"\x1b[?6n", b"\x1b[>q", b"\x1b[>0q", b"\x1b[?2026$p", b"\x1b[?u", b"\x1b[18t"],
        *[b"\x1bP+q544e\x1b\\", b"\x1bP$qm\x1b\\", b"\x1b]11;?\x07", b"\x1b]4;1;?\x1b\\"],
    ],
)
def test_what_asks_the_terminal_is_not_shown_again(query: bytes) -> None:
    assert without_queries(b"a" + query + b"z") == b"az"


@pytest.mark.parametrize(
    "shown",
    [
        *[b"\x1b[1;31m", b"\x1b[2J", b"\x1b[?25l", b"\x1b[3;4H", b"\x1b]0;title\x07", b"\x1b[q"],
        *[b"\x1b]11;#fff\x07", b"\x1b[22;0;0t", b"\x1b[2 q", b"\x1b(B"],
    ],
)
def test_what_only_draws_is_shown_again(shown: bytes) -> None:
    assert without_queries(b"a" + shown + b"z") == b"a" + shown + b"z"


@given(cut=st.integers(0, 60))
def test_the_modes_a_program_left_behind_are_undone_however_its_output_was_cut(cut: int) -> None:
    shown = b"\x1b[?1049h\x1b[?25lx\x1b[?1000;1006h\x1b[?2004h\x1b[?2004l\x1b[?12h"
    modes = Modes()
    modes.saw(shown[:cut])
    modes.saw(shown[cut:])
    undone = modes.undo()
    assert undone == b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[m"
    assert modes.undo() == b""


@pytest.mark.parametrize("shown", [b"plain", b"\x1b[?25l\x1b[?25h", b"\x1b[?12h", b"\x1b[31m"])
def test_where_nothing_is_left_behind_nothing_is_sent(shown: bytes) -> None:
    modes = Modes()
    modes.saw(shown)
    assert modes.undo() == b""


def next_keys(feeder: KeyFeeder) -> bytes:
    write = feeder.next_write()
    assert write is not None
    return write.data


def test_keys_are_appended_and_what_others_type_does_not_count() -> None:
    feeder = KeyFeeder("x")
    feeder.offer(b"ab")
    first = feeder.next_write()
    assert first is not None
    assert (first.data, first.offset, first.eof) == (b"ab", None, False)
    feeder.offer(b"cd")  # typed while the write is under way
    assert feeder.next_write() is None
    rest = feeder.rest()
    assert rest is not None
    assert rest.data == b"cd"
    feeder.answered(WriteAnswer(accepted_bytes=1000, room_bytes=1))
    assert next_keys(feeder) == b"cd"
    feeder.answered(WriteAnswer(accepted_bytes=1002, room_bytes=1))
    assert (feeder.next_write(), feeder.rest()) == (None, None)
    assert feeder.wants_data


def test_keys_that_found_no_room_are_sent_again_and_none_is_doubled() -> None:
    """A program that does not read for a minute, and then does."""
    feeder = KeyFeeder("x", 100)
    feeder.offer(b"abcdef")
    feeder.next_write()
    feeder.offer(b"gh")
    feeder.answered(WriteAnswer(accepted_bytes=102, room_bytes=0))
    assert next_keys(feeder) == b"cdefgh"
    feeder.answered(WriteAnswer(accepted_bytes=102, room_bytes=0))
    assert next_keys(feeder) == b"cdefgh"
    # Three, and nobody knows whose: ours at most, so none of the first three is sent again.
    feeder.answered(WriteAnswer(accepted_bytes=105, room_bytes=0))
    assert next_keys(feeder) == b"fgh"
    feeder.answered(WriteAnswer(accepted_bytes=1000, room_bytes=1))
    assert (feeder.next_write(), feeder.rest()) == (None, None)


def test_a_busy_daemon_is_left_alone_for_a_while_and_what_it_took_is_not_sent_again() -> None:
    feeder = KeyFeeder("x")
    feeder.offer(b"abcdef")
    feeder.next_write()
    busy = RequestError("busy", "too much waits", retry_after_s=0.5, accepted_bytes=2)
    feeder.failed(RemoteError.before_sending(busy))
    assert (feeder.is_over, feeder.pause_s, feeder.next_write()) == (False, 0.5, None)
    feeder.resume()
    assert next_keys(feeder) == b"cdef"


def test_keys_that_may_be_lost_are_not_sent_again_and_later_ones_are() -> None:
    feeder = KeyFeeder("x")
    feeder.offer(b"ab")
    feeder.next_write()
    feeder.offer(b"cd")
    feeder.failed(Ambiguous("exec.write", "x"))
    assert (feeder.error, feeder.is_over, feeder.doubtful_bytes) == (None, False, 2)
    assert next_keys(feeder) == b"cd"
    feeder.failed(ClientError("refused"))
    assert feeder.is_over
    assert feeder.error is not None


@pytest.mark.parametrize(
    ("shown", "is_in_text"),
    [
        (b"plain \x1b[31m\x1b[?25l", False),
        (b"\x1b]0;a window's ti", True),
        (b"\x1b]0;a window's title\x07", False),
        (b"\x1b]0;a window's title\x1b\\$ ", False),
        (b"\x1bPq" + b"#" * 100, True),
        (b"\x1bPq" + b"#" * 100 + b"\x1b\\", False),
        (b"\x1b]0;one\x07$ \x1b]0;an", True),
    ],
)
def test_a_bell_is_not_put_into_the_middle_of_a_text(shown: bytes, is_in_text: bool) -> None:
    for cut in range(len(shown)):
        modes = Modes()
        modes.saw(shown[:cut])
        modes.saw(shown[cut:])
        assert modes.is_in_text is is_in_text, cut
    modes = Modes()
    for at in range(len(shown)):
        modes.saw(shown[at : at + 1])
    assert modes.is_in_text is is_in_text
