"""The streams of one exec: its pipes or terminal, and the pumps on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runnerd.core.execs import Exec
from runnerd.protocol.answers import TerminalSize
from runnerd.protocol.errors import RequestError, invalid
from runnerd.protocol.requests import ExecWrite

from .output_pump import OutputPump
from .stdin_pump import Reply, StdinPump

if TYPE_CHECKING:
    from .pipes import Streams
    from .poller import Owner
    from .service import Service


class ExecStreams:
    """What an exec reads and writes, from its launch to its close.

    Every method can be called at any time: before the command runs and after the end there is
    nothing to be done.

    Args:
        service: The daemon's shared parts.
        its_exec: Whose output is kept, and whose stdin is fed.
        owner: Who is told of a failure.
        on_output: Called after output was read.
        on_eof: Called once nothing can come any more.
        on_shut: Called when the gate holds something back.
    """

    def __init__(
        self,
        service: Service,
        its_exec: Exec,
        owner: Owner,
        *,
        on_output: Callable[[], None],
        on_eof: Callable[[], None],
        on_shut: Callable[[], None],
    ) -> None:
        self._service = service
        self._exec = its_exec
        self._owner = owner
        self._on_output = on_output
        self._on_eof = on_eof
        self._on_shut = on_shut
        self._ends: Streams | None = None
        self._output: OutputPump | None = None
        self._stdin: StdinPump | None = None

    def take(self, ends: Streams | None) -> None:
        """The command gets the other ends."""
        self._ends = ends

    def make_pumps(self) -> None:
        """The command runs."""
        assert self._ends is not None
        service = self._service
        self._output = OutputPump(
            self._exec,
            self._ends,
            service.poller,
            tail_bytes=lambda: service.registry.budget.tail_bytes,
            owner=self._owner,
            on_output=self._on_output,
            on_eof=self._on_eof,
            big_pipes=service.big_pipes,
            rests=service.rests,
        )
        self._output.on_shut = self._on_shut
        if self._exec.stdin is not None:
            self._stdin = StdinPump(
                self._exec.stdin, self._ends, service.stdin_totals, service.poller, self._owner
            )

    # ------------------------------------------------------------------ output

    def start_reading(self) -> None:
        """Read from now on, as the gate allows."""
        if self._output is not None:
            self._output.start()

    def gate_changed(self) -> None:
        """The gate may be open again: go on reading if that is waited for."""
        if self._output is not None and self._output.is_waiting:
            self._output.gate_changed()

    def drain(self) -> bool:
        """Read what is there now; returns whether that was all that can come."""
        return self._output is None or self._output.drain()

    def count_rest(self) -> None:
        """Count what nobody will read any more as thrown away."""
        if self._output is not None:
            self._exec.discarded(self._output.bytes_left())

    def discard(self) -> None:
        """From now on throw away what comes; a terminal is hung up."""
        if self._output is not None:
            self._output.discard()

    def links(self) -> set[str]:
        """Return what /proc/PID/fd shows of those who could still write its output."""
        return set() if self._output is None else self._output.links()

    # ------------------------------------------------------------------ stdin

    def write(self, request: ExecWrite, reply: Reply, writer: object) -> None:
        """Take an exec.write; those of one writer take effect in the order they came."""
        if self._exec.stdin is None:
            reply(RequestError("stdin_closed", "the exec was started without stdin: pipe"))
            return
        if self._stdin is None:
            taken = self._exec.stdin.accepted_bytes
            reply(RequestError("stdin_closed", "the exec has ended", accepted_bytes=taken))
            return
        self._stdin.write(request, reply, writer)

    @property
    def stdin_room_bytes(self) -> int:
        """How much stdin could take now."""
        return 0 if self._stdin is None else self._stdin.room_bytes

    def close_stdin(self) -> None:
        """Feed nothing any more."""
        if self._stdin is not None:
            self._stdin.close()

    # ------------------------------------------------------------------ the terminal

    def resize(self, size: TerminalSize) -> None:
        """Set its terminal's size.

        Raises:
            RequestError: Where it has no terminal, or the command has ended.
        """
        exec_id = self._exec.exec_id
        if self._exec.terminal_size is None:
            raise invalid("exec_id", f"'{exec_id}' was started without pty: it has no terminal")
        terminal = self._ends if self._exec.status is None else None
        if terminal is None or not terminal.resize(size.rows, size.cols):
            raise RequestError("exec_ended", f"exec '{exec_id}' has ended, and so has its terminal")
        self._exec.terminal_size = size

    @property
    def terminal_size(self) -> TerminalSize | None:
        """Its terminal's size, whoever set it; once hung up, the last that was asked for."""
        now = None if self._ends is None else self._ends.size()
        return now or self._exec.terminal_size

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """Touch nothing of it any more: a pump has failed, and would at once again."""
        if self._output is not None:
            self._output.close()
        self.close_stdin()

    def close(self) -> None:
        """Let go of everything."""
        output, self._output = self._output, None
        self._ends = self._stdin = None
        if output is not None:
            output.close()
