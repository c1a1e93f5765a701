"""A root directory with the bundle and what a test puts there, and a daemon in it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runnerd.client.blocking import Client, connect

from .bundles import built_bundle
from .harness import READY_S, STOP_S, children

if TYPE_CHECKING:
    from collections.abc import Mapping

BUNDLE: Final = "/opt/runnerd"
SOCKET: Final = "/run/runnerd/runnerd.sock"

# A mount and a pid namespace of its own: the mounts go with it, and its first process is PID 1.
_ENTER: Final = """
set -e
mount --bind "$1" "$2/opt/runnerd"
mount --bind /dev/null "$2/dev/null"
mount -t proc proc "$2/proc"
root=$2 user=$3
shift 3
exec chroot --userspec="$user" "$root" "$@"
"""


class BareRoot:
    """A root directory, as an image would be.

    Args:
        path: Where to make it; short, for a socket's path has room for 107 bytes.
        user: Who everything in it runs as, UID:GID.
    """

    def __init__(self, path: Path, user: str = "0:0") -> None:
        self.path = path
        self.user = user
        for name in ("proc", "dev", "etc", "tmp", "run", "opt/runnerd"):
            (path / name).mkdir(parents=True)
        (path / "dev" / "null").touch()
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, *programs: str) -> None:
        """Copy programs of this machine and the libraries they need, to the same places."""
        for program in programs:
            said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
            words = [word for word in said.stdout.split() if word.startswith("/")]
            for name in (program, *words):
                target = Path(f"{self.path}/{name}")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(os.path.realpath(name), target)

    def write(self, name: str, text: str) -> None:
        """Write a file of the image."""
        target = Path(f"{self.path}/{name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def enter(self, *words: str) -> list[str]:
        """Return the words that run a command in it, as PID 1 of a namespace."""
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        places = (str(built_bundle()), str(self.path), self.user)
        return [*namespaces, "sh", "-c", _ENTER, "sh", *places, *words]

    def run_beside(self, *words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
        """Run a command in it beside the daemon, as an engine's exec does."""
        uid, gid = self.user.split(":")
        inside = ["nsenter", "--target", str(self.first_process()), "--mount", "--root", "--wd=/"]
        return subprocess.run(
            [*inside, f"--setuid={uid}", f"--setgid={gid}", *words],
            env={"PATH": os.environ["PATH"], **env},
            capture_output=True,
            check=False,
            timeout=STOP_S,
        )

    def serve(self, *options: str, init: bool = True, env: Mapping[str, str]) -> None:
        """Start a daemon in it, under tini or as PID 1, with this environment and no other."""
        read_fd, write_fd = os.pipe()
        words = [f"{BUNDLE}/bin/runnerd", "serve", "--ready-fd", str(write_fd), *options]
        if init:
            words = [f"{BUNDLE}/bin/tini", "--", *words]
        with (self.path / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.enter(*words),
                env={"PATH": os.environ["PATH"], **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
            )
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as ready:
            readable, _, _ = select.select([ready], [], [], READY_S)
            said = os.read(ready.fileno(), 100) if readable else b""
        assert said == b"ready\n", (self.path / "log").read_text()

    def connect(self) -> Client:
        """Return a new connection, from outside."""
        return connect(f"{self.path}{SOCKET}")

    def first_process(self) -> int:
        """Return the pid of its PID 1."""
        assert self.process is not None
        (pid,) = children(self.process.pid)
        return pid

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        assert self.process is not None
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """End what still runs in it.

        By its PID 1: what --kill-child asks of the kernel is forgotten by whoever becomes another
        user, prctl(2), PR_SET_PDEATHSIG.
        """
        if self.process is not None:
            for pid in children(self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.wait(STOP_S)
