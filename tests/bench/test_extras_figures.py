"""What a start pays for what is beyond the main job: daemons in one run, with it and without."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.harness import RunnerdProcess
from tests.needs import skip_or_fail
from tests.raw import RawClient

from .test_figures import BARE, TRUE, Pipeline, figure, per_call

# Three attempts, each after a wait for quiet.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

StartDaemon = Callable[..., RunnerdProcess]
ROUNDS: Final = 15
EXECS: Final = 60


def slower(more: RunnerdProcess, bare: RunnerdProcess) -> float:
    """Return how much longer `true` takes from start to exit, as a ratio."""
    ratios = []
    with Pipeline(more.socket_path) as with_it, Pipeline(bare.socket_path) as without:
        for _ in range(ROUNDS):
            with_s = per_call(functools.partial(with_it.run, TRUE), EXECS)
            ratios.append(with_s / per_call(functools.partial(without.run, TRUE), EXECS))
    return statistics.median(ratios)


def test_the_journal_adds_at_most_30_percent(start_daemon: StartDaemon, tmp_path: Path) -> None:
    more, bare = (
        start_daemon("--state-dir", str(where), "--cgroups", "off")
        for where in (tmp_path / "state", "/proc/none")
    )
    for daemon, is_kept in ((more, True), (bare, False)):
        with RawClient(daemon.socket_path) as client:
            assert client.call("exec.start", argv=[TRUE])["journaled"] is is_kept
    figure(
        "start to exit of true, with a journal / without",
        lambda: slower(more, bare),
        lambda value: value <= 1.3,
    )


def test_a_cgroup_of_its_own_adds_at_most_25_percent(start_daemon: StartDaemon) -> None:
    more, bare = start_daemon(*BARE[:2]), start_daemon(*BARE)
    with RawClient(more.socket_path) as client:
        if not client.call("daemon.info")["kill_leaves"]:
            skip_or_fail("a cgroup v2 that may be written")
    figure(
        "start to exit of true, in a cgroup of its own / without",
        lambda: slower(more, bare),
        lambda value: value <= 1.25,
    )
