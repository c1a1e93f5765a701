"""Screens to look at: panes of a tmux of the test's own, each a terminal of any size."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from typing import TYPE_CHECKING

from tests import needs
from tests.harness import REPOSITORY, wait_for, with_default_signals

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tmux:
    """One tmux server; its sessions are named by the test."""

    def __init__(self, socket: str) -> None:
        self._words = [needs.program("tmux"), "-u", "-f", "/dev/null", "-S", socket]

    def run(self, *words: str) -> str:
        """Run one command of tmux's and return what it prints."""
        env = {**os.environ, "LANG": "C.UTF-8", "PS1": "$ ", "HISTFILE": ""}
        return subprocess.run(
            [*self._words, *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            env=env,
            cwd=REPOSITORY,
            preexec_fn=with_default_signals,  # no threads here
        ).stdout

    def start(self, name: str, *words: str, cols: int = 80, rows: int = 24) -> None:
        """Run a program in a session of that size; the screen stays when it ends."""
        size = ["-x", str(cols), "-y", str(rows)]
        # One command line, so that no option comes too late for a program that ends at once.
        self.run(
            *["start-server", ";", "set", "-g", "status", "off", ";"],
            *["set", "-g", "remain-on-exit", "on", ";", "set", "-g", "escape-time", "0", ";"],
            *["new-session", "-d", "-s", name, *size, shlex.join(words)],
        )

    def keys(self, name: str, *keys: str) -> None:
        """Press keys; what is no key's name is typed."""
        self.run("send-keys", "-t", name, *keys)

    def resize(self, name: str, cols: int, rows: int) -> None:
        """Make a session's screen another size."""
        self.run("resize-window", "-t", name, "-x", str(cols), "-y", str(rows))

    def screen(self, name: str, *, colours: bool = False) -> str:
        """Return what is on a screen, with a last line for where the cursor is."""
        shown = self.run("capture-pane", "-p", *(["-e"] if colours else []), "-t", name)
        ask = "#{cursor_x},#{cursor_y} #{alternate_on} #{pane_width}x#{pane_height}"
        return shown.rstrip("\n") + "\n" + self.run("display-message", "-p", "-t", name, ask)

    def until(self, name: str, text: str, timeout_s: float = 20.0) -> str:
        """Wait until a text is on a screen, and return the screen."""
        shown = ""

        def look() -> bool:
            nonlocal shown
            shown = self.screen(name)
            return text in shown

        try:
            wait_for(look, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"no {text!r} on the screen:\n{shown}") from error
        return shown


@contextlib.contextmanager
def tmux(socket: str) -> Iterator[Tmux]:
    """Give a tmux whose programs all end with the test."""
    server = Tmux(socket)
    try:
        yield server
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            server.run("kill-server")
