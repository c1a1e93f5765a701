"""The metrics as Prometheus reads them, made from plain counters at the moment of a scrape.

prometheus-client is imported at the first scrape: it costs 3 MB that an idle daemon need not
have. The registry is our own, since the library's is global.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from runnerd.protocol.answers import MetricsAnswer

from .counters import DURATION_BUCKETS_S, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from .service import Service

# The library's own constant names whichever version it knows latest; metrics without a quoted
# name read the same in all of them, and a scraper that knows 0.0.4 alone is told the truth.
TEXT_0_0_4: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(service: Service, form: str) -> MetricsAnswer:
    """Return all metrics as text.

    Args:
        service: The daemon's shared parts.
        form: text (0.0.4) or openmetrics (1.0.0).
    """
    import prometheus_client  # noqa: PLC0415 - see above

    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(service))
    prometheus_client.ProcessCollector(registry=registry)
    if form == "openmetrics":
        from prometheus_client.openmetrics import exposition as made  # noqa: PLC0415

        return MetricsAnswer(
            content_type=made.CONTENT_TYPE_LATEST,
            text=made.generate_latest(registry).decode(),  # type: ignore[no-untyped-call]
        )
    return MetricsAnswer(
        content_type=TEXT_0_0_4,
        text=prometheus_client.generate_latest(registry).decode(),
    )


class _Collector:
    """Turns the counters into metric families."""

    def __init__(self, service: Service) -> None:
        from prometheus_client import core  # noqa: PLC0415

        self._service = service
        self._core: Any = core

    def collect(self) -> Iterator[Metric]:
        """Yield every family; the order is the exposition's."""
        yield from self._execs()
        yield from self._output()
        yield from self._daemon()

    def _counter(self, name: str, text: str, values: dict[str, int], label: str) -> Metric:
        family = self._core.CounterMetricFamily(name, text, labels=[label])
        for key, value in sorted(values.items()):
            family.add_metric([key], value)
        metric: Metric = family
        return metric

    def _single(self, name: str, text: str, value: float, *, gauge: bool = False) -> Metric:
        kind = self._core.GaugeMetricFamily if gauge else self._core.CounterMetricFamily
        metric: Metric = kind(name, text, value=value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        total, buckets = 0, []
        bounds = [*map(str, map(float, DURATION_BUCKETS_S)), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        metric: Metric = self._core.HistogramMetricFamily(
            name, text, buckets=buckets, sum_value=histogram.sum_s
        )
        return metric

    def _execs(self) -> Iterator[Metric]:
        counters, registry = self._service.counters, self._service.registry
        yield self._single("runnerd_execs_started", "Commands started.", counters.started)
        yield self._counter(
            "runnerd_exec_start_failures",
            "Starts that failed, by stage.",
            counters.start_failures,
            "stage",
        )
        yield self._counter(
            "runnerd_execs_exited", "Exits published, by reason.", counters.exited, "reason"
        )
        states = dict.fromkeys(("starting", "running", "draining", "lingering"), 0)
        for each in registry.live():
            states[each.state.shown] += 1
        family = self._core.GaugeMetricFamily(
            "runnerd_execs", "Execs not closed, by state.", labels=["state"]
        )
        for state, count in states.items():
            family.add_metric([state], count)
        yield family
        yield self._histogram(
            "runnerd_exec_start_duration_seconds",
            "From acceptance to execve.",
            counters.start_duration,
        )
        yield self._histogram(
            "runnerd_exec_duration_seconds", "From execve to exit.", counters.exec_duration
        )
        yield self._single(
            "runnerd_survivors", "Processes KILL did not end in time.", counters.survivors
        )
        yield self._single(
            "runnerd_oom_kills", "OOM kills seen over execs' lives.", counters.oom_kills
        )

    def _output(self) -> Iterator[Metric]:
        counters = self._service.counters
        yield self._counter(
            "runnerd_output_bytes", "Output read, by stream.", counters.output_bytes, "stream"
        )
        yield self._single(
            "runnerd_output_dropped_bytes",
            "Output read and not kept, of execs that have exited.",
            counters.dropped_bytes,
        )
        yield self._single(
            "runnerd_transcript_bytes",
            "Memory that all transcripts cost.",
            self._service.registry.budget.used_bytes,
            gauge=True,
        )
        yield self._single(
            "runnerd_spool_bytes",
            "Disk space that all transcripts take.",
            self._service.spool.used_bytes,
            gauge=True,
        )
        yield self._single(
            "runnerd_spool_degraded",
            "Transcripts given up on disk: it failed, filled up or was too slow.",
            counters.spool_degraded,
        )

    def _daemon(self) -> Iterator[Metric]:
        service, counters = self._service, self._service.counters
        yield self._single(
            "runnerd_connections", "Open connections.", counters.connections, gauge=True
        )
        yield self._single(
            "runnerd_subscriptions", "Open subscriptions.", counters.subscriptions, gauge=True
        )
        yield self._single(
            "runnerd_subscriptions_superseded",
            "Subscriptions that a newer attach of the same name ended.",
            counters.superseded,
        )
        yield self._counter(
            "runnerd_refusals", "Requests refused, by kind.", counters.refusals, "kind"
        )
        yield self._counter(
            "runnerd_stray_failures",
            "Failures survived, by task.",
            counters.stray_failures,
            "task",
        )
        yield self._counter(
            "runnerd_starts_unjournaled",
            "Starts that went on without being in the journal, by reason.",
            counters.starts_unjournaled,
            "reason",
        )
        yield self._single(
            "runnerd_journal",
            "Whether there is a working journal.",
            service.journal.is_on,
            gauge=True,
        )
        yield self._single(
            "runnerd_journal_failures", "How often the journal failed.", service.journal.failures
        )
        yield self._counter(
            "runnerd_tokens_refused",
            "Hellos without the token, or with another one.",
            counters.tokens_refused,
            "what",
        )
        yield self._single(
            "runnerd_signals_refused",
            "Stop signals sent by the daemon's own descendants, not obeyed.",
            counters.signals_refused,
        )
        yield self._single(
            "runnerd_accept_failures",
            "Connections not accepted for want of descriptors or memory.",
            counters.accept_failures,
        )
        yield self._single(
            "runnerd_connections_stuck",
            "Connections closed because their peer did not read.",
            counters.connections_stuck,
        )
        yield self._single("runnerd_shims_lost", "Shims that died early.", counters.shims_lost)
        yield self._single(
            "runnerd_orphans_reaped",
            "Children reaped that were no shim and no command.",
            service.reaper.orphans,
        )
        yield self._single(
            "runnerd_freezes",
            "Times that everything stood still while a clock ran.",
            counters.freezes,
        )
        yield self._single(
            "runnerd_frozen_seconds", "How long, in all.", round(counters.frozen_s, 3)
        )
        if service.audit is not None:
            yield self._single(
                "runnerd_audit_lines", "Changes written down.", service.audit.written
            )
            yield self._single(
                "runnerd_audit_lines_lost", "Changes not written down.", service.audit.lost
            )
        yield self._single("runnerd_log_lines_dropped", "Log lines lost.", service.log.dropped)
        build = self._core.GaugeMetricFamily(
            "runnerd_build_info", "The daemon's version.", labels=["version", "guard"]
        )
        build.add_metric([service.version, service.guard.kind.partition(":")[0]], 1)
        yield build
        order = self._core.GaugeMetricFamily(
            "runnerd_oom_order_info", "Which OOM protection is real here.", labels=["verdict"]
        )
        order.add_metric([service.oom_order.verdict], 1)
        yield order
