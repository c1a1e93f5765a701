"""Make the bundle: a Python of its own, runnerd, runnerctl and all they need, in one folder.

    image/build OUT_DIR                      with the environment that image/setup.sh makes
    PYTHON -m image.bundle OUT_DIR           with any Python that has runnerd's dependencies

The folder works in any place of any image for this architecture, whatever libc and Python that
has, or has not:

    bin/        runnerd and runnerctl (shim/bundle_launcher.c), tini
    libexec/    the loader, named runnerd, and the interpreter that it runs
    lib/        libc and the other libraries; pythonX.Y/ with everything compiled
    share/      contents.json, and the licences

Everything is copied from what runs this: the same versions that were tested. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import py_compile
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Final

import runnerd
from image import contents
from image.contents import BundleError
from shim import build_hook

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

PLACE: Final = "/opt/runnerd"
"""Where it lies in the examples, and so what tracebacks say."""

_LIBRARIES_BESIDE: Final = ("libnss_compat.so.2",)
"""Loaded by libc where an image's nsswitch.conf says so: one that fits must come first."""

# An image that injects a library into every program does so with its own libc in mind. The
# private loader looks in a place that cannot exist instead, of the same length.
_PRELOAD: Final = b"/etc/ld.so.preload\0"
_NO_PRELOAD: Final = b"/dev/null/preload0\0"


def put_modules(modules_folder: Path, modules: Iterable[tuple[Path, str]]) -> None:
    """Compile sources, and copy compiled modules, below lib/pythonX.Y."""
    work = []
    for source, place in modules:
        target = modules_folder / place
        if source.suffix != ".py":
            copy(source, target)
            continue
        if place.startswith("runnerd/"):  # for the lines in a traceback, and whoever reads them
            copy(source, target)
            compiled = Path(importlib.util.cache_from_source(str(target)))
        else:
            compiled = target.with_suffix(".pyc")
        work.append((source, compiled, f"{PLACE}/lib/{modules_folder.name}/{place}"))
    with ProcessPoolExecutor(os.cpu_count(), initializer=leave_signals_to_parent) as pool:
        for _ in pool.map(compile_one, work, chunksize=16):
            pass


def leave_signals_to_parent() -> None:
    """Be a compiler: Ctrl-C reaches all of us, and ours is the one who makes the bundle to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def compile_one(work: tuple[Path, Path, str]) -> None:
    """Compile one source so that no source is looked at when it is imported."""
    source, compiled, shown = work
    compiled.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(
        str(source),
        str(compiled),
        dfile=shown,
        doraise=True,
        optimize=0,  # asserts stay on
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def copy(source: Path, target: Path) -> None:
    """Copy a file's bytes and whether it can be executed, and nothing else of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def interpreter() -> Path:
    """Return the real interpreter behind this one, which may be an environment's link."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


def needed_libraries(programs: Iterable[Path]) -> tuple[Path, dict[str, Path]]:
    """Ask the loader what programs and modules need, all the way down.

    Returns:
        The loader, and each library by the name it is asked for.

    Raises:
        BundleError: If one of them is missing, or there is no loader.
    """
    loader: Path | None = None
    found: dict[str, Path] = {}
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            name, arrow, path = line.partition("(0x")[0].strip().partition(" => ")
            if "not found" in line:
                raise BundleError(f"{program} needs {name}, which is not here")
            if not arrow and name.startswith("/"):
                loader = Path(os.path.realpath(name))
            elif arrow and path.startswith("/"):
                found[name] = Path(os.path.realpath(path))
    if loader is None:
        raise BundleError(f"{interpreter()} has no loader")
    return loader, found


def put_libraries(out: Path, modules: Iterable[Path]) -> str:
    """Copy the interpreter, its loader and every library that it or a module needs.

    Returns:
        The libc's name and version.
    """
    python = interpreter()
    loader, libraries = needed_libraries([python, *modules])
    copy(python, out / "libexec" / "interpreter")
    copy(loader, out / "libexec" / "runnerd")
    for name, path in libraries.items():
        if path != loader:
            copy(path, out / "lib" / name)
    for name in _LIBRARIES_BESIDE:
        beside = libraries["libc.so.6"].with_name(name) if "libc.so.6" in libraries else None
        if beside is not None and beside.is_file():
            copy(beside, out / "lib" / name)
    forget_preload(out / "libexec" / "runnerd")
    known = "CS_GNU_LIBC_VERSION" in os.confstr_names
    return (os.confstr("CS_GNU_LIBC_VERSION") if known else None) or "musl"


def forget_preload(loader: Path) -> None:
    """Have the private loader not look into /etc/ld.so.preload, which is for the image's libc."""
    code = loader.read_bytes()
    if code.count(_PRELOAD) > 1:
        raise BundleError(f"{loader} names {_PRELOAD[:-1].decode()} more than once")
    loader.write_bytes(code.replace(_PRELOAD, _NO_PRELOAD))


def strip(out: Path) -> None:
    """Take symbols for debuggers away, where a `strip` is there: some Pythons come with 15 MB."""
    if shutil.which("strip") is None:
        print("bundle: no strip (Debian: binutils): symbols stay in", file=sys.stderr)
        return
    found = [path for path in out.rglob("*") if path.is_file() and _is_elf(path)]
    done = subprocess.run(["strip", "--strip-unneeded", *map(str, found)], check=False)
    if done.returncode != 0:
        raise BundleError("strip failed; what it said is above")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def put_programs(out: Path) -> None:
    """Compile the launcher, the shim and the libraries of shim/, and copy tini where it is."""
    build_hook.build_launcher(out / "bin" / "runnerd")
    (out / "bin" / "runnerctl").symlink_to("runnerd")
    native = library(out) / "runnerd" / "_native"
    build_hook.build(native)
    (native / build_hook.STAMP_NAME).unlink()
    tini = shutil.which("tini-static")
    if tini is None:
        print("bundle: no tini-static (Debian: tini): bring an init yourself", file=sys.stderr)
    else:
        copy(Path(tini), out / "bin" / "tini")


def library(out: Path) -> Path:
    """Return the folder of the modules."""
    return out / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def open_to_all(out: Path) -> None:
    """Let every user of an image read it, whatever umask it was made with."""
    for path in [out, *out.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def put_contents(out: Path, libc: str) -> None:
    """Write what is in it, for whoever must know which version of something they run."""
    found = contents.distributions()
    for name, source in contents.licences(found):
        copy(source, out / "share" / "licenses" / name / source.name)
    described = {
        "runnerd": runnerd.__version__,
        "architecture": build_hook.machine(),
        "libc": libc,
        "python": platform.python_version(),
        **{name: distribution.version for name, distribution in sorted(found.items())},
    }
    text = json.dumps(described, indent=2) + "\n"
    (out / "share" / "contents.json").write_text(text, encoding="utf-8")


def build(out: Path) -> None:
    """Make the bundle in a folder that is not there yet, or is one already: then anew.

    Raises:
        BundleError, build_hook.BuildError, OSError: If it cannot be made; nothing of it is left
            then, and a bundle that was there is still there.
    """
    if build_hook.machine() != platform.machine():
        raise BundleError(f"it is for this machine's {platform.machine()}, whose Python it copies")
    if out.exists() and not (out / "share" / "contents.json").is_file():
        raise BundleError(f"{out} is there and is no bundle")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    before = out.with_name(f".{out.name}.{os.getpid()}.before")
    try:
        fill(unfinished)
        if out.exists():
            out.rename(before)
        unfinished.rename(out)
    finally:
        if before.exists() and not out.exists():  # between the two renames
            before.rename(out)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def fill(out: Path) -> None:
    """Put everything into an empty folder."""
    out.mkdir(parents=True)
    modules = [
        *contents.standard_library(),
        *contents.extension_modules(),
        *contents.packages(contents.distributions().values()),
        *contents.own_sources(),
    ]
    put_modules(library(out), modules)
    libc = put_libraries(out, [source for source, _ in modules if source.suffix == ".so"])
    put_programs(out)
    strip(out)
    put_contents(out, libc)
    open_to_all(out)


def interrupted(number: int, _frame: FrameType | None) -> None:
    """End by a signal, the way that leaves nothing behind."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # a second one must not stop the cleaning up
    print("image/build: interrupted", file=sys.stderr)
    raise SystemExit(128 + number)


def main() -> int:
    """Build by hand."""
    parser = argparse.ArgumentParser(prog="image/build", description="make runnerd's bundle")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    out = Path(os.path.realpath(parser.parse_args().out))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupted)
    try:
        build(out)
    except (BundleError, build_hook.BuildError) as error:
        print(f"image/build: {error}", file=sys.stderr)
        return 1
    except (OSError, BrokenProcessPool) as error:
        print(f"image/build: cannot make {out}: {error}", file=sys.stderr)
        return 1
    size = sum(path.lstat().st_size for path in out.rglob("*"))
    print(f"{out}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
