"""The bundle's figures, each beside the same from the environment that it was made of."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from tests.bench.test_figures import figure
from tests.bundles import built_bundle
from tests.harness import RunnerdProcess

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

ROUNDS: Final = 11
# As an installed script does; by -m the main module would be compiled anew each time.
PLAIN: Final = (sys.executable, "-c", "from runnerd.daemon.main import main; main()")


def test_the_bundle_is_ready_within_1_3_of_a_plain_environment(
    start_daemon: Callable[..., RunnerdProcess],
) -> None:
    bundled = (str(built_bundle() / "bin" / "runnerd"),)

    def to_ready_s(program: Sequence[str]) -> float:
        began_s = time.perf_counter()
        daemon = start_daemon(program=program)
        took_s = time.perf_counter() - began_s
        daemon.stop()
        return took_s

    def measure() -> float:
        return statistics.median(to_ready_s(bundled) / to_ready_s(PLAIN) for _ in range(ROUNDS))

    figure("the bundle, start to ready / an environment", measure, lambda value: value <= 1.3)
