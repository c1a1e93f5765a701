"""The bundle of image/, made once for the sources as they are and kept until they change."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from .harness import REPOSITORY

_KEPT: Final = REPOSITORY / ".venv-bundle"
_SOURCES: Final = ("runnerd/**/*.py", "shim/*.[chp]*", "image/*.py", "pyproject.toml")
_BUILD_S: Final = 300


def built_bundle() -> Path:
    """Return the folder of a bundle of this checkout and this Python; it is not to be changed."""
    digest = hashlib.sha256(sys.version.encode() + sys.prefix.encode())
    for pattern in _SOURCES:
        for path in sorted(REPOSITORY.glob(pattern)):
            digest.update(str(path).encode() + path.read_bytes())
    bundle = _KEPT / digest.hexdigest()[:16]
    _KEPT.mkdir(exist_ok=True)
    with (_KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be making it
        if not bundle.is_dir():
            for old in _KEPT.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            # With a umask as some have it: other users have to be able to use it all the same.
            command = [sys.executable, "-m", "image.bundle", str(bundle)]
            subprocess.run(command, cwd=REPOSITORY, check=True, timeout=_BUILD_S, umask=0o077)
    return bundle
