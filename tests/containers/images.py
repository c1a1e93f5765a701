"""The images that containers are made from: a small Debian, with runnerd's bundle in it.

    rd-bare       Debian without a Python; uid 1000 is `agent`
    rd-python     the same with Debian's Python 3
    rd-broken     a python3 first on PATH that fails
    rd-hostile    an environment that breaks every Python and loads a library into every program

The packages are downloaded by apt and only unpacked: nothing in them is run, so it takes seconds.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bundles import built_bundle
from tests.harness import REPOSITORY

from . import engine

if TYPE_CHECKING:
    from .engine import Engine

KEPT: Final = REPOSITORY / ".venv-engine"
BUNDLE: Final = "/opt/runnerd"
CTL: Final = f"{BUNDLE}/bin/runnerctl"
ENTRYPOINT: Final = f'["{BUNDLE}/bin/tini","--","{BUNDLE}/bin/runnerd","serve"]'
BARE: Final = (
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "procps", "util-linux"),
    "usr-is-merged",
)
LEFT_OUT: Final = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info")
AGENT: Final = 1000

EAT: Final = r"""
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) { /* eat PROCESSES MIB: that many, that much each */
    for (int i = atoi(argv[1]); i > 1; i--)
        if (fork() == 0) break;
    for (int i = atoi(argv[2]); i > 0; i--) {
        char *page = malloc(1 << 20);
        if (page == NULL) return 1;
        for (int at = 0; at < 1 << 20; at += 4096) page[at] = 1;
    }
    sleep(60);
    return 0;
}
"""

PRELOAD: Final = r"""
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) { /* runnerd must not have it */
    char path[64] = "";
    readlink("/proc/self/exe", path, sizeof path - 1);
    if (strncmp(path, "/opt/runnerd/", 13) == 0) _exit(99);
}
"""

HOSTILE: Final = (
    *("PYTHONHOME=/evil", "PYTHONPATH=/evil", "PYTHONSTARTUP=/evil/os.py", "PYTHONMALLOC=nonsense"),
    *("LD_PRELOAD=/evil/preload.so", "LD_LIBRARY_PATH=/evil", "LC_ALL=nowhere", "PYTHONUTF8=7"),
)


def fetch_packages() -> tuple[Path, Path]:
    """Download what the images are made of; returns the folders without and with Python."""
    KEPT.mkdir(exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be at it
        bare = _fetch(KEPT / "debian", BARE)
        return bare, _fetch(KEPT / "debian-python", (*BARE, "python3"))


def _fetch(into: Path, packages: tuple[str, ...]) -> Path:
    if into.is_dir():
        return into
    new = into.with_name(into.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "partial").mkdir(parents=True)
    (new / "status").touch()  # nothing is installed there: apt finds all that is needed
    where = ["-o", f"Dir::State::status={new}/status", "-o", f"Dir::Cache::archives={new}"]
    quiet = ["-o", "Debug::NoLocking=1", "--download-only", "--no-install-recommends", "--yes"]
    engine.download([*where, *quiet, "install", *packages], new)
    new.rename(into)
    return into


def unpack(packages: list[Path], root: Path) -> None:
    """Unpack packages into a folder whose /bin and /lib are those of /usr."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    without = [word for place in LEFT_OUT for word in ("--exclude", place)]
    for package in packages:
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
        ) as unpacked:
            subprocess.run(
                ["tar", "-x", "-C", str(root), "--keep-directory-symlink", *without],
                stdin=unpacked.stdout,
                check=True,
            )
        assert unpacked.returncode == 0, package


def compile_c(source: str, out: Path, *options: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["gcc", "-O1", "-x", "c", "-", "-o", str(out), *options]
    subprocess.run(words, input=source.encode(), check=True)


def make(running: Engine) -> None:
    """Make all four."""
    folder = running.home / "images"
    without, with_python = fetch_packages()
    bare = sorted(without.glob("*.deb"))
    names = {package.name for package in bare}
    more = [each for each in sorted(with_python.glob("*.deb")) if each.name not in names]
    root = folder / "root"
    unpack(bare, root)
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / f"etc/{name}")
    with (root / "etc/passwd").open("a") as passwd:
        passwd.write(f"agent:x:{AGENT}:{AGENT}::/workspace:/bin/sh\n")
    with (root / "etc/group").open("a") as group:
        group.write(f"agent:x:{AGENT}:\n")
    (root / "workspace").mkdir()
    shutil.chown(root / "workspace", AGENT, AGENT)
    shutil.copytree(built_bundle(), root / BUNDLE.removeprefix("/"), symlinks=True)
    compile_c(EAT, root / "usr/local/bin/eat", "-static")
    _import(running, root)
    python = folder / "python"
    unpack(more, python / "add")
    _build(running, "rd-python", python, "FROM rd-bare\nCOPY add/ /\n")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "python3").write_text("#!/bin/sh\necho this Python is broken >&2\nexit 1\n")
    (broken / "python3").chmod(0o755)
    _build(running, "rd-broken", broken, "FROM rd-bare\nCOPY python3 /usr/local/bin/python3\n")
    hostile = folder / "hostile"
    compile_c(PRELOAD, hostile / "evil/preload.so", "-shared", "-fPIC")
    for name in ("os.py", "encodings.py", "libz.so.1", "libsqlite3.so.0", "libffi.so.8"):
        (hostile / "evil" / name).write_text("raise SystemExit('evil')\n")
    words = " ".join(HOSTILE)
    _build(running, "rd-hostile", hostile, f"FROM rd-python\nCOPY evil/ /evil/\nENV {words}\n")
    shutil.rmtree(folder)


def _import(running: Engine, root: Path) -> None:
    with subprocess.Popen(["tar", "-c", "-C", str(root), "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(
            [
                *(running.program, "import", "--change", f"ENTRYPOINT {ENTRYPOINT}"),
                *("-", "rd-bare"),
            ],
            stdin=packed.stdout,
            env=running.environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    assert packed.returncode == 0


def _build(running: Engine, name: str, folder: Path, lines: str) -> None:
    (folder / "Dockerfile").write_text(lines)
    running.docker("build", "--network", "none", "--tag", name, str(folder))
