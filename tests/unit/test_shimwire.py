"""The shim's messages: every one is read back as it was, and nothing else is read at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.protocol.shimwire import (
    Empty,
    Ending,
    Exited,
    Failed,
    Killed,
    Killing,
    LeafRefused,
    OomAdjRefused,
    Parked,
    ShimMessage,
    ShimMessageError,
    Signalled,
    SignalledProcess,
    Started,
    Survivor,
    Survivors,
    Termed,
    end_message,
    parse_shim_message,
    signal_message,
)

NUMBER = st.integers(0, 2**63 - 1)
PID = st.integers(1, 2**22)
PROCESS = st.builds(SignalledProcess, PID, st.sampled_from("gsx"), st.sampled_from("cp"))
PROCESSES = st.lists(PROCESS, max_size=200).map(tuple)
SURVIVOR = st.builds(Survivor, PID, st.sampled_from(["D", "user", "other"]))


def processes(listed: tuple[SignalledProcess, ...]) -> str:
    return "".join(f" {p.pid}:{p.place}:{p.found}" for p in listed)


def written(message: ShimMessage) -> str:  # noqa: PLR0911, PLR0912
    """The line as the shim writes it: README.md's table, once more."""
    match message:
        case Parked(pid):
            return f"parked {pid}"
        case Failed(stage, errno, interpreter):
            return f"failed {stage} {errno}" + (" interpreter" if interpreter else "")
        case OomAdjRefused(errno):
            return f"oom-adj {errno}"
        case LeafRefused(errno=errno):
            return f"leaf {errno}"
        case Started(pid, score, at_ns):
            return f"started {pid} {'-' if score is None else score} {at_ns}"
        case Exited():
            return "exited " + " ".join(
                str(getattr(message, name)) for name in Exited.__struct_fields__
            )
        case Signalled(signum, count, errno):
            return f"signalled {signum} {count} {errno}"
        case Ending(grace_ms, leader):
            return f"ending {grace_ms} {leader}"
        case Killing():
            return "killing"
        case Termed(total, gone, listed):
            return f"termed {total} {gone}{processes(listed)}"
        case Killed(total, listed):
            return f"killed {total}{processes(listed)}"
        case Survivors(total, left):
            return f"survivors {total}" + "".join(f" {s.pid}:{s.reason}" for s in left)
        case Empty():
            return "empty"


MESSAGES: st.SearchStrategy[ShimMessage] = st.one_of(
    st.builds(Parked, PID),
    st.builds(Failed, st.sampled_from(["exec", "user", "killed"]), NUMBER, st.booleans()),
    st.builds(LeafRefused, NUMBER),
    st.builds(OomAdjRefused, NUMBER),
    st.builds(Started, PID, st.none() | st.integers(-1000, 1000), NUMBER),
    st.builds(Exited, st.sampled_from(["exit", "kill", "dump"]), *[NUMBER] * 9),
    st.builds(Signalled, NUMBER, NUMBER, NUMBER),
    st.builds(Ending, NUMBER, st.sampled_from(["gone", "default", "caught"])),
    st.just(Killing()),
    PROCESSES.flatmap(lambda p: st.builds(Termed, st.integers(len(p), 9999), NUMBER, st.just(p))),
    PROCESSES.flatmap(lambda p: st.builds(Killed, st.integers(len(p), 9999), st.just(p))),
    st.lists(SURVIVOR, max_size=200).map(lambda s: Survivors(len(s), tuple(s))),
    st.just(Empty()),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: ShimMessage) -> None:
    assert parse_shim_message(written(message).encode()) == message


@given(MESSAGES, st.data())
def test_a_changed_line_is_another_message_or_an_error(
    message: ShimMessage, data: st.DataObject
) -> None:
    """What is accepted says the same when it is written again: nothing is read loosely."""
    line = bytearray(written(message).encode())
    at = data.draw(st.integers(0, len(line)))
    line[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        read = parse_shim_message(bytes(line))
    except ShimMessageError:
        return
    assert written(read).encode() == bytes(line)


@given(st.binary(max_size=100))
def test_noise_is_an_error_and_nothing_else(data: bytes) -> None:
    try:
        parse_shim_message(data)
    except ShimMessageError:
        return
    assert data == b"empty" or b" " in data


@pytest.mark.parametrize(
    "line",
    [
        "",
        "parked",
        "parked x",
        "parked 1 2",
        "parked -1",
        "parked +1",
        "parked 1_0",
        "parked 01",
        "started 1 -0 5",
        "parked  1",
        "parked 1 ",
        "parked \u0661",
        "parked " + "9" * 21,
        "failed exec",
        "failed exec 2 loader",
        "failed EXEC 2",
        "failed 2 exec",
        "started 1 -- 5",
        "started 1 2",
        "exited stop 1 2 3 4 5 6 7 8 9",
        "exited exit 1 2 3 4 5 6 7 8",
        "exited exit 1 2 3 4 5 6 7 8 9 10",
        "termed 1",
        "termed 1 0 5:g",
        "termed 1 0 5:q:c",
        "termed 0 0 5:g:c",
        "killed 1 5:g:c:x",
        "killed",
        "survivors 1 5:alive",
        "survivors 0 5:D",
        "empty 1",
        "Empty",
        "toString",
    ],
)
def test_what_does_not_fit_is_refused(line: str) -> None:
    with pytest.raises(ShimMessageError, match="not a message of the shim"):
        parse_shim_message(line.encode())


def test_what_is_sent_to_the_shim() -> None:
    assert signal_message(15, "tree") == b"signal 15 tree"
    assert end_message(0) == b"end 0"
    assert end_message(5000) == b"end 5000"
    with pytest.raises(AssertionError):
        signal_message(65, "tree")
    with pytest.raises(AssertionError):
        end_message(-1)
