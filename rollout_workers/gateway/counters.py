"""Counters of a gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from async_rl.telemetry.sinks.prometheus import exported_name
from async_rl.telemetry.table import find_metric


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayCounters:
    """The metrics gateway/..., under which they are explained in the table of metrics."""

    sessions: int = 0
    generations: int = 0
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    forks: int = 0

    def snapshot(self) -> Mapping[str, float]:
        return {f"gateway/{name}": value for name, value in asdict(self).items()}

    def exposition(self, others: Mapping[str, float]) -> bytes:
        """The counters in Prometheus' text format, with other counters of the worker as far as the table has them."""
        registry = CollectorRegistry()
        registry.register(_Exported({**_named(others), **self.snapshot()}))
        return generate_latest(registry)


def _named(counters: Mapping[str, float]) -> dict[str, float]:
    """A worker's counters by the names that their sums over the fleet have in the table."""
    named = {name if "/" in name else f"rollout/{name}": value for name, value in counters.items()}
    return {name: value for name, value in named.items() if find_metric(name) is not None}


class _Exported(Collector):
    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self._values.items()):
            metric = find_metric(name)
            yield GaugeMetricFamily(exported_name(name), metric.help if metric is not None else "", value)
