"""Counters of a gateway, under their names in the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from async_rl.telemetry.prometheus import exported_name
from async_rl.telemetry.table import find_metric


class GatewayCounters(Collector):
    def __init__(self) -> None:
        self.sessions = 0
        self.requests = 0
        self.refused = 0
        self.generations = 0
        """Generations running now."""
        self.tokens = 0
        self.forks = 0
        """Forks of ended sessions."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def snapshot(self) -> Mapping[str, float]:
        return {
            "gateway/sessions": self.sessions,
            "gateway/generations": self.generations,
            "gateway/requests": self.requests,
            "gateway/refused": self.refused,
            "gateway/tokens": self.tokens,
            "gateway/forks": self.forks,
        }

    def exposition(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self.snapshot().items():
            metric = find_metric(name)
            gauge = GaugeMetricFamily(exported_name(name), metric.help if metric is not None else "")
            gauge.add_metric([], value)
            yield gauge
