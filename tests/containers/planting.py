"""Plants a fault in the daemon of a container: one compiled module of the bundle is covered."""

from __future__ import annotations

import py_compile
import sys
import textwrap
from typing import TYPE_CHECKING, Final

from tests.bundles import built_bundle
from tests.harness import REPOSITORY

from .images import BUNDLE

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER: Final = "runnerd/daemon"
_COMPILED: Final = f"__pycache__/run.{sys.implementation.cache_tag}.pyc"
_LIBRARY: Final = f"{BUNDLE}/lib/python{sys.version_info.major}.{sys.version_info.minor}"


def planted(code: str, folder: Path) -> list[str]:
    """Return the options of `docker run` that have `code` run before the daemon's own.

    Args:
        code: Replaces a function of the daemon by one that fails, say.
        folder: For the module.
    """
    source, compiled = folder / "run.py", folder / "run.pyc"
    text = (REPOSITORY / _FOLDER / "run.py").read_text()
    source.write_text(f"{text}\n{textwrap.dedent(code)}")
    py_compile.compile(
        str(source),
        str(compiled),
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    compiled.chmod(0o644)
    assert (built_bundle() / _LIBRARY.removeprefix(f"{BUNDLE}/") / _FOLDER / _COMPILED).exists()
    return ["--volume", f"{compiled}:{_LIBRARY}/{_FOLDER}/{_COMPILED}:ro"]
