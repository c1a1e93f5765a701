"""Bulk streams get bigger pipes, a few at a time, and give them back."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from runnerd.daemon import pipes
from runnerd.daemon.pipes import BIG_PIPE_BYTES, BigPipes
from tests.harness import RunnerdProcess, wait_for


def size_of(pid: int, fd: int) -> int:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return fcntl.fcntl(opened, fcntl.F_GETPIPE_SZ)
    finally:
        os.close(opened)


def test_a_stream_that_fills_its_pipe_gets_a_bigger_one(runnerd_daemon: RunnerdProcess) -> None:
    with runnerd_daemon.connect() as client:
        bulk = client.start(["sh", "-c", "head -c 4000000 /dev/zero; exec sleep 1000"])
        quiet = client.start(["sh", "-c", "echo hi; exec sleep 1000"])
        taken = 0
        for note in bulk.output(timeout_s=30):
            taken += len(getattr(note, "data", b""))
            if taken == 4_000_000:
                break
        wait_for(lambda: client.inspect(quiet.exec_id).last_seq)
        assert bulk.pid is not None
        assert quiet.pid is not None
        assert size_of(bulk.pid, 1) == BIG_PIPE_BYTES
        assert size_of(bulk.pid, 2) < BIG_PIPE_BYTES
        assert size_of(quiet.pid, 1) < BIG_PIPE_BYTES
        for handle in (bulk, quiet):
            handle.cancel(grace_s=0)


def test_only_so_many_are_big_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "BIG_PIPES_MAX", 1)
    big = BigPipes()
    first, second = os.pipe(), os.pipe()
    try:
        assert big.grow(first[0])
        assert not big.grow(second[0])
        assert fcntl.fcntl(second[0], fcntl.F_GETPIPE_SZ) < BIG_PIPE_BYTES
        big.given -= 1
        assert big.grow(second[0])
    finally:
        for fd in (*first, *second):
            os.close(fd)


def test_what_cannot_grow_stays_as_it_is() -> None:
    with Path("/dev/null").open("rb") as no_pipe:
        assert not BigPipes().grow(no_pipe.fileno())
