"""A daemon that answers by script, through the real codec and a real socket.

For what a real daemon does not do on demand: break the protocol, go silent, vanish in the middle
of a frame. Everything else is tested against the real one in tests/daemon.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from runnerd.protocol.answers import Empty, StartAnswer
from runnerd.protocol.codec import Codec
from runnerd.protocol.daemon_answers import HelloAnswer, Limits
from runnerd.protocol.exits import Closed, Exit, Oom, Phases, StreamCount
from runnerd.protocol.fields import Params
from runnerd.protocol.framing import Encoding, FrameSplitter
from runnerd.protocol.notes import ClosedNote, ExitedNote, OutputNote
from runnerd.protocol.requests import METHODS, ExecStart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

    import msgspec

    from runnerd.protocol.errors import RequestError

LIMITS: Final = Limits(
    frame_bytes=4 << 20,
    connections=512,
    hello_s=10,
    stuck_reader_s=30,
    pipelined_requests=256,
    subscriptions=1024,
    live_execs=1024,
    stdin_queue_bytes=1 << 20,
    stdin_total_bytes=16 << 20,
    tail_bytes=256 << 10,
    transcript_total_bytes=32 << 20,
    finished_execs=1024,
    finished_s=3600,
    settled=16384,
    spool_bytes=64 << 20,
    spool_total_bytes=256 << 20,
    labels=32,
    env_bytes=1 << 20,
)
HELLO: Final = HelloAnswer(
    protocol=1, incarnation="i-1", version="0", features=[], limits=LIMITS, starts=0
)


def make_exit(
    exec_id: str = "x",
    code: int | None = 0,
    signal: int | None = None,
    *,
    reason: str = "exited",
    stdout_bytes: int = 0,
    stderr_bytes: int = 0,
    oom: str = "none",
) -> Exit:
    def count(total_bytes: int) -> StreamCount:
        return StreamCount(total_bytes=total_bytes, kept_bytes=total_bytes, dropped_bytes=0)

    return Exit(
        exec_id=exec_id,
        code=code,
        signal=signal,
        core_dumped=False,
        reason=reason,  # type: ignore[arg-type]
        forced=False,
        started_at=1.0,
        ended_at=2.0,
        wall_s=1.0,
        cpu_user_s=0.0,
        cpu_system_s=0.0,
        peak_rss_bytes=None,
        minor_faults=None,
        major_faults=None,
        block_reads=None,
        block_writes=None,
        oom=Oom(kills=0, verdict=oom),  # type: ignore[arg-type]
        phases=Phases(),
        stdout=count(stdout_bytes),
        stderr=count(stderr_bytes),
    )


class Peer:
    """One connection, as a script sees it."""

    def __init__(self, connection: socket.socket, encoding: Encoding) -> None:
        self.connection = connection
        self.codec = Codec(encoding)
        self.asked: list[tuple[str, Params]] = []

    def answer(self, request_id: int | str | None, result: msgspec.Struct) -> None:
        self.send(self.codec.answer(request_id, result))

    def fail(self, request_id: int | str | None, error: RequestError) -> None:
        self.send(self.codec.failure(request_id, error))

    def note(self, method: str, note: msgspec.Struct) -> None:
        self.send(self.codec.note(method, note))

    def send(self, data: bytes | bytearray) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(data)

    def started(self, request_id: int | str | None, exec_id: str = "x") -> None:
        self.answer(
            request_id,
            StartAnswer(
                exec_id=exec_id, pid=99, created=True, starts=1, oom_score_adj=900, subscription=1
            ),
        )

    def output(self, seq: int, offset: int, data: bytes, stream: str = "stdout") -> None:
        note = OutputNote(
            subscription=1,
            exec_id="x",
            seq=seq,
            stream=stream,  # type: ignore[arg-type]
            offset=offset,
            data=data,
        )
        self.note("exec.output", note)

    def exited(self, seq: int, exit: Exit) -> None:
        self.note("exec.exited", ExitedNote(subscription=1, exec_id="x", seq=seq, exit=exit))

    def closed(self, seq: int) -> None:
        closed = Closed(discarded_bytes=0, closed_at=3.0)
        self.note("exec.closed", ClosedNote(subscription=1, exec_id="x", seq=seq, closed=closed))

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)


Script = Mapping[str, "Callable[[Peer, int | str | None, Params], None]"]


class FakeDaemon:
    """Serves a script at a socket until the end of its `with` block."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path = str(path)
        self.peers: list[Peer] = []
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()
        for peer in self.peers:
            peer.connection.close()

    @property
    def asked(self) -> list[tuple[str, Params]]:
        return [each for peer in self.peers for each in peer.asked]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        splitter = FrameSplitter()
        peer: Peer | None = None
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                # As a process's end does: everything of it is closed.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                if peer is None:
                    connection.close()
                return
            splitter.feed(data)
            while (payload := splitter.next_frame()) is not None:
                if peer is None:
                    assert splitter.encoding is not None
                    peer = Peer(connection, splitter.encoding)
                    self.peers.append(peer)
                request = peer.codec.request(payload)
                params = peer.codec.params(request.params, METHODS[request.method])
                peer.asked.append((request.method, params))
                if request.method in self._script:
                    self._script[request.method](peer, request.id, params)
                elif request.method == "hello":
                    peer.answer(request.id, HELLO)
                elif request.id is not None:
                    peer.answer(request.id, Empty())


def prints(
    chunks: list[tuple[str, bytes]], exit: Exit
) -> Callable[[Peer, int | str | None, Params], None]:
    """A script for exec.start: print the chunks, then exit; totals are filled in."""

    def start(peer: Peer, request_id: int | str | None, params: Params) -> None:
        assert isinstance(params, ExecStart)
        peer.started(request_id)
        offsets = {"stdout": 0, "stderr": 0}
        for at, (stream, data) in enumerate(chunks):
            peer.output(at + 1, offsets[stream], data, stream)
            offsets[stream] += len(data)
        exit.stdout.total_bytes = offsets["stdout"]
        exit.stderr.total_bytes = offsets["stderr"]
        peer.exited(len(chunks) + 1, exit)

    return start
