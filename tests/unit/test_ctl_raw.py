"""Signals that strike while runnerctl makes its terminal raw, or puts it back."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from runnerd.client.errors import ClientError
from runnerd.client.session import Answer
from runnerd.ctl import interactive
from runnerd.ctl.interactive import TerminalPasser
from runnerd.ctl.passing import PASSED_SIGNALS
from runnerd.protocol.answers import AttachAnswer, StartAnswer
from runnerd.protocol.notes import ExitedNote
from runnerd.protocol.requests import ExecAttach, ExecStart, Pty
from tests.unit.fake_daemon import make_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRIKES = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SIZE = (24, 80)
ANSWERS: dict[str, Any] = {
    "exec.start": StartAnswer(
        exec_id="x", pid=1, created=True, starts=1, oom_score_adj=None, subscription=1
    ),
    "exec.attach": AttachAnswer(
        subscription=1, state="running", pid=1, first_seq=1, last_seq=1, after=1
    ),
}


class FakeClient:
    """Answers the first request, then tells the exit, or that the connection is lost."""

    wake_at_s = None
    unsent_bytes = 0

    def __init__(self, *, breaks: bool) -> None:
        self.sent: list[str] = []
        self._breaks = breaks
        self._events: list[Any] = []

    def prepared(self, params: ExecStart) -> ExecStart:
        return params

    def fileno(self) -> int:
        return -1

    def send(self, method: str, _params: Any) -> None:
        if self._breaks and method not in ANSWERS:
            raise ClientError("lost")
        self.sent.append(method)
        if method in ANSWERS:
            self._events.append(Answer(1, method, ANSWERS[method]))

    def receive_events(self, timeout_s: float) -> list[Any]:
        assert timeout_s == 0
        if self._events:
            return [self._events.pop()]
        if self._breaks:
            raise ClientError("lost")
        return [ExitedNote(subscription=1, exec_id="x", seq=1, exit=make_exit(code=7))]


class StruckTerminal:
    """Stands for a raw terminal; signals strike where they do most harm."""

    is_raw = False
    size = SIZE
    at_enter: ClassVar[tuple[signal.Signals, ...]] = ()
    at_exit: ClassVar[tuple[signal.Signals, ...]] = ()

    def __init__(self, _on_continue: Callable[[], None]) -> None:
        pass

    def __enter__(self) -> None:
        StruckTerminal.is_raw = True
        for number in self.at_enter:
            StruckTerminal.size = (9, 9) if number == signal.SIGWINCH else SIZE
            signal.raise_signal(number)

    def pass_keys(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        StruckTerminal.size = (9, 9)
        for number in self.at_exit:
            signal.raise_signal(number)
        StruckTerminal.is_raw = False


@pytest.fixture(autouse=True)
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*PASSED_SIGNALS, signal.SIGWINCH)}
    monkeypatch.setattr(interactive, "RawTerminal", StruckTerminal)
    monkeypatch.setattr(interactive, "local_size", lambda: StruckTerminal.size)
    monkeypatch.setattr(StruckTerminal, "size", SIZE)
    monkeypatch.setattr(StruckTerminal, "is_raw", False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def follow(client: Any, verb: str) -> int:
    owns = verb == "run"
    passer = TerminalPasser(client, owns=owns, keys=b"", attached_to=None if owns else "x")
    if owns:
        return passer.follow("exec.start", ExecStart(argv=["x"], pty=Pty(rows=24, cols=80)))
    return passer.follow("exec.attach", ExecAttach(exec_id="x"))


@pytest.mark.parametrize("verb", ["run", "attach"])
@pytest.mark.parametrize("number", STRIKES)
@pytest.mark.parametrize("breaks", [False, True], ids=["exit", "loss"])
def test_a_signal_as_the_terminal_is_put_back_does_not_keep_it_raw(
    monkeypatch: pytest.MonkeyPatch, verb: str, number: signal.Signals, *, breaks: bool
) -> None:
    """After a loss a new size cannot be sent: that too must not keep it raw."""
    monkeypatch.setattr(StruckTerminal, "at_exit", (number,))
    client = FakeClient(breaks=breaks)
    if breaks:
        with pytest.raises(ClientError, match="lost"):
            follow(client, verb)
    else:
        assert follow(client, verb) == 7
    assert not StruckTerminal.is_raw


@pytest.mark.parametrize("verb", ["run", "attach"])
@pytest.mark.parametrize("number", STRIKES)
def test_a_signal_as_the_terminal_is_made_raw_does_not_keep_it_so(
    monkeypatch: pytest.MonkeyPatch, verb: str, number: signal.Signals
) -> None:
    """And none is forgotten: a new size is told, and whoever is to leave leaves, once it can be."""
    monkeypatch.setattr(StruckTerminal, "at_enter", (number,))
    client = FakeClient(breaks=False)
    code = follow(client, verb)
    assert not StruckTerminal.is_raw
    if number == signal.SIGWINCH:
        assert (code, client.sent[-1]) == (7, "exec.resize")
    elif number == signal.SIGINT and verb == "run":
        assert (code, client.sent) == (7, ["exec.start", "exec.signal"])
    else:
        told = ["exec.start", "exec.signal", "exec.detach"] if verb == "run" else ["exec.attach"]
        assert (code, client.sent) == (128 + number, told)
