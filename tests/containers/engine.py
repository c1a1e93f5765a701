"""A real Docker Engine for the tests: Debian's own, unpacked into a folder, gone after the run.

    python3 tests/containers/engine.py sweep      clears what a killed run has left

Nothing is installed. Each engine lives in a folder `rd-engine-*` below the folder for temporary
files, with its socket, its images and a file that says whose it is; its containers are in a cgroup
of that name. An engine that loses its owner is told to end by the kernel; one that was killed
leaves containers, mounts and cgroups behind, which the next run, or `sweep`, clears.

This file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES: Final = ("docker.io", "containerd", "runc")
PREFIX: Final = "rd-engine-"
CGROUPS: Final = Path("/sys/fs/cgroup")
START_S: Final = 20.0
STOP_S: Final = 15.0


class EngineError(RuntimeError):
    """The engine cannot be had here; the message says why."""


def fetch(into: Path) -> None:
    """Download the engine's packages and unpack them, unless that was done.

    Raises:
        EngineError: If they cannot be had.
    """
    if (into / "usr/sbin/dockerd").exists():
        return
    made = into.with_name(into.name + ".new")
    shutil.rmtree(made, ignore_errors=True)
    (made / "debs").mkdir(parents=True)
    download(["download", *PACKAGES], made / "debs")
    for package in (made / "debs").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(made)], check=True)
    shutil.rmtree(made / "debs")
    made.rename(into)


def download(words: list[str], folder: Path) -> None:
    """Run apt-get in a folder; a machine that never updated its lists does so first.

    Raises:
        EngineError: If it fails after that too.
    """
    apt = ["apt-get", "-qq", "-o", "Acquire::Retries=3", "-o", "APT::Sandbox::User=root"]
    if shutil.which("apt-get") is None:
        raise EngineError("no apt-get here, and the engine comes from Debian")
    done = subprocess.run([*apt, *words], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        subprocess.run([*apt, "update"], capture_output=True, check=False)
        done = subprocess.run([*apt, *words], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise EngineError(f"apt-get {words[0]}: {done.stderr.decode(errors='replace').strip()}")


class Engine:
    """One engine that runs.

    Args:
        programs: What fetch() unpacked.

    Attributes:
        home: Its folder.
        socket_path: Where its API listens.
        group: The name of its cgroup in each hierarchy.
    """

    def __init__(self, programs: Path) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=PREFIX))
        # In memory: thousands of small files are made and removed for each run of the tests.
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4g,mode=0711", PREFIX, str(self.home)], check=True
        )
        self.socket_path = str(self.home / "docker.sock")
        self.group = self.home.name
        (self.home / "owner").write_text(_identity(os.getpid()))
        (self.home / "config").mkdir()  # of the command line, so that nobody's own is read
        # Else a key is written to /etc/docker.
        (self.home / "daemon.json").write_text(f'{{"deprecated-key-path": "{self.home}/key"}}')
        bin_path = f"{programs}/usr/bin:{programs}/usr/sbin:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": bin_path,
            "DOCKER_HOST": f"unix://{self.socket_path}",
            "DOCKER_CONFIG": str(self.home / "config"),
            "DOCKER_BUILDKIT": "0",
        }
        self.program = str(programs / "usr/bin/docker")
        words = [
            *("setpriv", "--pdeathsig", "TERM", str(programs / "usr/sbin/dockerd")),
            *("--config-file", f"{self.home}/daemon.json", "--data-root", f"{self.home}/data"),
            *("--exec-root", f"{self.home}/exec", "--pidfile", f"{self.home}/docker.pid"),
            *("--host", f"unix://{self.socket_path}", "--cgroup-parent", f"/{self.group}"),
            *("--exec-opt", "native.cgroupdriver=cgroupfs", "--bridge=none", "--iptables=false"),
            *("--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
        ]
        with (self.home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self.process.poll() is not None:
                break
            if Path(self.socket_path).exists() and self.ask("version").returncode == 0:
                return
            time.sleep(0.02)
        said = (self.home / "log").read_text(errors="replace")[-2000:]
        raise EngineError(f"dockerd did not get ready:\n{said}")

    def ask(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[bytes]:
        """Run `docker` and return its exit code and what it printed."""
        return subprocess.run(
            [self.program, *words],
            env=self.environment,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def docker(self, *words: str, timeout_s: float = 60) -> str:
        """Run `docker`, which has to succeed, and return what it printed.

        Raises:
            AssertionError: With what it said, if it failed.
        """
        done = self.ask(*words, timeout_s=timeout_s)
        assert done.returncode == 0, (words, done.returncode, done.stderr.decode())
        return done.stdout.decode().strip()

    def groups(self) -> list[Path]:
        """Return the cgroups of its containers, in every hierarchy."""
        return [each for top in _group_tops(self.group) for each in top.iterdir() if each.is_dir()]

    def mounts(self) -> list[str]:
        """Return the mounts below its folder."""
        return _mounts(self.home)

    def stop(self) -> None:
        """End it and all that is its; also after it was killed."""
        sweep(self.home)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def sweep_stale() -> None:
    """Clear away each engine whose owner has ended."""
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = ""
        with contextlib.suppress(OSError):
            owner = (home / "owner").read_text()
        if not owner or _identity(int(owner.split()[0])) != owner:
            sweep(home)


def sweep(home: Path) -> None:
    """Clear one engine away: processes, containers, mounts, cgroups and its folder."""
    _end_engine(home)
    _until(STOP_S, lambda: not _kill_all(home))
    for place in [*sorted(_mounts(home), reverse=True), str(home)]:
        # Lazily: what still has it open is being killed.
        subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
    for top in _group_tops(home.name):
        _until(5, functools.partial(_remove_group, top))
    shutil.rmtree(home, ignore_errors=True)


def _end_engine(home: Path) -> None:
    """Ask dockerd to end, which ends its containers, and wait for it."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((home / "docker.pid").read_text())
        if str(home) not in _cmdline(pid):
            return
        # Its own way gives each container ten seconds: they are ended first.
        _kill_in_groups(home.name)
        os.kill(pid, signal.SIGTERM)
        _until(STOP_S, lambda: not _is_alive(pid))


def _kill_all(home: Path) -> bool:
    """Kill what belongs to it; whether there was anything."""
    found = _kill_in_groups(home.name)
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit() and f"{home}/" in _cmdline(int(entry)) and int(entry) != os.getpid():
            found = _kill(int(entry)) or found
    return found


def _kill_in_groups(name: str) -> bool:
    found = False
    for top in _group_tops(name):
        for procs in top.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    found = _kill(int(pid)) or found
    return found


def _kill(pid: int) -> bool:
    if not _is_alive(pid):
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    return True


def _remove_group(top: Path) -> bool:
    for path, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106
    return not top.exists()


def _group_tops(name: str) -> Iterator[Path]:
    """Give the engine's cgroup of each hierarchy of v1, or the one of v2."""
    for top in (CGROUPS / name, *(each / name for each in CGROUPS.iterdir())):
        if top.is_dir():
            yield top


def _mounts(home: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [place for place in (line.split()[1] for line in lines) if f"{home}/" in place]


def _identity(pid: int) -> str:
    """Return what tells a process from a later one of the same number; empty = there is none."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return f"{pid} {stat.rpartition(')')[2].split()[19]}"  # starttime, proc(5)
    return ""


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return ""


def _until(seconds: float, is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + seconds
    while not is_done() and time.monotonic() < until_s:
        time.sleep(0.02)


if __name__ == "__main__":
    assert sys.argv[1:] == ["sweep"], __doc__
    sweep_stale()
