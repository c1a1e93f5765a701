"""Passing a command's terminal through: what `run -t`, `run -it` and `attach -it` add.

With -i our own terminal is raw and every key goes to the command, but for the keys that detach.
The size follows ours. TERM and HUP are then no signals for the command: they end the person's
line to it. What `run` has started is sent HUP, as by a terminal that is closed; what `attach` has
come to goes on. Either way our terminal is put back first. Before a start's answer there is nothing
to send HUP to: it is waited for, until a second such signal or the third Ctrl-C.

A lost connection is a bell and no line, which would tear the screen: the bytes shown go on where
they stopped, keys pressed meanwhile wait, and so does a new size. Keys that were on their way at
that moment may have arrived or not. They are not sent again, since a doubled key can do more harm
than a missing one, and it is said once the terminal is an ordinary one again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

from runnerd.client.errors import ClientError
from runnerd.protocol.answers import AttachAnswer, StartAnswer
from runnerd.protocol.notes import ExitedNote
from runnerd.protocol.requests import ExecDetach, ExecResize, ExecSignal, ExecStart

from .detaching import DetachScanner
from .endings import SIGNAL_BASE, say, say_bare, say_hint, say_reconnecting
from .keys import KeyFeeder
from .passing import PASSED_SIGNALS, Passer
from .screen import Modes, without_queries
from .streams import write_all
from .terminal import RawTerminal, local_size

if TYPE_CHECKING:
    from types import FrameType

    from runnerd.client.blocking import Client
    from runnerd.client.conversation import Occurrence
    from runnerd.client.errors import StreamLost
    from runnerd.client.feeding import StdinFeeder
    from runnerd.client.session import Answer, Failure
    from runnerd.protocol.fields import Params
    from runnerd.protocol.notes import OutputNote

RECENT_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 64 * 1024
_HANGING_UP: Final = (
    signal.SIGTERM,
    signal.SIGHUP,
    # None of these is for a command, but each would end us by its default, and our terminal raw.
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGIO,
    signal.SIGPWR,
    signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


class _Leaving(Exception):  # noqa: N818 - no error
    """Leave the command's terminal; raised where the client is not in the middle of anything."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class TerminalPasser(Passer):
    """Follows one exec that has a terminal, until its exit or until the person leaves it.

    Args:
        client: The connection, used by this loop alone.
        owns: As for Passer.
        keys: The detach keys, as detach_keys returns them; None = no key is passed on (no -i).
        attached_to: The exec, for `attach`; its recent bytes are shown first, then it redraws.
        typed_bytes: What others have typed into it.
    """

    def __init__(
        self,
        client: Client,
        *,
        owns: bool,
        keys: bytes | None,
        attached_to: str | None = None,
        typed_bytes: int = 0,
    ) -> None:
        super().__init__(client, owns=owns, feeds=keys is not None)
        self._scanner = DetachScanner(keys or b"")
        self._attached_to = attached_to
        self._typed_bytes = typed_bytes
        self._subscription: int | None = None
        self._replay: bytearray | None = None
        self._replay_seq = 0
        self._modes = Modes()
        self._size: tuple[int, int] | None = None  # as the command's terminal was told last
        self._must_redraw = False
        self._is_in_line = False  # what the command showed last: what we say begins one of its own
        self._start_id: str | None = None  # of what was asked for, answered or not
        self._raw: RawTerminal | None = None
        self._hung_up_by: int | None = None
        self._insists = False
        self._may_raise = False  # a signal's handler: not where the terminal would be left raw

    def follow(self, method: str, params: Params) -> int:
        """Start or attach, pass everything through, and return the exit code for the shell.

        Raises:
            ClientError: If the start or attach was refused, or the stream was lost.
        """
        if isinstance(params, ExecStart) and params.pty is not None:
            self._size = (params.pty.rows, params.pty.cols)
            params = self._client.prepared(params)
            self._start_id = params.exec_id
        try:
            # Before our terminal is raw: none of them may end us there as it would by default.
            (self._catch_signals if self._owns else self._catch_hang_up)()
            signal.signal(signal.SIGWINCH, self._on_size_change)
            self._raw = RawTerminal(self._on_continue) if self._feeds else None
            with self._raw or contextlib.nullcontext():
                code = self._follow(method, params)
        except ClientError:
            self._end_line()
            raise
        except _Leaving as leaving:
            self._end_line()
            self._say_doubtful()
            if self._exec_id is None and self._start_id is not None:
                say("no answer to the start came: the command may run all the same, or run yet")
                say_hint(f"to end it then: runnerctl cancel {self._start_id}")
            elif not leaving.code:
                say(f"detached; bring it back by: runnerctl attach -it {self._exec_id}")
            elif self._owns and leaving.code == SIGNAL_BASE + signal.SIGINT:
                say("left before the command's exit was told: it may run on")
                say_hint(f"runnerctl inspect {self._exec_id}")
            return leaving.code
        self._say_doubtful()
        return code

    def _end_line(self) -> None:
        if self._raw is not None and self._is_in_line:
            say_bare("")

    def _say_doubtful(self) -> None:
        if isinstance(self._feeder, KeyFeeder) and self._feeder.doubtful_bytes:
            say("what was typed as the connection was lost may not have arrived")

    def lost(self, lost: StreamLost) -> None:
        """Ring: a line of ours would stand in the middle of the command's screen."""
        for descriptor in (2, 1):
            if os.isatty(descriptor):
                if not self._modes.is_in_text:
                    with contextlib.suppress(OSError):
                        os.write(descriptor, b"\a")
                return
        say_reconnecting(lost)

    def _follow(self, method: str, params: Params) -> int:
        self._may_raise = True
        try:
            return super().follow(method, params)
        except BaseException:
            self._may_raise = False
            # A command that goes on, or is lost to us, cannot tidy our screen up.
            with contextlib.suppress(OSError):
                write_all(1, self._modes.undo())
            raise
        finally:
            self._may_raise = False

    # Events

    def _take(self, event: Occurrence) -> None:
        if isinstance(event, ExitedNote):
            self._show_replay()
        super()._take(event)

    def _take_answer(self, answer: Answer) -> None:
        result = answer.result
        if isinstance(result, (StartAnswer, AttachAnswer)):
            self._subscription = result.subscription  # first: what follows may leave, and detaches
        super()._take_answer(answer)
        if not isinstance(result, (StartAnswer, AttachAnswer)):
            return
        if isinstance(result, AttachAnswer):
            self._exec_id = self._attached_to
            self._replay, self._replay_seq = bytearray(), result.last_seq
            if result.after >= result.last_seq:
                self._show_replay()
        if self._raw is not None:
            self._raw.pass_keys()
        if self._feeds and self._exec_id is not None:
            self._feeder = KeyFeeder(self._exec_id, self._typed_bytes)
        self._send_signals()

    def _take_failure(self, failure: Failure) -> None:
        if failure.method != "exec.resize":  # which may cross with the exit
            super()._take_failure(failure)

    def _pass_output(self, note: OutputNote) -> None:
        self._modes.saw(note.data)
        self._is_in_line = note.data[-1:] != b"\n"
        if self._replay is None:
            super()._pass_output(note)
            return
        self._replay += note.data
        if note.seq >= self._replay_seq:
            self._show_replay()

    def _show_replay(self) -> None:
        if self._replay is None:
            return
        shown, self._replay = without_queries(bytes(self._replay)), None
        with contextlib.suppress(OSError):
            write_all(1, shown)
        self._must_redraw = True
        self._send_size()

    # Keys

    def _read_stdin(self, feeder: StdinFeeder) -> None:
        try:
            typed = os.read(0, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            typed = b""
        if not typed:
            raise _Leaving(self._hang_up(signal.SIGHUP))  # our terminal is gone
        passed, leaves = self._scanner.take(typed)
        if passed:
            feeder.offer(passed)
        if leaves:
            if isinstance(feeder, KeyFeeder) and (write := feeder.rest()) is not None:
                self._send("exec.write", write)
            self._detach()
            raise _Leaving(0)

    def _detach(self) -> None:
        if self._subscription is not None:
            # Else a command that waits for its reader would wait for us to come back.
            self._send("exec.detach", ExecDetach(subscription=self._subscription))

    # Signals

    def _catch_signals(self) -> None:
        super()._catch_signals()
        self._catch_hang_up()

    def _catch_hang_up(self) -> None:
        for number in _HANGING_UP if self._owns else {*_HANGING_UP, *PASSED_SIGNALS}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_hang_up)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        super()._on_signal(number, frame)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, self._on_hang_up)  # the last one ends us, but tidily

    def _on_hang_up(self, number: int, _frame: FrameType | None) -> None:
        # Of a start without an answer: Ctrl-C is the third then, all others the second.
        self._insists = self._hung_up_by is not None or number == signal.SIGINT
        self._hung_up_by = number
        self._send_signals_soon()

    def _on_continue(self) -> None:
        self._must_redraw = True  # over what was shown while we were stopped
        self._send_signals_soon()

    def _on_size_change(self, _number: int, _frame: FrameType | None) -> None:
        self._send_signals_soon()

    def _send_signals_soon(self) -> None:
        if not self._is_in_client:
            self._send_signals()

    def _send_signals(self) -> None:
        if not self._may_raise:  # as both sending and leaving do
            return
        super()._send_signals()
        # What we are just starting is not left behind: its answer comes within seconds, but from
        # a daemon that does not answer at all.
        is_there = self._exec_id is not None or not self._owns or self._insists
        if self._hung_up_by is not None and is_there:
            self._may_raise = False
            number, self._hung_up_by = self._hung_up_by, None
            raise _Leaving(self._hang_up(number))
        self._send_size()

    def _hang_up(self, number: int) -> int:
        with contextlib.suppress(ClientError):
            if self._owns and self._exec_id is not None and self._exit is None:
                params = ExecSignal(exec_id=self._exec_id, signal="HUP", to="group")
                self._send("exec.signal", params)
            self._detach()
        return SIGNAL_BASE + number

    def _send_size(self) -> None:
        size = local_size()
        if size is None or self._exec_id is None or self._replay is not None:
            return
        if self._must_redraw:
            # The kernel tells nobody of a size like the one before: so another one first, and
            # ours as soon as that is sent.
            self._must_redraw = False
            rows, cols = size
            size = (rows, cols - 1 if cols > 1 else cols + 1)
        if size != self._size:
            self._size = size
            self._resize(*size)

    def _resize(self, rows: int, cols: int) -> None:
        if self._exec_id is not None and self._exit is None:
            self._send("exec.resize", ExecResize(exec_id=self._exec_id, rows=rows, cols=cols))
