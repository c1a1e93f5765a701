"""Drive the native guard, which holds the stop deadline whatever state Python is in.

`guard.so` (shim/guard.c) installs the handlers for TERM, INT, HUP and QUIT itself: they need no
GIL, no memory and no thread. The first cause, a signal or `arm`, fixes the exit code, starts the
timer that ends the process, ends the lifeline, so that every shim begins to end its tree, and
wakes the loop through a pipe. Where it cannot be loaded, a Python thread and a kernel timer
stand in, which a busy interpreter can delay; `daemon.info` says so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from runnerd.core.bounds import STOP_DEADLINE_S

LIBRARY: Final = Path(__file__).parent.parent / "_native" / "guard.so"
CAUSE_STOP: Final = 1001  # daemon.stop; below 65 a cause is a signal's number
CAUSE_ERROR: Final = 1002
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Sender(NamedTuple):
    """Who sent the signal that began the stop.

    Attributes:
        pid: 0 = a process beyond our pid namespace.
        uid: Its real uid.
        comm: Its name, chosen by itself; None where it was gone or cannot be seen.
    """

    pid: int
    uid: int
    comm: str | None


class Guard(Protocol):
    """What the rest of the daemon sees of it.

    Attributes:
        kind: native, or fallback with the reason.
        lifeline: The end that shims are given.
        wake_fd: Readable once something happened: a cause came, or a signal was refused.
    """

    kind: str
    lifeline: socket.socket
    wake_fd: int

    def arm(self, code: int, cause: int) -> bool:
        """Begin the stop with this exit code; False if a cause came first."""

    def cause(self) -> int | None:
        """Return what began the stop, or None."""

    def sender(self) -> Sender | None:
        """Return who sent the signal; None where it was none, or one of the kernel's (Ctrl-C)."""

    def armed_s(self) -> float:
        """Return when the stop began, on the monotonic clock; 0 before that."""

    def code(self) -> int:
        """Return the exit code that was fixed."""

    def hold(self) -> None:
        """Take the signals back from whoever has set a handler for them since."""

    def refused(self) -> tuple[int, int, int]:
        """Return how many signals from our own descendants were refused, the last and its pid."""


class NativeGuard:
    """The guard as it should be. See Guard."""

    kind = "native"

    def __init__(self, library: Path = LIBRARY) -> None:
        self._library = ctypes.CDLL(str(library))
        self._armed = ctypes.c_int.in_dll(self._library, "guard_armed")  # asked at every exit
        self._lifeline, self.lifeline = socket.socketpair()
        self.wake_fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # trio asks "is this the main thread?" by setting SIGINT to what Python believes it is,
        # over our own handler; with Python's default there, it would even take SIGINT over. So
        # Python is given a handler that does the same, if later, until hold() is called.
        signal.signal(signal.SIGINT, lambda number, _frame: self._on_signal(number))
        setup = self._library.guard_setup
        setup.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long)
        status = setup(self._lifeline.fileno(), self._wake, int(STOP_DEADLINE_S * 1e9))
        if status < 0:
            raise OSError(-status, os.strerror(-status))
        # The one thread that never blocks these signals, also while the main one has them
        # blocked inside posix_spawn; it never comes back for the GIL.
        threading.Thread(target=self._library.guard_park, name="guard", daemon=True).start()

    def _on_signal(self, number: int) -> None:
        self.arm(0, number)

    def _read(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def arm(self, code: int, cause: int) -> bool:
        """See Guard."""
        return bool(self._library.guard_arm(code, cause))

    def cause(self) -> int | None:
        """See Guard."""
        return self._read("guard_cause") if self._armed.value else None

    def sender(self) -> Sender | None:
        """See Guard."""
        if not self._armed.value or not self._read("guard_sender_known"):
            return None
        comm = (ctypes.c_char * 16).in_dll(self._library, "guard_sender_comm").value
        return Sender(
            self._read("guard_sender_pid"),
            self._read("guard_sender_uid"),
            comm.decode("utf-8", "replace") or None,
        )

    def armed_s(self) -> float:
        """See Guard."""
        return ctypes.c_long.in_dll(self._library, "guard_armed_ns").value / 1e9

    def code(self) -> int:
        """See Guard."""
        return self._read("guard_code")

    def hold(self) -> None:
        """See Guard."""
        status = self._library.guard_hold()
        if status < 0:
            raise OSError(-status, os.strerror(-status))

    def refused(self) -> tuple[int, int, int]:
        """See Guard."""
        return (
            self._read("guard_refused_total"),
            self._read("guard_refused_signal"),
            self._read("guard_refused_pid"),
        )


class FallbackGuard:
    """What stands in where the native one cannot be loaded. See Guard.

    The thread needs the GIL, so a busy interpreter can delay it; the kernel timer behind it ends
    the process by SIGALRM then, late and with the wrong status, but it ends it.
    """

    def __init__(self, reason: str) -> None:
        self.kind = f"fallback: {reason}"
        self._lifeline, self.lifeline = socket.socketpair()
        self.wake_fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._cause: int | None = None
        self._code = 0
        self._armed_s = 0.0
        self._armed = threading.Event()
        self._once = threading.Lock()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda signum, _frame: self._on_signal(signum))
        threading.Thread(target=self._hold, name="guard", daemon=True).start()

    def _on_signal(self, number: int) -> None:
        self.arm(0, number)

    def _hold(self) -> None:
        self._armed.wait()
        time.sleep(STOP_DEADLINE_S)
        os._exit(self._code)

    def arm(self, code: int, cause: int) -> bool:
        """See Guard."""
        if not self._once.acquire(blocking=False):
            return False
        self._code, self._armed_s, self._cause = code, time.monotonic(), cause
        signal.setitimer(signal.ITIMER_REAL, STOP_DEADLINE_S + 0.2)
        self._lifeline.shutdown(socket.SHUT_RDWR)
        self._armed.set()
        os.write(self._wake, b"!")
        return True

    def cause(self) -> int | None:
        """See Guard."""
        return self._cause

    def sender(self) -> Sender | None:
        """See Guard. Python's handlers are not told."""
        return None

    def armed_s(self) -> float:
        """See Guard."""
        return self._armed_s

    def code(self) -> int:
        """See Guard."""
        return self._code

    def hold(self) -> None:
        """See Guard. Python's own handlers stand here, and trio leaves those as they are."""

    def refused(self) -> tuple[int, int, int]:
        """See Guard."""
        return 0, 0, 0


def set_up_guard() -> Guard:
    """Install the native guard, or what stands in for it."""
    try:
        return NativeGuard()
    except (OSError, AttributeError) as error:
        return FallbackGuard(str(error))


def cause_name(cause: int) -> str:
    """Return SIGTERM for 15, daemon.stop or error for the causes that are no signal."""
    if cause == CAUSE_STOP:
        return "daemon.stop"
    if cause == CAUSE_ERROR:
        return "error"
    return signal.Signals(cause).name
