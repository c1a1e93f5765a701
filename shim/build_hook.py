"""Compile the shim, the guard and the spool's writer: for a wheel, in place, or by hand.

All land in runnerd/_native/. The compiler is $CC or `cc` where it can link a static program, else
`python -m ziglang cc`, a C compiler from the package index; then a machine needs no toolchain at
all. By hand, for tests and scripts, without hatchling:

    python shim/build_hook.py [--out DIR] [--cc COMMAND] [--target x86_64|aarch64]
                              [--debug | --sanitize]

RUNNERD_BUILD_TARGET=aarch64 makes a wheel for the other architecture, by ziglang alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hatchling.builders.config import BuilderConfig
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    HookInterface = BuildHookInterface[BuilderConfig]
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as HookInterface
    except ModuleNotFoundError:  # by hand
        HookInterface = object

SHIM_DIR: Final = Path(__file__).resolve().parent
NATIVE_DIR: Final = SHIM_DIR.parent / "runnerd" / "_native"
SHIM_NAME: Final = "runnerd-shim"
GUARD_NAME: Final = "guard.so"
SPOOL_NAME: Final = "spool_io.so"
STAMP_NAME: Final = ".built-from"
TARGETS: Final = ("x86_64", "aarch64")
ZIGLANG: Final = "ziglang>=0.13,<0.18"

STRICT: Final = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic")
MODES: Final = {
    "release": ("-O2", "-static", "-s"),
    # Dynamic, for valgrind cannot see into a static program's allocations, nor a debugger.
    "debug": ("-O1", "-g"),
    "sanitize": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
# No libc: neither its start-up files nor calls to it that a compiler would slip in.
LIBRARY_FLAGS: Final = (
    "-O2",
    "-shared",
    "-fPIC",
    "-nostdlib",
    "-ffreestanding",
    "-fno-builtin",
    "-fno-stack-protector",
    "-fvisibility=hidden",
    "-s",
)


class BuildError(RuntimeError):
    """The native programs cannot be built here; the message says what to install."""


def machine() -> str:
    """The architecture to build for: $RUNNERD_BUILD_TARGET, or this machine's."""
    target = os.environ.get("RUNNERD_BUILD_TARGET") or platform.machine()
    target = {"amd64": "x86_64", "arm64": "aarch64"}.get(target.lower(), target.lower())
    if target not in TARGETS:
        raise BuildError(f"runnerd runs on {' and '.join(TARGETS)}, not on {target!r}")
    return target


def links_static(cc: list[str]) -> bool:
    """Whether a compiler exists and can link a static program, which needs a static libc."""
    if not shutil.which(cc[0]):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text("int main(void) { return 0; }\n", encoding="ascii")
        command = [*cc, "-static", str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def system_compiler(target: str) -> list[str] | None:
    """$CC or cc as words; None where it is missing, foreign to `target`, or cannot link static."""
    cc = shlex.split(os.environ.get("CC") or "cc")
    foreign = target != platform.machine() and "CC" not in os.environ
    return cc if cc and not foreign and links_static(cc) else None


def find_compiler(target: str) -> list[str]:
    """The compiler to use, as the words of a command.

    Raises:
        BuildError: If there is neither a usable system compiler nor ziglang.
    """
    cc = system_compiler(target)
    if cc:
        return cc
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{target}-linux-musl"]
    raise BuildError(
        f"no C compiler for {target} that can link a static program: install one with a static "
        f"libc (Debian: gcc libc6-dev; Alpine: gcc musl-dev), or `pip install {ZIGLANG!r}`"
    )


def build(
    out: Path, *, cc: list[str] | None = None, target: str | None = None, mode: str = "release"
) -> tuple[Path, Path, Path]:
    """Compile all into a directory, unless they are there from the same sources.

    Args:
        out: The directory, made if missing.
        cc: The compiler's command; None finds one.
        target: x86_64 or aarch64; None means machine().
        mode: A key of MODES. The libraries are the same in all.

    Returns:
        The paths of the shim, the guard and the spool's library.

    Raises:
        BuildError: If there is no compiler, or it fails; its output is in the message.
    """
    target = target or machine()
    cc = cc or find_compiler(target)
    shim, guard, spool = out / SHIM_NAME, out / GUARD_NAME, out / SPOOL_NAME
    stamp, digest = out / STAMP_NAME, _digest([*cc, target, mode])
    fresh = stamp.is_file() and stamp.read_text(encoding="ascii") == digest
    if fresh and all(each.is_file() for each in (shim, guard, spool)):
        return shim, guard, spool
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _compile([*cc, *STRICT, *MODES[mode], str(SHIM_DIR / "runnerd_shim.c")], shim)
    _compile([*cc, *STRICT, *LIBRARY_FLAGS, str(SHIM_DIR / "guard.c")], guard)
    _compile([*cc, *STRICT, *LIBRARY_FLAGS, str(SHIM_DIR / "spool_io.c")], spool)
    stamp.write_text(digest, encoding="ascii")
    return shim, guard, spool


def build_launcher(result: Path) -> None:
    """Compile what starts the bundle's Python; no wheel needs it.

    Raises:
        BuildError: As build().
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    cc = find_compiler(machine())
    _compile([*cc, *STRICT, *MODES["release"], str(SHIM_DIR / "bundle_launcher.c")], result)


def _digest(words: list[str]) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for source in sorted([*SHIM_DIR.glob("*.[ch]"), Path(__file__)]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile(command: list[str], result: Path) -> None:
    # Beside the result and renamed: a shim that is running keeps its file.
    unfinished = result.with_name(f".{result.name}.{os.getpid()}")
    try:
        done = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")
        unfinished.replace(result)
    finally:
        unfinished.unlink(missing_ok=True)


class NativeBuildHook(HookInterface):
    """What hatchling calls; the wheel becomes one for Linux on one architecture."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask the build's installer for ziglang only where the system's compiler will not do."""
        return [] if system_compiler(machine()) else [ZIGLANG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree, which is where an editable install looks for them."""
        del version  # the same for "standard" and "editable"
        target = machine()
        for result in build(NATIVE_DIR, target=target):
            build_data["artifacts"].append(f"/{result.relative_to(SHIM_DIR.parent)}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{target}"


def main() -> int:
    """Build by hand."""
    parser = argparse.ArgumentParser(description="compile runnerd-shim, guard.so and spool_io.so")
    parser.add_argument("--out", type=Path, default=NATIVE_DIR, metavar="DIR")
    parser.add_argument("--cc", type=shlex.split, metavar="COMMAND")
    parser.add_argument("--target", choices=TARGETS)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--debug", dest="mode", action="store_const", const="debug")
    modes.add_argument("--sanitize", dest="mode", action="store_const", const="sanitize")
    given = parser.parse_args()
    try:
        results = build(given.out, cc=given.cc, target=given.target, mode=given.mode or "release")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for result in results:
        print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
