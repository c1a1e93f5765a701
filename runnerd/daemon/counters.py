"""Plain counters. Metrics read them; nothing here knows prometheus-client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

DURATION_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600,
)  # fmt: skip


class Histogram:
    """Counts by upper bound, and their sum, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATION_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one duration."""
        self.sum_s += value_s
        for at, bound in enumerate(DURATION_BUCKETS_S):
            if value_s <= bound:
                self.counts[at] += 1
                return
        self.counts[-1] += 1

    def with_more(self, values_s: Iterable[float]) -> Histogram:
        """Return a copy that has counted these too."""
        copy = Histogram()
        copy.counts, copy.sum_s = list(self.counts), self.sum_s
        for each in values_s:
            copy.observe(each)
        return copy


class Counters:
    """Everything the daemon counts, from its start.

    What an exec has written so far is counted here at its exit; a scrape adds those that have
    not exited, so that output costs no count of its own.

    Attributes:
        leaf_oom_kills: OOM kills in the cgroups of execs that have exited.
        incoming_bytes: Of unfinished requests, over all connections, now.
        outgoing_bytes: Of answers that wait to be written, over all connections, now.
    """

    def __init__(self) -> None:
        self.started = 0
        self.starts_unjournaled: Counter[str] = Counter()
        self.start_failures: Counter[str] = Counter()
        self.exited: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.stray_failures: Counter[str] = Counter()
        self.output_bytes: Counter[str] = Counter()
        self.dropped_bytes = 0
        self.survivors = 0
        self.shims_lost = 0
        self.spool_degraded = 0
        self.leaf_oom_kills = 0
        self.freezes = 0
        self.frozen_s = 0.0
        self.connections_total = 0
        self.connections_stuck = 0
        self.connections = 0
        self.subscriptions = 0
        self.incoming_bytes = 0
        self.outgoing_bytes = 0
        self.superseded = 0
        self.accept_failures = 0
        self.signals_refused = 0
        self.socket_rebinds = 0
        self.tokens_refused: Counter[str] = Counter()
        self.start_duration = Histogram()
        self.first_byte = Histogram()
        self.exec_duration = Histogram()
