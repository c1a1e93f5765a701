"""What a test says when a real part of its set-up is missing on this machine."""

import os
import shutil
from typing import NoReturn

import pytest


def is_ci() -> bool:
    """Is this a run whose machine must have everything?"""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test on a user's machine and say why; with CI=true, fail it.

    A user may lack root, a memory cgroup or valgrind, and their run is still worth something.
    In CI a skip would hide that a promise is no longer checked.
    """
    if is_ci():
        pytest.fail(f"CI must have what this test needs: {reason}", pytrace=False)
    pytest.skip(reason)


def program(name: str, package: str = "") -> str:
    """Return the path of a program that a test needs, or skip_or_fail.

    Args:
        name: what is looked for on PATH.
        package: Debian's package of it, where that has another name.
    """
    path = shutil.which(name)
    if path is None:
        skip_or_fail(f"{name} is not here (Debian: apt-get install {package or name})")
    return path


def root() -> None:
    """Go on as root only, else skip_or_fail."""
    if os.geteuid() != 0:
        skip_or_fail("needs root")
