"""Passing a command's streams and signals through, as if it ran here.

The connection may be lost and come back: the client resumes where it stood, no byte is lost or
doubled, and what was read of our standard input waits meanwhile. A signal sent at the very moment
of the loss may have arrived or not: that is said, and it is not sent twice.

One loop over the daemon's socket and our standard input; output is written where it is read, so
that a slow reader of ours slows the command and nothing is held here.

Signals: what this process is sent (TERM, INT, HUP, QUIT, USR1, USR2) is sent on to the command's
process group. The second Ctrl-C cancels the exec, the third kills it at once; a fourth ends
runnerctl itself, should the daemon not answer. Python runs the handler between two steps of this
loop, also while a write to a stopped reader blocks: it sends at once unless the loop is inside
the client just then, which never blocks and sends what is pending on its way out.

A reader that is gone (`runnerctl run -- yes | head -1`): the command is sent SIGPIPE, as its own
write into a broken pipe would have done, and the rest of that stream is dropped. One that
ignores SIGPIPE and goes on printing into it for over a second is cancelled.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Final

from runnerd.client.errors import ExitPassed, Superseded
from runnerd.client.feeding import StdinFeeder
from runnerd.client.pending import Unfollowed
from runnerd.client.session import Answer, Failure
from runnerd.protocol.answers import AttachAnswer, StartAnswer, WriteAnswer
from runnerd.protocol.exits import Exit
from runnerd.protocol.notes import ClosedNote, ExitedNote, GapNote, OutputNote, SupersededNote
from runnerd.protocol.requests import ExecCancel, ExecSignal, ExecStart, ExecWait

from .endings import REFUSED, SIGNAL_BASE, exit_code, say, say_gap, say_reconnecting
from .streams import DESCRIPTORS, write_all

if TYPE_CHECKING:
    from types import FrameType

    from runnerd.client.blocking import Client
    from runnerd.client.conversation import Occurrence
    from runnerd.client.errors import StreamLost
    from runnerd.protocol.fields import Params

PASSED_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
STDIN_BYTES: Final = 256 * 1024
BROKEN_PIPE_PATIENCE_S: Final = 1.0


class Passer:
    """Follows one exec until its exit.

    Args:
        client: The connection, used by this loop alone.
        owns: Whether the exec is ours, as for `run`: our signals and a reader that is gone are
            then passed on to it. Otherwise, as for `attach`, they only end the following.
        feeds: Whether to pass our standard input on.
    """

    def __init__(self, client: Client, *, owns: bool, feeds: bool) -> None:
        self._client = client
        self._owns = owns
        self._feeds = feeds
        self._exec_id: str | None = None
        self._nonce: str | None = None
        self._feeder: StdinFeeder | None = None
        self._resume_at_s: float | None = None
        self._exit: Exit | None = None
        self._is_in_client = False
        self._pending_signals: list[int] = []
        self._interrupts = 0
        self._broken_since_s: dict[str, float] = {}
        self._own_code: int | None = None

    @property
    def exit(self) -> Exit | None:
        """The command's exit, once it came."""
        return self._exit

    def follow(self, method: str, params: Params) -> int:
        """Start or attach, pass everything through, and return the exit code for the shell.

        Raises:
            ClientError: If the start or attach was refused, or the stream was lost.
        """
        if self._owns:
            self._catch_signals()
        if isinstance(params, ExecStart):
            params = self._client.prepared(params)
            self._nonce = params.nonce
        self._send(method, params)
        while self._exit is None and (self._own_code is None or self._owns):
            for event in self._receive():
                self._take(event)
            self._feed()
        if self._own_code is not None:
            return self._own_code
        assert self._exit is not None
        return exit_code(self._exit)

    def lost(self, lost: StreamLost) -> None:
        """Tell whoever watches that the connection was lost, and is being tried for again."""
        say_reconnecting(lost)

    # Events

    def _take(self, event: Occurrence) -> None:
        if isinstance(event, OutputNote):
            self._pass_output(event)
        elif isinstance(event, GapNote):
            say_gap(event)
        elif isinstance(event, SupersededNote):
            raise Superseded(event.exec_id, event.subscriber, event.generation)
        elif isinstance(event, Unfollowed):
            self._wait_for_exit(event)
        elif isinstance(event, ExitedNote):
            self._exit = event.exit
        elif isinstance(event, ClosedNote) and self._exit is None:
            raise ExitPassed(event.exec_id)
        elif isinstance(event, Failure):
            self._take_failure(event)
        elif isinstance(event, Answer):
            self._take_answer(event)

    def _take_answer(self, answer: Answer) -> None:
        result = answer.result
        if isinstance(result, StartAnswer):
            self._exec_id = result.exec_id
            if self._feeds:
                self._feeder = StdinFeeder(result.exec_id)
            self._send_signals()
        elif isinstance(result, Exit):
            self._exit = result
        elif isinstance(result, WriteAnswer) and self._feeder is not None:
            self._feeder.answered(result)
        else:
            assert not isinstance(result, AttachAnswer) or not self._owns

    def _wait_for_exit(self, event: Unfollowed) -> None:
        """Go on without the output: others have the room to read it, or it is no longer kept."""
        if not self._owns:
            raise event.error
        say(f"no more of the output can be shown: {event.error.message}")
        say(f"waiting for the exit; what is kept of the output: runnerctl logs {event.exec_id}")
        self._send("exec.wait", ExecWait(exec_id=event.exec_id))

    def _take_failure(self, failure: Failure) -> None:
        if failure.method in ("exec.signal", "exec.cancel"):
            # One that came too late has nothing left to do.
            if failure.error.kind != "exec_ended":
                say(failure.error.message)
        elif failure.method == "exec.write" and self._feeder is not None:
            self._feeder.failed(failure.error)
            if self._feeder.pause_s is not None:
                self._resume_at_s = time.monotonic() + self._feeder.pause_s
            if self._feeder.error is not None:
                say(f"standard input is no longer passed on: {failure.error.message}")
        else:
            raise failure.error

    # Output

    def _pass_output(self, note: OutputNote) -> None:
        if note.stream in self._broken_since_s:
            self._drop_output(note.stream)
            return
        try:
            write_all(DESCRIPTORS[note.stream], note.data)
        except OSError as error:
            self._lose_reader(note.stream, error)

    def _lose_reader(self, stream: str, error: OSError) -> None:
        self._broken_since_s[stream] = time.monotonic()
        if error.errno != errno.EPIPE:
            reason = (error.strerror or str(error)).lower()
            say(f"cannot write standard {'output' if stream == 'stdout' else 'error'}: {reason}")
            self._own_code = REFUSED
        elif not self._owns:
            self._own_code = SIGNAL_BASE + signal.SIGPIPE
        if self._owns and self._exec_id is not None:
            params = ExecSignal(exec_id=self._exec_id, signal=int(signal.SIGPIPE), to="group")
            self._send("exec.signal", params)

    def _drop_output(self, stream: str) -> None:
        if not self._owns or self._exec_id is None:
            return
        if time.monotonic() - self._broken_since_s[stream] < BROKEN_PIPE_PATIENCE_S:
            return
        # Once: the exec is then being ended, whatever it still prints.
        self._broken_since_s[stream] = float("inf")
        self._own_code = self._own_code or SIGNAL_BASE + signal.SIGPIPE
        self._send("exec.cancel", self._cancel_params(grace_s=None))

    # Input

    def _feed(self) -> None:
        if self._feeder is None:
            return
        if self._resume_at_s is not None and time.monotonic() >= self._resume_at_s:
            self._resume_at_s = None
            self._feeder.resume()
        if (write := self._feeder.next_write()) is not None:
            self._send("exec.write", write)

    def _read_stdin(self, feeder: StdinFeeder) -> None:
        try:
            data = os.read(0, STDIN_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EBADF and not os.isatty(0):
                self._lose_input(feeder, error)
                return
            data = b""  # not open to be read, or a terminal that hung up: it ends
        if data:
            feeder.offer(data)
        else:
            feeder.end()

    def _lose_input(self, feeder: StdinFeeder, error: OSError) -> None:
        # An end would tell the command that this was all.
        say(f"cannot read standard input: {(error.strerror or str(error)).lower()}")
        feeder.is_over = True
        self._own_code = REFUSED
        self._send("exec.cancel", self._cancel_params(grace_s=None))

    # The client

    def _send(self, method: str, params: Params) -> None:
        self._is_in_client = True
        try:
            self._client.send(method, params)
        finally:
            self._is_in_client = False
        self._send_signals()

    def _receive(self) -> list[Occurrence]:
        self._is_in_client = True
        try:
            events = self._client.receive_events(timeout_s=0)
        finally:
            self._is_in_client = False
        self._send_signals()
        if not events:
            self._wait()
        return events

    def _wait(self) -> None:
        poll = select.poll()
        wanted = select.POLLIN | (select.POLLOUT if self._client.unsent_bytes else 0)
        if self._client.fileno() >= 0:
            poll.register(self._client.fileno(), wanted)
        wakes = [at_s for at_s in (self._client.wake_at_s, self._resume_at_s) if at_s is not None]
        wait_ms: int | None = None
        if wakes:
            wait_ms = max(0, int((min(wakes) - time.monotonic()) * 1000) + 1)
        feeder = self._feeder
        if feeder is not None and feeder.wants_data:
            poll.register(0, select.POLLIN)
        for descriptor, _ in poll.poll(wait_ms):
            if descriptor == 0 and feeder is not None:
                self._read_stdin(feeder)

    # Signals

    def _catch_signals(self) -> None:
        for number in PASSED_SIGNALS:
            # What we were started to ignore (nohup, a background job of a plain shell) stays
            # ignored: it was not meant for the command either.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending_signals.append(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= (3 if self._exec_id is not None else 2):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self._is_in_client:
            self._send_signals()

    def _send_signals(self) -> None:
        while self._pending_signals and self._exec_id is not None and self._exit is None:
            number = self._pending_signals.pop(0)
            if number == signal.SIGINT and self._interrupts > 1:
                self._cancel()
            else:
                params = ExecSignal(exec_id=self._exec_id, signal=int(number), to="group")
                self._send("exec.signal", params)

    def _cancel(self) -> None:
        assert self._exec_id is not None
        at_once = self._interrupts > 2
        say("killing the command" if at_once else "cancelling; once more to kill at once")
        self._send("exec.cancel", self._cancel_params(grace_s=0 if at_once else None))

    def _cancel_params(self, grace_s: float | None) -> ExecCancel:
        assert self._exec_id is not None
        return ExecCancel(
            exec_id=self._exec_id,
            grace_s=grace_s,
            if_nonce=self._nonce,
            wait=False,
            tombstone=False,
        )
