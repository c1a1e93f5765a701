"""The bundle runs by itself, whatever the image's environment says, and gives that to commands."""

import subprocess
from pathlib import Path

import pytest

from tests.bundles import built_bundle


@pytest.fixture(scope="session")
def bundle() -> Path:
    return built_bundle()


def test_it_says_its_version(bundle: Path) -> None:
    said = subprocess.run(
        [bundle / "bin" / "runnerctl", "--version"], capture_output=True, check=True
    )
    assert said.stdout.startswith(b"runnerctl ")
