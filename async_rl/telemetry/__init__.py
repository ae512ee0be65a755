"""Metrics and logs: `open_sinks(config)` returns the MetricsSink of a run, `configure_logs(role)` sets up log lines."""

from async_rl.telemetry.logs import configure_logs as configure_logs
from async_rl.telemetry.open_sinks import Sinks as Sinks
from async_rl.telemetry.open_sinks import open_sinks as open_sinks
from async_rl.telemetry.rows import read_last_row as read_last_row
from async_rl.telemetry.rows import read_rows as read_rows
from async_rl.telemetry.table import METRICS as METRICS
from async_rl.telemetry.table import WORKER_METRICS as WORKER_METRICS
from async_rl.telemetry.table import UnknownMetric as UnknownMetric
from async_rl.telemetry.table import find_metric as find_metric
