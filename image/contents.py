"""What goes into the bundle: which modules, and where each stands below lib/pythonX.Y."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REPOSITORY: Final = Path(__file__).resolve().parent.parent

_LEFT_OUT: Final = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "lib-dynload",
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtle.py",
        "turtledemo",
        "ensurepip",
        "venv",
        "distutils",
        "lib2to3",
        "pydoc.py",
        "pydoc_data",
        "unittest",
        "doctest.py",
        "curses",
        "msilib",
        "antigravity.py",
        "this.py",
        "_pydecimal.py",
        "_sysconfigdata",
        "config-",
    }
)
"""Of the standard library: names, and beginnings of names that end in `-` or begin with `_sys`."""

_EXTENSIONS_LEFT_OUT: Final = re.compile(
    r"_?(test|xx|ctypes_test|tkinter|curses|gdbm|dbm|crypt|codecs_|lsprof|nis|ossaudiodev|readline"
    r"|spwd|audioop|multibytecodec|msi|dbg)"
)


class BundleError(RuntimeError):
    """The bundle cannot be made here; the message says why."""


def standard_library() -> Iterator[tuple[Path, str]]:
    """Give each source of the standard library that is kept, and its place below lib/pythonX.Y."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if not any(map(_is_left_out, place.parts)):
            yield path, str(place)


def _is_left_out(name: str) -> bool:
    return name in _LEFT_OUT or name.startswith(("_sysconfigdata", "config-"))


def extension_modules() -> Iterator[tuple[Path, str]]:
    """Give the compiled modules of the standard library that are kept."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted((folder / "lib-dynload").glob("*.so")):
        if not _EXTENSIONS_LEFT_OUT.match(path.name):
            yield path, str(path.relative_to(folder))


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return what runnerd depends on, and what that depends on, by name.

    Raises:
        BundleError: If one of them is not installed for this Python.
    """
    with Path(REPOSITORY, "pyproject.toml").open("rb") as file:
        waiting = list(tomllib.load(file)["project"]["dependencies"])
    found: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
        if name in found or not _applies(requirement):
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise BundleError(f"{name} is not installed for {sys.executable}") from error
        if found[name].files is None:
            raise BundleError(f"{name} was not installed by pip: nobody knows what belongs to it")
        waiting += found[name].requires or []
    return found


def _applies(requirement: str) -> bool:
    # Markers in full would need `packaging`. The ones that our dependencies have name an extra,
    # another platform or an older Python; one that is none of these is taken.
    marker = requirement.partition(";")[2]
    if "extra" in marker or re.search(r"""(os_name|sys_platform)\s*==\s*["'](nt|win32)""", marker):
        return False
    older = re.search(r"""python_version\s*<\s*["'](\d+)\.(\d+)""", marker)
    if older is not None:
        return sys.version_info[:2] < (int(older[1]), int(older[2]))
    return "implementation_name" not in marker


def packages(found: Iterable[importlib.metadata.Distribution]) -> Iterator[tuple[Path, str]]:
    """Give each file of the dependencies that is kept, and its place below lib/pythonX.Y."""
    for distribution in found:
        for file in distribution.files or []:
            if file.suffix in (".py", ".so") and not {"..", "_tests", "tests"} & set(file.parts):
                yield Path(str(distribution.locate_file(file))), str(file)


def own_sources() -> Iterator[tuple[Path, str]]:
    """Give each source of runnerd itself, and its place below lib/pythonX.Y."""
    for path in sorted(Path(REPOSITORY, "runnerd").rglob("*.py")):
        yield path, str(path.relative_to(REPOSITORY))
    yield REPOSITORY / "image" / "entry.py", "entry.py"


def licences(
    found: dict[str, importlib.metadata.Distribution],
) -> Iterator[tuple[str, Path]]:
    """Give the text of every licence that comes with what is kept, by whose it is."""
    for name, distribution in found.items():
        for file in distribution.files or []:
            if file.name.upper().startswith(("LICEN", "COPYING", "NOTICE")):
                yield name, Path(str(distribution.locate_file(file)))
    yield "runnerd", REPOSITORY / "LICENSE"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Where others' builds and Debian's packages put it; Debian's is a link, so its name is kept.
    for path in (
        Path(sysconfig.get_path("stdlib"), "LICENSE.txt"),
        Path(f"/usr/share/doc/{version}/copyright"),
    ):
        if path.is_file():
            yield "python", path
            break
