"""The metrics as Prometheus reads them, made from plain counters at the moment of a scrape.

prometheus-client is imported at the first scrape, or at boot where an HTTP port was asked for: it
costs 3 MB and 35 ms that a daemon nobody scrapes need not have. The registry is our own, since
the library's is global.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from runnerd.protocol.daemon_answers import MetricsAnswer

from .counters import DURATION_BUCKETS_S
from .families import Durations, Family, Labelled, Number, daemon_families, exec_families

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
        for families in (exec_families(self._service), daemon_families(self._service)):
            for family in families:
                yield self._metric(family)
        yield from self._memory_pressure()
        yield from self._facts()

    def _metric(self, family: Family) -> Metric:
        match family:
            case Number():
                return self._number(family.name, family.text, family.value, gauge=family.gauge)
            case Labelled():
                return self._labelled(family)
            case Durations():
                return self._histogram(family)

    def _number(self, name: str, text: str, value: float | None, *, gauge: bool = False) -> Metric:
        kind = self._core.GaugeMetricFamily if gauge else self._core.CounterMetricFamily
        metric: Metric = kind(name, text, value=value)
        return metric

    def _labelled(self, family: Labelled) -> Metric:
        kind = self._core.GaugeMetricFamily if family.gauge else self._core.CounterMetricFamily
        metric = kind(family.name, family.text, labels=[family.label])
        for key, value in family.values.items():
            metric.add_metric([key], value)
        labelled: Metric = metric
        return labelled

    def _histogram(self, family: Durations) -> Metric:
        histogram = family.histogram
        total, buckets = 0, []
        bounds = [*map(str, map(float, DURATION_BUCKETS_S)), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        metric: Metric = self._core.HistogramMetricFamily(
            family.name, family.text, buckets=buckets, sum_value=histogram.sum_s
        )
        return metric

    def _memory_pressure(self) -> Iterator[Metric]:
        """Pressure where the kernel counts it, and nothing where it does not: 0 would be a lie."""
        found = self._service.pressure.read()
        if found is None:
            return
        yield self._number(
            "runnerd_memory_pressure_waiting_seconds",
            "Time in which at least one process stood still for want of memory.",
            found.some.total_s,
        )
        if found.full is not None:
            yield self._number(
                "runnerd_memory_pressure_stalled_seconds",
                "Time in which all processes stood still for want of memory.",
                found.full.total_s,
            )
        yield self._info(
            "runnerd_memory_pressure_info",
            "Whose pressure it is: the daemon's cgroup's, or the whole system's.",
            source=str(self._service.pressure.source),
        )

    def _facts(self) -> Iterator[Metric]:
        service = self._service
        yield self._info(
            "runnerd_build_info",
            "The daemon's version, and what holds its stop deadline.",
            version=service.version,
            guard=service.guard.kind.partition(":")[0],
        )
        yield self._info(
            "runnerd_oom_order_info",
            "Which OOM protection is real here.",
            verdict=service.oom_order.verdict,
        )

    def _info(self, name: str, text: str, **labels: str) -> Metric:
        metric = self._core.GaugeMetricFamily(name, text, labels=list(labels))
        metric.add_metric(list(labels.values()), 1)
        info: Metric = metric
        return info
