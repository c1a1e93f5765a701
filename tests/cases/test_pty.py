"""Cases of the group `pty`: a terminal is a terminal, and its end is told as any other.

Other groups' cases that ask for a pty as well have it in their own files.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

import pytest

from runnerd.client.errors import RemoteError
from runnerd.protocol.requests import Pty
from tests.cases.field import (
    ROOM,
    mark,
    marked,
    output_of,
    read_until,
    timed,
)
from tests.harness import wait_for
from tests.raw import RawClient, RawError

if TYPE_CHECKING:
    from tests.harness import RunnerdProcess


def test_c93_a_job_left_by_a_shell_does_not_hold_the_exit_up(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """The exit comes within a second, the terminal is hung up, the job is gone after a cancel."""
    word = mark(1000)
    with runnerd_daemon.connect() as client:
        handle = client.start(["sh"], pty=Pty())
        handle.write(f"sleep {word} &\nexit\n".encode())
        output_of(handle)
        assert handle.exit is not None
        assert (handle.exit.code, handle.exit.reason) == (0, "exited")
        assert handle.exit.phases.drained_ms is not None
        assert handle.exit.phases.exited_ms is not None
        assert handle.exit.phases.drained_ms - handle.exit.phases.exited_ms < 1000 * ROOM
        handle.cancel(0)
        assert not marked(word)

        handle = client.start(["sh", "-c", f"setsid sleep {word} & echo hi"], pty=Pty())
        took_s, (stdout, _) = timed(lambda: output_of(handle))
        assert (stdout, took_s < 1.0 * ROOM) == (b"hi\r\n", True)
        # The kernel's hang-up at the shell's exit meets it before or after it leaves the session.
        assert bool(marked(word)) == (handle.inspect().state == "lingering")
        handle.cancel(0)
        assert not marked(word)


def test_c94_the_end_of_a_terminal_is_no_error_and_no_byte_is_missing(
    runnerd_daemon: RunnerdProcess,
) -> None:
    """EIO is end of file: the reader that comes late has all of it, and the exit is true."""
    with runnerd_daemon.connect() as client:
        handle = client.start(["seq", "1", "20000"], pty=Pty())
        time.sleep(0.5)  # the case itself: a reader that waits for so long
        stdout, _ = output_of(handle)
        assert handle.exit is not None
        assert (len(stdout), handle.exit.code) == (128_894, 0)
        for _ in range(300):
            done = client.run(["sh", "-c", "echo x; exit 11"], pty=Pty())
            assert (done.stdout, done.exit.code, done.exit.reason) == (b"x\r\n", 11, "exited")


def test_c95_sizes(runnerd_daemon: RunnerdProcess) -> None:
    """Asked for, by default, and changed in the same write as the start; wrong ones are refused."""
    with runnerd_daemon.connect() as client:
        done = client.run(["stty", "size"], pty=Pty(rows=40, cols=120))
        assert done.stdout == b"40 120\r\n"
        assert client.run(["stty", "size"], pty=Pty()).stdout == b"24 80\r\n"
    with RawClient(runnerd_daemon.socket_path) as raw:
        for number in range(100):
            exec_id = f"early-{number}"
            argv = ["sh", "-c", "stty -echo; read x; stty size"]
            start = {"exec_id": exec_id, "argv": argv, "pty": {}, "attach": {}}
            raw.sock.sendall(
                raw.encode("exec.start", start, 1000 + 3 * number)
                + raw.encode(
                    "exec.resize", {"exec_id": exec_id, "rows": 50, "cols": 132}, 1001 + 3 * number
                )
                + raw.encode("exec.write", {"exec_id": exec_id, "data": b"\n"}, 1002 + 3 * number)
            )
            raw.note("exec.exited", exec_id)
            assert raw.answers.pop(1001 + 3 * number)["result"] == {}
            assert raw.output(exec_id).endswith(b"50 132\r\n")
        refused = [
            ({"exec_id": "early-0", "rows": 24, "cols": 80}, "exec_ended"),
            ({"exec_id": "never-seen", "rows": 24, "cols": 80}, "exec_unknown"),
            ({"exec_id": "early-0", "rows": 0, "cols": 80}, "invalid_params"),
            ({"exec_id": "early-0", "rows": 24, "cols": 70_000}, "invalid_params"),
        ]
        for params, kind in refused:
            with pytest.raises(RawError) as caught:
                raw.call("exec.resize", **params)
            assert caught.value.kind == kind
        for size in ({"rows": 0}, {"rows": 70_000}):
            with pytest.raises(RawError) as caught:
                raw.call("exec.start", argv=["true"], pty=size)
            assert caught.value.kind == "invalid_params"


def test_c95_a_resize_of_a_live_one_is_one_signal(runnerd_daemon: RunnerdProcess) -> None:
    # No shell: bash forgets a signal that comes while it runs the trap of the one before.
    script = """if True:
        import itertools, os, signal
        count = itertools.count(1)
        signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"winch %d\\n" % next(count)))
        os.write(1, b"up\\n")
        while True:
            signal.pause()
    """
    with runnerd_daemon.connect() as client:
        handle = client.start([sys.executable, "-c", script], pty=Pty())
        read_until(handle, b"up")
        for number in range(1, 6):
            handle.resize(24, 80 + number)
            # A second one would be counted by the time of the next.
            assert read_until(handle, b"winch").endswith(b"winch %d\r\n" % number)
        handle.cancel(0)


def test_c97_keys_that_signal(runnerd_daemon: RunnerdProcess) -> None:
    """Ctrl-C ends a command by INT, and a shell's command but not the shell; /dev/tty opens."""
    word = mark(30)
    with runnerd_daemon.connect() as client:
        handle = client.start(["sleep", word], pty=Pty())
        took_s, its_exit = timed(lambda: _interrupted(handle))
        assert (its_exit.signal, its_exit.reason) == (2, "exited")
        assert took_s < 0.5 * ROOM

        handle = client.start(["bash", "--norc", "-i"], pty=Pty())
        handle.write(f"sleep {word}\n".encode())
        wait_for(lambda: marked(word))
        handle.write(b"\x03")
        read_until(handle, b"^C")
        handle.write(b"echo rc=$?; exit\n")
        stdout, _ = output_of(handle)
        assert b"rc=130\r\n" in stdout
        assert b"job control" not in stdout
        assert handle.exit is not None
        assert handle.exit.code == 0

        done = client.run(["sh", "-c", "echo ok >/dev/tty"], pty=Pty())
        assert done.stdout == b"ok\r\n"


def _interrupted(handle: object) -> object:
    handle.write(b"\x03")  # type: ignore[attr-defined]
    return handle.wait(10)  # type: ignore[attr-defined]


def test_c99_the_hang_up_is_one_and_the_same_every_time(runnerd_daemon: RunnerdProcess) -> None:
    """nohup's sleep lives until the cancel; the other's fate is the kernel's, 50 of 50 alike."""
    words = [(mark(1008), mark(1009)) for _ in range(50)]
    with runnerd_daemon.connect() as client:
        handles = []
        for kept, other in words:
            script = f"nohup sleep {kept} >/dev/null 2>&1 & sleep {other} & sleep 0.2; exit 0"
            handles.append(client.start(["bash", "-c", script], pty=Pty(), attach=False))
        for handle in handles:
            its_exit = handle.wait(20)
            assert (its_exit.code, its_exit.reason) == (0, "exited")
        time.sleep(2)  # the case itself: nothing happens later either
        fates = [(bool(marked(kept)), bool(marked(other))) for kept, other in words]
        assert fates == [(True, False)] * 50
        for handle in handles:
            handle.cancel(0)
        assert not any(marked(word) for word in itertools.chain(*words))
        with pytest.raises(RemoteError):
            handles[0].resize(24, 80)
