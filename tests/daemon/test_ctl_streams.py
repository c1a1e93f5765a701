"""runnerctl's standard streams where others share, fill or close them."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from typing import TYPE_CHECKING

import pytest

from runnerd.protocol.requests import Pty
from tests.harness import wait_for

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "unread"])
@pytest.mark.parametrize(
    "words", [["forget", "one", "another"], ["run", "--nonsense"]], ids=["twice", "usage"]
)
def test_words_that_standard_error_does_not_take_are_nowhere(
    runnerd_daemon: RunnerdProcess, words: list[str], *, is_full: bool
) -> None:
    """Two lines each: once the first has failed the second was printed on standard output."""
    if is_full:
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    with os.fdopen(writing, "wb") as error:
        done = runnerd_daemon.ctl(*words, capture_output=False, stdout=-1, stderr=error)
    assert (done.returncode, done.stdout) == (125, b"")


@pytest.mark.parametrize("words", [["logs"], ["attach"], ["attach", "-t"]], ids=" ".join)
def test_a_shared_output_that_does_not_block_loses_nothing(
    runnerd_daemon: RunnerdProcess, words: list[str]
) -> None:
    """Whoever shares the descriptor may have made it so: its reader is waited for."""
    with runnerd_daemon.connect() as client:
        script = "stty -opost 2>/dev/null; seq 10000"
        pty = Pty() if "-t" in words else None
        client.start(["sh", "-c", script], exec_id="x", pty=pty, attach=False)
        assert client.wait("x", until="closed", timeout_s=20).code == 0
    reading, writing = os.pipe()
    size_bytes = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    process = runnerd_daemon.start_ctl(*words, "x", stdout=writing)

    def is_full() -> bool:
        (held,) = struct.unpack("i", fcntl.ioctl(reading, termios.FIONREAD, b"\0" * 4))
        return int(held) >= size_bytes or process.poll() is not None

    with os.fdopen(reading, "rb") as pipe:
        wait_for(is_full, 20)
        os.close(writing)
        shown = pipe.read()
    assert process.communicate(timeout=20)[1] == b""
    assert process.returncode == 0
    assert shown == b"".join(b"%d\n" % number for number in range(1, 10001))
