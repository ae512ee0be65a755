"""A /metrics endpoint with the newest value of every metric: the view of whoever operates a fleet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from async_rl.errors import ConfigError
from async_rl.telemetry.table import Metric, find_metric


class PrometheusSink(Collector):
    def __init__(self, *, run: str, host: str, port: int) -> None:
        self._run = run
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics.prometheus_port: cannot listen on {host}:{port}: {error.strerror}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._newest = {
            **self._newest,
            "step": step,
            **metrics,
        }  # replaced whole: a scrape on the server's thread sees one state

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self._newest.items()):
            gauge = GaugeMetricFamily(exported_name(name), _help(find_metric(name)), labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge


def exported_name(name: str) -> str:
    """reward/mean is async_rl_reward_mean to Prometheus."""
    return "async_rl_" + re.sub(r"[^A-Za-z0-9_]", "_", name)


def _help(metric: Metric | None) -> str:
    if metric is None:
        return ""
    return f"{metric.help} [{metric.unit}]" if metric.unit else metric.help
