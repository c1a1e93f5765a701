"""Drives one shim alone, as runnerd does: a control socket, a lifeline, a job."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from runnerd.protocol.job import JOB_MESSAGE, Job, JobUser, pack_job
from runnerd.protocol.shimwire import (
    Empty,
    Exited,
    Failed,
    Parked,
    Scope,
    ShimMessage,
    Started,
    end_message,
    parse_shim_message,
    signal_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Message = TypeVar("Message", bound=ShimMessage)

# Long, for the machine may be busy: it bounds a hang and measures nothing.
DEADLINE_S = 20.0

PATH = b"PATH=/usr/local/bin:/usr/bin:/bin"


def job(
    *argv: str | bytes | Path,
    env: Sequence[bytes] = (PATH,),
    cwd: bytes = b"/",
    user: JobUser | None = None,
    umask: int = 0o022,
    nice: int | None = None,
    oom_score_adj: int | None = None,
    no_new_privs: bool = False,
    ctty: bool = False,
    rlimits: tuple[tuple[int, int, int], ...] = (),
) -> Job:
    return Job(
        argv=tuple(os.fsencode(word) for word in argv),
        env=tuple(env),
        cwd=cwd,
        user=user,
        no_capabilities=user is not None and user.uid != 0,
        umask=umask,
        nice=nice,
        oom_score_adj=oom_score_adj,
        no_new_privs=no_new_privs,
        ctty=ctty,
        rlimits=rlimits,
    )


def wait_until(predicate: Callable[[], object], what: str = "the condition") -> None:
    """Wait for a level, never for an edge: the predicate is asked again until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {DEADLINE_S} s")
        time.sleep(0.001)


def proc_field(pid: int, name: str) -> str | None:
    """One line of /proc/PID/status, or None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return line.partition(":")[2].strip()
    return None


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not, and may wait long for a slow PID 1."""
    state = proc_field(pid, "State")
    return state is not None and state[0] not in "ZX"


def memfd_of(content: bytes) -> int:
    fd = os.memfd_create("job", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


@dataclass
class Shim:
    """A running shim. `said` is everything it has said so far."""

    pid: int
    control: socket.socket
    lifeline: socket.socket
    said: list[ShimMessage] = field(default_factory=list)
    status: int | None = None

    def next(self) -> ShimMessage | None:
        """The next message, or None at the end of the socket."""
        if not select.select([self.control], [], [], DEADLINE_S)[0]:
            raise AssertionError(f"the shim says nothing; so far {self.said}")
        try:
            data = self.control.recv(16384)
        except ConnectionResetError:
            return self.next()
        if not data:
            return None
        self.said.append(parse_shim_message(data))
        return self.said[-1]

    def wait_for(self, kind: type[Message]) -> Message:
        """Read on to the first message of a kind."""
        while (message := self.next()) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {self.said}")

    def heard(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.said if isinstance(message, kind)]

    def send(self, data: bytes) -> None:
        self.control.send(data)

    def signal(self, signum: int, scope: Scope) -> None:
        self.send(signal_message(signum, scope))

    def end(self, grace_ms: int) -> None:
        self.send(end_message(grace_ms))

    def give(self, content: bytes, fds: Sequence[int] = (), extra: Sequence[int] = ()) -> None:
        """Send a job as it is, with /dev/null for the streams that are not given."""
        with contextlib.ExitStack() as stack:
            streams = list(fds)
            while len(streams) < 3:
                streams.append(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
                stack.callback(os.close, streams[-1])
            memfd = memfd_of(content)
            stack.callback(os.close, memfd)
            socket.send_fds(self.control, [JOB_MESSAGE], [*streams, memfd, *extra])

    def start(self, a_job: Job, fds: Sequence[int] = (), extra: Sequence[int] = ()) -> Started:
        self.give(pack_job(a_job), fds, extra)
        while (message := self.next()) is not None:
            if isinstance(message, Started):
                return message
            assert not isinstance(message, Failed), message
        raise AssertionError(f"not started: {self.said}")

    def fail(self, a_job: Job, fds: Sequence[int] = ()) -> Failed:
        """Give a job that must not start."""
        self.give(pack_job(a_job), fds)
        failed = self.wait_for(Failed)
        self.wait_for(Empty)
        assert not self.heard(Started)
        assert not self.heard(Exited)
        return failed

    def output(self, a_job: Job, stdin: int | None = None) -> tuple[bytes, Exited]:
        """Run to the end; what it wrote to stdout and stderr together."""
        read_fd, write_fd = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            self.start(a_job, [null if stdin is None else stdin, write_fd, write_fd])
            os.close(write_fd)
            write_fd = -1
            with os.fdopen(read_fd, "rb", closefd=False) as stream:
                text = stream.read()
            return text, self.wait_for(Exited)
        finally:
            os.close(null)
            os.close(read_fd)
            if write_fd >= 0:
                os.close(write_fd)

    def wait(self) -> int:
        """The shim's own wait status, after it has left."""
        if self.status is None:
            wait_until(self._reaped, "the shim's end")
        assert self.status is not None
        return self.status

    def _reaped(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = status
        return bool(pid)

    def close(self) -> None:
        """Hang up, and see that nothing stays behind, whatever the test has left."""
        self.control.close()
        self.lifeline.close()
        if self.status is None:
            self.wait()


def spawn_shim(
    program: Path,
    *,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> Shim:
    """Start a shim; `prepare` runs in its process before execve."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    life, life_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if prepare is not None:
                prepare()
            low = [os.dup(theirs.fileno()), os.dup(life_theirs.fileno())]
            os.dup2(low[0], 3)
            os.dup2(low[1], 4)
            os.execve(program, ["runnerd-shim"], dict(env or {}))
        os._exit(126)
    theirs.close()
    life_theirs.close()
    return Shim(pid, ours, life)


@contextlib.contextmanager
def shim_of(
    program: Path,
    *,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> Iterator[Shim]:
    shim = spawn_shim(program, env=env, prepare=prepare)
    try:
        assert isinstance(shim.next(), Parked)
        yield shim
    finally:
        shim.close()
