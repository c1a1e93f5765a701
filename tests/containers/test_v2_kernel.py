"""In a kernel with all of cgroup v2: what the tests in v2/ say there.

This machine's v2 may have no controllers (a v1 or hybrid host), so a small guest has one. Every
test is run there, in one boot, and is a test of its own here.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests import needs
from tests.containers import guest
from tests.harness import REPOSITORY

FILE: Final = "tests/containers/v2/test_v2.py"
TESTS: Final = re.findall(r"^def (test_\w+)", (REPOSITORY / FILE).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> str:
    needs.root()
    return guest.run(FILE)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("test", TESTS)
def test_in_a_v2_kernel(printed: str, test: str) -> None:
    outcomes = re.findall(rf"^{FILE}::{test}(?:\[.*?\])? (\w+)", printed, re.MULTILINE)
    assert outcomes, f"it did not run:\n{printed[-4000:]}"
    assert set(outcomes) == {"PASSED"}, printed[-8000:]
