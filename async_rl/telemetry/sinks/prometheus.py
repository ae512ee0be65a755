"""Prometheus endpoint (/metrics) with the latest value of every metric."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from async_rl.config import MetricsConfig
from async_rl.config.exposure import knows, read_token, refuse_exposure
from async_rl.errors import ConfigError
from async_rl.supervision import ServiceThread
from async_rl.telemetry.table import Metric, find_metric

REQUEST_S = 10.0
"""Seconds without data after which a client is disconnected."""

NO_DESCRIPTORS_S = 0.1
"""Pause before accepting again when file descriptors have run out."""

log = structlog.get_logger("async_rl.telemetry")

Respond = Callable[[str, list[tuple[str, str]]], Any]


def open_prometheus(wanted: MetricsConfig, *, run: str) -> PrometheusSink:
    """Open the endpoint. Raises ConfigError."""
    token = read_token(wanted.prometheus_token_file, key="metrics.prometheus_token_file")
    way_out = "set metrics.prometheus_token_file, or metrics.prometheus_insecure: true where the network is private"
    refuse_exposure("Prometheus", wanted.prometheus_host, token=token, insecure=wanted.prometheus_insecure, way_out=way_out)
    return PrometheusSink(run=run, host=wanted.prometheus_host, port=wanted.prometheus_port, token=token)


class PrometheusSink(Collector):
    def __init__(self, *, run: str, host: str, port: int, token: str = "") -> None:
        self._run = run
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            application = _guarded(cast("Any", prometheus_client).make_wsgi_app(registry), token)
            self._server = make_server(host, port, application, _server_for(host), _SilentHandler)
        except OSError as error:
            raise ConfigError(f"metrics.prometheus_port: cannot listen on {host}:{port}: {error.strerror}") from error
        self._thread = ServiceThread(
            lambda _: self._server.serve_forever(), name="prometheus", on_failure=lambda why: log.warning(str(why))
        ).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Replaced, not modified: a scrape runs on another thread.
        self._newest = {**self._newest, "step": step, **metrics}

    def close(self) -> None:
        self._thread.stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self._newest.items()):
            gauge = GaugeMetricFamily(exported_name(name), _help(find_metric(name)), labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge


def _guarded(application: Any, token: str) -> Callable[[dict[str, Any], Respond], Iterable[bytes]]:
    def answer(request: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        if knows(request.get("HTTP_AUTHORIZATION", ""), token):
            return application(request, respond)
        respond("401 Unauthorized", [("Content-Type", "text/plain")])
        return [b"metrics.prometheus_token_file contains a different token\n"]

    return answer


def _server_for(host: str) -> type[ThreadingWSGIServer]:
    class Listener(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def get_request(self) -> Any:
            try:
                return super().get_request()
            except OSError:
                time.sleep(NO_DESCRIPTORS_S)
                raise

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore errors of clients."""

    return Listener


class _SilentHandler(WSGIRequestHandler):
    timeout = REQUEST_S  # pyright: ignore[reportAssignmentType]

    def log_message(self, format: str, *args: Any) -> None: ...


def exported_name(name: str) -> str:
    """Prometheus name of a metric: reward/mean becomes async_rl_reward_mean."""
    return "async_rl_" + re.sub(r"[^A-Za-z0-9_]", "_", name)


def _help(metric: Metric | None) -> str:
    if metric is None:
        return ""
    return f"{metric.help} [{metric.unit}]" if metric.unit else metric.help
