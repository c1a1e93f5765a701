"""What the journal costs a start: two daemons in one run, one with a state directory."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.harness import RunnerdProcess
from tests.raw import RawClient

from .test_figures import TRUE, Pipeline, figure, per_call

# Three attempts, each after a wait for quiet.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

StartDaemon = Callable[..., RunnerdProcess]
ROUNDS: Final = 15
EXECS: Final = 60


def is_journaled(daemon: RunnerdProcess) -> bool:
    with RawClient(daemon.socket_path) as client:
        return bool(client.call("exec.start", argv=[TRUE])["journaled"])


def test_the_journal_adds_at_most_30_percent(start_daemon: StartDaemon, tmp_path: Path) -> None:
    with_one = start_daemon("--state-dir", str(tmp_path / "state"))
    without = start_daemon("--state-dir", "/proc/none")

    assert [is_journaled(daemon) for daemon in (with_one, without)] == [True, False]

    def measure() -> float:
        ratios = []
        with Pipeline(with_one.socket_path) as kept, Pipeline(without.socket_path) as bare:
            for _ in range(ROUNDS):
                kept_s = per_call(functools.partial(kept.run, TRUE), EXECS)
                ratios.append(kept_s / per_call(functools.partial(bare.run, TRUE), EXECS))
        return statistics.median(ratios)

    figure("start to exit of true, with a journal / without", measure, lambda value: value <= 1.3)
