"""Counters of a gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from async_rl.telemetry.prometheus import exported_name
from async_rl.telemetry.table import find_metric


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayCounters(Collector):
    """The metrics gateway/..., under which they are explained in the table of metrics."""

    sessions: int = 0
    generations: int = 0
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    forks: int = 0

    def snapshot(self) -> Mapping[str, float]:
        return {f"gateway/{name}": value for name, value in asdict(self).items()}

    def exposition(self) -> bytes:
        """The counters in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self.snapshot().items():
            metric = find_metric(name)
            yield GaugeMetricFamily(exported_name(name), metric.help if metric is not None else "", value)
