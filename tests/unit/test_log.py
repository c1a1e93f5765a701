"""The log's lines, what is held back of them, and that no descriptor makes it wait."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import pty
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd.daemon.log import Log
from runnerd.daemon.log_end import _asked_first, _Socket, open_end
from runnerd.daemon.log_lines import LINE_BYTES_MAX, json_line, text_line

if TYPE_CHECKING:
    from collections.abc import Iterator

AT = dt.datetime(2026, 11, 30, 12, 34, 56, 789000, dt.UTC)
TEXT = st.text(st.characters())  # lone surrogates too: a path that is no UTF-8
VALUES = st.one_of(
    TEXT, st.binary(), st.integers(), st.floats(), st.booleans(), st.none(),
    st.lists(TEXT), st.dictionaries(st.text(), st.text()), st.builds(object),
)  # fmt: skip
NAMES = st.from_regex(r"[a-z_]{1,20}", fullmatch=True)  # ours, by the page's own test
FIELDS = st.dictionaries(NAMES, VALUES, max_size=8)


@given(FIELDS)
def test_every_json_line_is_one_object_and_fits_a_pipe(fields: dict[str, object]) -> None:
    for name in ("ts", "level", "event"):
        fields.pop(name, None)
    line = json_line(AT, "info", "e", fields)
    assert len(line) <= LINE_BYTES_MAX
    assert line.count(b"\n") == 1
    read = json.loads(line)
    assert (read["event"], read["level"], read["ts"]) == (
        "e",
        "info",
        "2026-11-30T12:34:56.789+00:00",
    )


@given(FIELDS, st.text(max_size=6000))
def test_every_text_line_is_printable_and_fits_a_pipe(fields: dict[str, object], text: str) -> None:
    line = text_line(AT, "error", "e", {**fields, "long": text, "traceback": text})
    assert len(line) <= LINE_BYTES_MAX
    shown = line.decode()
    assert shown.endswith("\n")
    assert all(char == "\n" or char.isprintable() for char in shown)


def test_text_that_is_no_utf_8_is_logged_all_the_same() -> None:
    fields: dict[str, object] = {"path": "/x\udcff", "argv": ["\udcff"]}
    assert json.loads(json_line(AT, "info", "e", fields))["path"] == "/x\\udcff"
    assert b'path="/x\\udcff"' in text_line(AT, "info", "e", fields)


def test_text_for_people() -> None:
    fields: dict[str, object] = {
        "pid": 7,
        "why": "no room",
        "argv": ["a"],
        "none": None,
        "ok": True,
    }
    shown = text_line(AT, "warning", "shim_lost", fields).decode()
    assert (
        shown.split(" ", 1)[1] == 'warning shim_lost pid=7 why="no room" argv="[\\"a\\"]" ok=true\n'
    )
    fields = {"why": 'a\\" level=error why="b', "reason": "a b\\", "path": "a\\b"}
    shown = text_line(AT, "info", "e", fields).decode()
    assert shown.endswith(r' e why="a\\\" level=error why=\"b" reason="a b\\" path="a\\b"' "\n")
    shown = text_line(AT, "error", "stray", {"error": "\x1b[31m", "traceback": "a\n  b\n"}).decode()
    assert shown.split(" ", 1)[1] == 'error   stray error="\\x1b[31m"\n    a\n      b\n'


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Kept(Log):
    """A log whose lines are kept; it can be told to take none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fd=os.open(os.devnull, os.O_WRONLY), **options)
        self.lines: list[dict[str, Any]] = []
        self.is_full = False
        self._write_now = self._keep

    def _keep(self, line: bytes) -> bool:
        if not self.is_full:
            self.lines.append(json.loads(line))
        return not self.is_full


def test_a_kind_that_floods_is_held_back_and_how_many_is_said_with_the_next(
    clock: list[float],
) -> None:
    log, told = Kept(), []
    log.on_held = lambda: told.append(clock[0])
    for _ in range(110):
        log.warning("peer_refused")
    assert len(log.lines) == 10
    log.warning("other")  # another kind has its own
    assert log.lines.pop()["event"] == "other"
    assert told == [1000.0]
    clock[0] += 1.0
    log.warning("peer_refused")
    assert log.lines[-1]["held_back"] == 100
    assert log.take_held() == []
    log.warning("peer_refused")
    assert len(log.lines) == 11
    assert told == [1000.0, 1001.0]
    clock[0] += 60
    for _ in range(12):
        log.warning("peer_refused")
    assert len(log.lines) == 21
    assert [line.get("held_back") for line in log.lines[11:]] == [1] + [None] * 9
    assert log.take_held() == [("peer_refused", 2)]


def test_debug_lines_are_not_held_back_and_what_is_below_the_level_counts_for_nothing(
    clock: list[float],
) -> None:
    log = Kept(level="debug")
    for _ in range(50):
        log.debug("exec_started")
    assert len(log.lines) == 50
    log = Kept(level="warning")
    for _ in range(50):
        log.info("ready")
    assert log.lines == []
    assert log.take_held() == []
    assert clock


def test_lines_that_were_lost_are_counted_in_the_next_that_is_not(clock: list[float]) -> None:
    log = Kept()
    log.is_full = True
    for _ in range(3):
        log.info("a")
    log.is_full = False
    log.info("b")
    log.info("b")
    assert [line.get("lost") for line in log.lines] == [3, None]
    assert log.dropped == 3
    assert clock


# ------------------------------------------------------------------ descriptors

LINE = b"x" * (LINE_BYTES_MAX - 1) + b"\n"


@contextlib.contextmanager
def ends(kind: str) -> Iterator[tuple[int, int]]:
    """A reading and a blocking writing end."""
    if kind == "pipe":
        reader, writer = os.pipe()
    elif kind == "terminal":
        reader, writer = pty.openpty()
    else:
        pair = socket.socketpair()
        reader, writer = (each.detach() for each in pair)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_a_reader_that_reads_nothing_is_not_waited_for(kind: str) -> None:
    with ends(kind) as (reader, writer):
        write = open_end(writer)
        taken = 0
        while write(LINE):
            taken += 1
        assert not write(LINE)
        assert os.get_blocking(writer)  # it is others' too, and stays as it was
        os.read(reader, 65536)
        if isinstance(write, _Socket):
            write.socket.close()


@pytest.mark.parametrize("asks_first", [False, True], ids=["open_end", "twin"])
def test_another_writer_that_is_faster_cannot_make_it_wait(
    monkeypatch: pytest.MonkeyPatch, asks_first: bool
) -> None:
    """Somebody who shares the pipe fills it between the question and the write; the twin asks."""

    class Room(Poll):
        def poll(self, _timeout: int) -> list[tuple[int, int]]:
            return [(self.fd, select.POLLOUT)]  # there was some, when it was asked

    with ends("pipe") as (reader, writer):
        full = open_end(writer)
        while full(LINE):
            pass
        monkeypatch.setattr(select, "poll", Room)
        write = _asked_first(writer) if asks_first else open_end(writer)
        thread = threading.Thread(target=write, args=[LINE], daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() == asks_first
        os.read(reader, 65536)
        thread.join(10)
        assert not thread.is_alive()


class Poll:
    """What of a poll object is used."""

    fd = -1

    def register(self, fd: int, _events: int) -> None:
        self.fd = fd


def test_where_it_cannot_be_opened_anew_it_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "no")

    with ends("pipe") as (reader, writer):
        monkeypatch.setattr(os, "open", refused)
        write = open_end(writer)
        taken = 0
        while write(LINE):
            taken += 1
        assert taken == 16  # a pipe's 64 KiB
        os.read(reader, 65536)
        assert write(LINE)


def test_where_it_cannot_even_be_asked_the_line_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll(2) fails where a process may have no descriptor at all; the log must not."""

    class Unaskable(Poll):
        def poll(self, _timeout: int) -> list[tuple[int, int]]:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(select, "poll", Unaskable)
    with ends("pipe") as (_reader, writer):
        assert not _asked_first(writer)(LINE)


def test_a_file_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "poll")
    with (tmp_path / "log").open("wb") as file:
        assert open_end(file.fileno())(LINE)
    assert (tmp_path / "log").read_bytes() == LINE


def test_a_reader_that_is_gone_and_a_closed_descriptor_lose_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    write = open_end(writer)
    assert not write(LINE)
    os.close(writer)
    assert not open_end(writer)(LINE)
