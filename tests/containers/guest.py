"""A small machine with a real cgroup v2: Debian's cloud kernel under qemu, and this checkout in it.

Its root is an initramfs made of what this machine runs already: the interpreter with its standard
library, what the tests import, the checkout, a shell and coreutils, and the libraries of all that.
So nothing is downloaded but the kernel, once; no virtualisation by the processor is needed (it is
emulated, and some ten times slower); nothing is mounted or left on this machine.

Format of the archive: Documentation/driver-api/early-userspace/buffer-format.rst of Linux ("newc").
"""

from __future__ import annotations

import compileall
import fcntl
import gzip
import importlib.metadata
import os
import re
import select
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement

from tests import needs
from tests.harness import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE: Final = Path(sys.prefix) / "guest"
KERNEL_PACKAGE: Final = "linux-image-cloud-amd64"
BOOT_S: Final = 120.0
"""How long it may take to say UP, which it does after 3 s, or 20 on a busy machine."""
BOOTS_MAX: Final = 3
RUN_S: Final = 700.0
MEMORY_MIB: Final = 1500
UP: Final = "guest: up"
END: Final = "guest: over, "
_OPTIONS: Final = "-v --color=no --tb=short -p no:cacheprovider -W default"
_PACKAGES: Final = (
    *("trio", "msgspec", "psutil", "prometheus-client"),
    *("pytest-trio", "pytest-timeout"),
)
_PROGRAMS: Final = ("sh", "sleep", "cat", "env", "mount", "mkdir", "ln")
_NOT_OF_THE_LIBRARY: Final = re.compile(
    r"(test|idlelib|tkinter|lib2to3|ensurepip|turtledemo|config-.*|(site|dist)-packages)$"
)

INIT: Final = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/checkout:/site
mount -t proc proc /proc; echo 1 > /proc/sys/kernel/printk; echo "{up}"
mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts /run; ln -s /proc/self/fd /dev/fd
mount -t tmpfs shm /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs run /run
mount -t tmpfs -o mode=1777 tmp /tmp; mount -t cgroup2 cgroup2 /sys/fs/cgroup
cd /checkout
export CI=true RUNNERD_GUEST=1 RUNNERD_TEST_PATIENCE=10
{python} -m pytest {options} {tests} 2>&1
echo "{end}$?"
echo o > /proc/sysrq-trigger
sleep 100
"""


class Archive:
    """A cpio archive in the newc format, written to a stream; parents come by themselves."""

    def __init__(self, to: gzip.GzipFile) -> None:
        self._to = to
        self._names: set[str] = set()

    def add(self, path: Path, name: str | None = None) -> None:
        """Add a file, as another name or its own; a link's target comes with it."""
        name = (name or str(path)).lstrip("/")
        if name in self._names:
            return
        if path.is_symlink():
            target = path.parent / path.readlink()
            self._parents(name)
            self._entry(name, stat.S_IFLNK | 0o777, os.fsencode(path.readlink()))
            if target.is_file():
                self.add(target, None if name == str(path).lstrip("/") else os.path.normpath(
                    f"/{Path(name).parent}/{path.readlink()}"
                ))  # fmt: skip
            return
        mode = stat.S_IFREG | (0o755 if os.access(path, os.X_OK) else 0o644)
        self.text(name, path.read_bytes(), mode, int(path.stat().st_mtime))

    def text(self, name: str, data: bytes, mode: int, modified: int = 0) -> None:
        """Add a file of these bytes."""
        self._parents(name)
        self._entry(name, mode, data, modified)

    def folder(self, name: str) -> None:
        """Add a folder."""
        if name and name not in self._names:
            self._parents(name)
            self._entry(name, stat.S_IFDIR | 0o755, b"")

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        if name not in self._names:
            self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def close(self) -> None:
        """Write the end of it."""
        self._entry("TRAILER!!!", 0, b"")

    def _parents(self, name: str) -> None:
        parent = str(Path(name).parent)
        if parent != ".":
            self.folder(parent)

    def _entry(self, name: str, mode: int, data: bytes, modified: int = 0) -> None:
        self._names.add(name)
        named = name.encode() + b"\0"
        numbers = (len(self._names), mode, 0, 0, 1, modified, len(data), 0, 0, 0, 0, len(named), 0)
        head = b"070701" + b"".join(b"%08x" % number for number in numbers) + named
        self._to.write(head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))


def run(tests: str) -> str:
    """Run tests of this checkout in the guest; return what it printed.

    An emulated kernel sometimes stops in its first second (seen once in some 700 boots, without a
    word): one that does not come up is booted again. Once it is up, what happens counts.

    Raises:
        AssertionError: If the guest did not come up, or not to its end.
    """
    qemu = needs.program("qemu-system-x86_64", "qemu-system-x86")
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kernel = _kernel()
        image = CACHE / "initrd.gz"
        with gzip.open(image, "wb", compresslevel=1) as file:
            _fill(Archive(file), tests)
        words = [
            *(qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
            *("-m", str(MEMORY_MIB), "-nographic", "-nodefaults", "-serial", "stdio"),
            *("-monitor", "none", "-no-reboot", "-kernel", str(kernel), "-initrd", str(image)),
            *("-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1 rdinit=/init"),
        ]
        printed = _boot(words)
        image.unlink()
    assert END in printed, f"the guest did not end:\n{printed[-4000:]}"
    return printed


def _boot(words: list[str]) -> str:
    for number in range(1, BOOTS_MAX + 1):
        printed = _printed_by(words)
        if UP in printed:
            return printed
        print(f"boot {number} of {BOOTS_MAX} did not come up:\n{printed[-4000:]}")
    raise AssertionError(f"the guest did not come up, {BOOTS_MAX} times; see what was printed")


def _printed_by(words: list[str]) -> str:
    """Return what it printed until it ended, did not come up in time, or took too long."""
    printed = bytearray()
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        up, until_s = UP.encode(), time.monotonic() + BOOT_S
        is_up = False
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], left_s)[0]:
                continue
            got = os.read(process.stdout.fileno(), 1 << 16)
            if not got:
                break
            printed += got
            if not is_up and up in printed:
                is_up, until_s = True, time.monotonic() + RUN_S
        process.kill()
    return printed.decode(errors="replace").replace("\r\n", "\n")


def _kernel() -> Path:
    found = list(CACHE.glob("kernel/boot/vmlinuz-*"))
    if not found:
        needs.program("apt-get")
        folder = CACHE / "kernel"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not _download_kernel(folder):
            subprocess.run(["apt-get", "-qq", "update"], check=False)
            if not _download_kernel(folder):
                needs.skip_or_fail(f"needs Debian's {KERNEL_PACKAGE}, and apt has none")
        (deb,) = folder.glob("*.deb")
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as tar:
            words = ["tar", "-x", "-C", str(folder), "--wildcards", "./boot/vmlinuz-*"]
            subprocess.run(words, stdin=tar.stdout, check=True)
        deb.unlink()
        found = list(CACHE.glob("kernel/boot/vmlinuz-*"))
    return found[0]


def _download_kernel(folder: Path) -> bool:
    words = ["apt-cache", "depends", "--no-suggests", KERNEL_PACKAGE]
    listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    package = re.search(r"Depends: (linux-image-\S+)", listed)
    if package is None:
        return False
    words = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package[1]]
    return subprocess.run(words, cwd=folder, check=False).returncode == 0


def _fill(archive: Archive, tests: str) -> None:
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "var/lib"):
        archive.folder(name)
    for name in ("bin", "sbin", "lib", "lib64"):
        archive.folder(f"usr/{name}")
        if Path(f"/{name}").is_symlink():  # /usr merged, as Debian is
            archive.link(name, f"usr/{name}")
    archive.text("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", stat.S_IFREG | 0o644)
    python = Path(os.path.realpath(sys.executable))
    loaded = [python, *(Path(needs.program(name)) for name in _PROGRAMS)]
    library = list(_library(Path(sysconfig.get_path("stdlib"))))
    for path in [*loaded, *library]:
        archive.add(path)
    modules = [path for path in [*library, *_add_site(archive)] if ".so" in path.suffixes]
    for path in _libraries([*loaded, *modules]):
        archive.add(path)
    _add_checkout(archive)
    words = {"python": python, "options": _OPTIONS, "tests": tests, "up": UP, "end": END}
    init = INIT.format(**words)
    archive.text("init", init.encode(), stat.S_IFREG | 0o755)
    archive.close()


def _library(top: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not _NOT_OF_THE_LIBRARY.match(name)]
        for name in files:
            if not name.endswith((".a", ".exe")):
                yield Path(folder, name)


def _add_site(archive: Archive) -> list[Path]:
    """Add what the tests import, as /site; return where it is on this machine."""
    waiting, seen, added = list(_PACKAGES), set[str](), list[Path]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for line in distribution.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
        for file in distribution.files or []:
            path = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and path.is_file():
                archive.add(path, f"site/{file}")
                added.append(path)
    return added


def _add_checkout(archive: Archive) -> None:
    archive.add(REPOSITORY / "pyproject.toml", "checkout/pyproject.toml")
    for folder in (REPOSITORY / "runnerd", REPOSITORY / "tests"):
        compileall.compile_dir(folder, quiet=2)  # ten times faster here than in there
        for path in folder.rglob("*"):
            if path.is_file():
                archive.add(path, f"checkout/{path.relative_to(REPOSITORY)}")


def _libraries(elves: list[Path]) -> list[Path]:
    """Return the shared libraries of programs, and who loads them. Source: ldd(1)."""
    done = subprocess.run(["ldd", *map(str, elves)], capture_output=True, text=True, check=False)
    found = re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)
    return [Path(each) for each in sorted(set(found))]
