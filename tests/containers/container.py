"""One container with runnerd in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runnerd.client.blocking import Client, connect, connect_command
from tests.harness import children, wait_for

from .images import AGENT, BUNDLE, CTL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine import Engine

SOCKET: Final = "/run/runnerd/runnerd.sock"
STATE_MIB: Final = 8
HARDENED: Final = (
    *("--read-only", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:size=16m"),
)
_CAPS: Final = [
    word for cap in ("SETUID", "SETGID", "KILL", "CHOWN") for word in ("--cap-add", cap)
]
AS_ROOT: Final[dict[str, Any]] = {
    "options": (*HARDENED, "--cap-drop", "ALL", *_CAPS),
    "serve": ("--user", "agent"),
}
"""The daemon is root with what it needs and nothing else; commands are somebody else."""
AS_AGENT: Final[dict[str, Any]] = {"options": (*HARDENED, "--cap-drop", "ALL"), "uid": AGENT}
"""All is one user, who has no capability."""
_NUMBERS: Final = itertools.count(1)


class Container:
    """A container that was started with runnerd as its program.

    Args:
        engine: Whose it is.
        image: The image's name.
        options: Further options of `docker run`.
        serve: Further options of `runnerd serve`.
        uid: Who the container's program is, and owns the socket's folder.
        tini: Whether PID 1 is tini, else runnerd itself.

    Attributes:
        name: The container's.
        folder: Where its socket is, here; there it is /run/runnerd.
    """

    def __init__(
        self,
        engine: Engine,
        image: str = "rd-bare",
        options: Sequence[str] = (),
        serve: Sequence[str] = (),
        uid: int = 0,
        *,
        tini: bool = True,
    ) -> None:
        self.engine = engine
        self._has_tini = tini
        self.name = f"rd-{os.getpid()}-{next(_NUMBERS)}"
        self.folder = engine.home / "run" / self.name
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        self.socket_path = str(self.folder / "runnerd.sock")
        shutil.chown(self.folder, uid, uid)
        engine.docker(
            *("run", "--detach", "--name", self.name, "--network", "none"),
            *("--user", f"{uid}:{uid}", "--volume", f"{self.folder}:/run/runnerd"),
            *("--tmpfs", f"/var/lib/runnerd:size={STATE_MIB}m,mode=0700,uid={uid},gid={uid}"),
            *options,
            *(() if tini else ("--entrypoint", f"{BUNDLE}/bin/runnerd")),
            *(image, *(() if tini else ("serve",)), "--socket", SOCKET),
            *("--state-dir", "/var/lib/runnerd", *serve),
        )

    def wait_ready(self) -> None:
        """Wait until somebody listens.

        Raises:
            AssertionError: With its log, if it ended first.
        """

        def is_ready() -> bool:
            with contextlib.suppress(OSError):
                return b"runnerd" in Path(f"/proc/{self.daemon_pid()}/cmdline").read_bytes() and (
                    Path(self.socket_path).exists()
                )
            assert self.state()["Running"], self.logs()
            return False

        wait_for(is_ready, 30)

    def connect(self, **options: Any) -> Client:
        """Connect by the socket, from outside."""
        return connect(self.socket_path, **options)

    def bridge_words(self, *options: str) -> list[str]:
        """Return the command that connects by the engine."""
        host = ["--host", f"unix://{self.engine.socket_path}"]
        return [self.engine.program, *host, "exec", "-i", *options, self.name, CTL, "bridge"]

    def connect_bridge(self, *options: str, **more: Any) -> Client:
        """Connect by the engine."""
        return connect_command(self.bridge_words(*options), **more)

    def exec(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command by the engine."""
        return self.engine.ask("exec", self.name, *words)

    def state(self) -> dict[str, Any]:
        """Return what the engine says of its state."""
        state: dict[str, Any] = json.loads(
            self.engine.docker("inspect", "--format", "{{json .State}}", self.name)
        )
        return state

    def pid(self) -> int:
        """Return the pid, here, of its PID 1."""
        pid: int = self.state()["Pid"]
        return pid

    def daemon_pid(self) -> int:
        """Return the pid, here, of its daemon."""
        if not self._has_tini:
            return self.pid()
        (found,) = children(self.pid())
        return found

    def group(self, controller: str) -> Path:
        """Return its cgroup of one controller of v1."""
        (found,) = (each for each in self.engine.groups() if each.parts[-3] == controller)
        return found

    def processes(self) -> set[int]:
        """Return the pids, here, of all that is in it, zombies too; none once it has ended."""
        if not self.engine.groups():
            return set()
        return set(map(int, (self.group("pids") / "cgroup.procs").read_text().split()))

    def logs(self) -> str:
        """Return what it logged."""
        done = self.engine.ask("logs", self.name)
        return (done.stdout + done.stderr).decode()

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines of one event."""
        lines = [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def events(self, since_s: float, kind: str) -> list[str]:
        """Return the engine's events of one kind since a time."""
        words = ["events", "--since", f"{since_s:.3f}", "--until", f"{time.time():.3f}"]
        more = ["--filter", f"container={self.name}", "--filter", f"event={kind}"]
        return self.engine.docker(*words, *more).splitlines()

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return int(self.engine.docker("wait", self.name))

    def stop(self) -> float:
        """Have the engine stop it; returns the seconds that took."""
        began_s = time.monotonic()
        self.engine.docker("stop", self.name)
        return time.monotonic() - began_s

    def remove(self) -> None:
        """Remove it, whatever it does."""
        self.engine.ask("rm", "--force", "--volumes", self.name)
        shutil.rmtree(self.folder, ignore_errors=True)
