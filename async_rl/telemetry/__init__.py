"""Metrics and logs: `open_sinks(config)` returns the MetricsSink of a run, `configure_logs(role)` sets up log lines."""

from async_rl.telemetry.logs import configure_logs
from async_rl.telemetry.open_sinks import Sinks, open_sinks
from async_rl.telemetry.rows import MetricRow, read_rows
from async_rl.telemetry.table import METRICS, WORKER_METRICS, Metric, UnknownMetric, find_metric

__all__ = [
    "METRICS",
    "WORKER_METRICS",
    "Metric",
    "MetricRow",
    "Sinks",
    "UnknownMetric",
    "configure_logs",
    "find_metric",
    "open_sinks",
    "read_rows",
]
