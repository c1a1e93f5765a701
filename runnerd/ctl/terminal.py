"""The terminal this runnerctl was started in: its size, and its raw mode, put back on every path.

In raw mode every key goes to the command as it is (Ctrl-C too, once there is a command), and what
the command prints is shown as it is: its own terminal has done all there is to do. Signals are no
keys: TSTP puts the terminal back before this process stops, CONT makes it raw again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING, Final

from runnerd.client.errors import ClientError
from runnerd.protocol.fields import TERM_CHARS_MAX
from runnerd.protocol.requests import Pty

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Self

_STREAMS: Final = (0, 1, 2)
_LOCAL_FLAGS: Final = 3  # where tcgetattr(3) has them in its list


def local_pty() -> Pty:
    """Describe the terminal to ask for: this one's size and TERM, where it is one."""
    size = local_size()
    term = os.environ.get("TERM", "")
    if size is None or not 0 < len(term) <= TERM_CHARS_MAX or term == "dumb":
        term = Pty().term
    rows, cols = size or (Pty().rows, Pty().cols)
    return Pty(rows=rows, cols=cols, term=term)


def local_size() -> tuple[int, int] | None:
    """Return rows and columns of the terminal we were started in, or None."""
    for fd in _STREAMS:
        try:
            cols, rows = os.get_terminal_size(fd)
        except OSError:
            continue
        if rows and cols:
            return rows, cols
    return None


def need_terminal(preserved: str, hint: str) -> None:
    """Go on only where standard input is a terminal.

    Args:
        preserved: What is told of what we were to do otherwise.
        hint: What to do instead.

    Raises:
        ClientError: Where it is none.
    """
    if not os.isatty(0):
        raise ClientError(
            "-t with -i needs a terminal, and standard input is none",
            preserved=preserved,
            hint=hint,
        )


class RawTerminal:
    """Our terminal in raw mode, from `with` to its end, whatever ends it.

    Args:
        on_continue: Called once we go on after a stop; the size may be another one.
    """

    def __init__(self, on_continue: Callable[[], None]) -> None:
        self._on_continue = on_continue
        self._passes_keys = False
        self._before = termios.tcgetattr(0)

    def __enter__(self) -> Self:
        self._make_raw()
        signal.signal(signal.SIGTSTP, self._stop)
        signal.signal(signal.SIGCONT, self._continue)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self.restore()

    def pass_keys(self) -> None:
        """Let every key through from now on: until then Ctrl-C and its like are signals for us."""
        self._passes_keys = True
        self._make_raw()

    def _make_raw(self) -> None:
        with contextlib.suppress(termios.error):  # it hung up, of which HUP and CONT tell together
            # Now, not TCSAFLUSH as is usual: keys pressed already are meant for the command.
            tty.setraw(0, termios.TCSANOW)
            if not self._passes_keys:
                mode = termios.tcgetattr(0)
                mode[_LOCAL_FLAGS] |= termios.ISIG
                termios.tcsetattr(0, termios.TCSANOW, mode)
        if sys.stderr is not None:
            sys.stderr.reconfigure(newline="\r\n")  # type: ignore[union-attr]

    def restore(self) -> None:
        """Put the terminal back as it was found."""
        with contextlib.suppress(termios.error):  # it hung up: there is nothing to put back
            termios.tcsetattr(0, termios.TCSANOW, self._before)
        if sys.stderr is not None:
            sys.stderr.reconfigure(newline="\n")  # type: ignore[union-attr]

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.restore()
        # By its default action, so that our shell sees what it expects.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(signal.SIGTSTP, self._stop)
        # Nobody could continue an orphaned process group, so the kernel does not stop it either.
        self._make_raw()

    def _continue(self, _number: int, _frame: FrameType | None) -> None:
        self._make_raw()
        self._on_continue()
