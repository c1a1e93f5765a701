"""The daemon that a run of chaos is about: its small disk, its wall clock, what it must keep."""

from __future__ import annotations

import contextlib
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from runnerd.core.bounds import Bounds
from tests.chaos.checking import Log, Resources
from tests.daemon.looking import planted
from tests.harness import RunnerdProcess
from tests.raw import RawClient

DISK_MIB: Final = 24
FINISHED_MAX: Final = 64
OPTIONS: Final = (
    "--spool", "any", "--finished-execs-max", str(FINISHED_MAX), "--settled-execs-max", "256",
    "--stuck-reader-s", "2",
)  # fmt: skip
"""Small bounds: what grows until they are reached has stopped growing before the first round."""

_PLANTED: Final = """
import errno, mmap, os, struct, time
_file = os.open(os.environ.pop("CHAOS_SHARED"), os.O_RDWR)
_shared = mmap.mmap(_file, 16)
os.close(_file)
_real = time.time
time.time = lambda: _real() + struct.unpack_from("d", _shared)[0]

from runnerd.daemon.poller import Poller
_watch = Poller.watch
def _watch_or_fail(self, *args):
    left = struct.unpack_from("q", _shared, 8)[0]
    if left:
        struct.pack_into("q", _shared, 8, left - 1)
        raise OSError(errno.ENOMEM, "planted")
    _watch(self, *args)
Poller.watch = _watch_or_fail
"""


class Shared:
    """What is planted in the daemon and can be turned at any time: numbers in shared memory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "shared"
        self.path.write_bytes(bytes(16))
        with self.path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 16)

    def jump_clock(self, to_s: float) -> None:
        """Let the daemon's wall clock be wrong by so many seconds."""
        struct.pack_into("d", self._shared, 0, to_s)

    def refuse_watches(self, count: int) -> None:
        """Let the kernel have no memory for so many descriptors that are to be watched.

        strace cannot: the same system call also changes what is watched, which never fails.
        """
        struct.pack_into("q", self._shared, 8, count)

    @property
    def watches_to_refuse(self) -> int:
        """How many of them have not come yet."""
        return int(struct.unpack_from("q", self._shared, 8)[0])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Give a file system of its own with little room."""
    place = folder / "disk"
    place.mkdir()
    size = f"size={DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "chaos", str(place)], check=True)
    try:
        yield place
    finally:
        # Lazily: a daemon that a failed test leaves for a moment must not keep the mount.
        subprocess.run(["umount", "-l", str(place)], check=True)


class World:
    """One daemon over many rounds.

    Args:
        start: Starts daemons, see daemons().
        folder: For what commands write down.
        disk: A small file system for its state.
    """

    def __init__(self, start: Callable[..., RunnerdProcess], folder: Path, disk: Path) -> None:
        self.folder = folder
        self.disk = disk
        self.shared = Shared(folder)
        plant = planted(_PLANTED)
        plant["env"]["CHAOS_SHARED"] = str(self.shared.path)
        self.daemon = start(*OPTIONS, "--state-dir", str(disk / "state"), **plant)
        self.control = RawClient(self.daemon.socket_path)
        self.log = Log(self.daemon.log_path)
        self._fill()
        self.resources = Resources(self.daemon, self.control)

    def _fill(self) -> None:
        """Have it keep as much as it ever will, so that what it grows by afterwards is a leak."""
        for number in range(2 * FINISHED_MAX):
            argv = ["head", "-c", str(Bounds().tail_bytes_max + 65536), "/dev/zero"]
            self.control.call("exec.start", exec_id=f"fill{number}", argv=argv)
            self.control.call("exec.wait", exec_id=f"fill{number}", until="closed")

    def look(self) -> RawClient:
        """Return a connection that works: the last one may have met a fault."""
        try:
            self.control.call("ping")
        except Exception:  # noqa: BLE001 - whatever became of it
            self.control.sock.close()
            self.control = RawClient(self.daemon.socket_path)
            self.resources.client = self.control
        return self.control

    def close(self) -> None:
        """Let go of it; who started the daemon stops it."""
        self.control.sock.close()
        self.log.close()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        place = Path(name)
        place.chmod(0o755)
        yield place
