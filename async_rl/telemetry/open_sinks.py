"""Opens the metrics sinks of a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Self

import structlog

from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError
from async_rl.protocols import MetricsSink
from async_rl.telemetry.rows import JsonlSink
from async_rl.telemetry.sinks.writer_thread import WriterThread
from async_rl.telemetry.table import UnknownMetric, find_metric

log = structlog.get_logger(__name__)


class Sinks:
    """A MetricsSink that passes rows to several others; a context manager that closes them. A sink that fails is removed."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            if find_metric(name) is None:
                warnings.warn(f"the metric {name!r} is not in async_rl/telemetry/table.py", UnknownMetric, stacklevel=2)
        if dropped := sum(sink.dropped for sink in self._sinks if isinstance(sink, JsonlSink)):
            metrics = {**metrics, "metrics/dropped": dropped}
        for sink in list(self._sinks):
            try:
                sink.log(step, metrics)
            except (Exception, SystemExit) as error:  # rich raises SystemExit when its terminal is gone
                if isinstance(sink, JsonlSink):
                    raise
                self._sinks.remove(sink)
                log.warning(f"{type(sink).__name__} failed and is no longer used", reason=str(error) or type(error).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        with ExitStack() as closing:  # closes all, even if one fails
            for sink in self._sinks:
                closing.callback(sink.close)


def open_sinks(config: AnyRun, *, resumed_after: int = 0) -> Sinks:
    """Open metrics.jsonl and the sinks that `config.metrics` enables. Raises ConfigError if an extra is missing.

    `resumed_after` is the step of the checkpoint resumed from; earlier rows above it are superseded.
    """
    wanted = config.metrics
    for key, (package, extra) in EXTRAS.items():
        if getattr(wanted, key):
            _need_extra(package, extra, asked_by=f"metrics.{key}")
    sinks: list[MetricsSink] = [
        JsonlSink(config.run_folder / "metrics.jsonl", resumed_after=resumed_after, max_bytes=wanted.max_bytes)
    ]
    with ExitStack() as opened:
        opened.callback(lambda: Sinks(sinks).close())
        # Imported on demand: rich, wandb and torch's writer take seconds.
        if wanted.console:
            from async_rl.telemetry.console import open_console

            sinks.append(open_console(config))
        if wanted.tensorboard:
            from async_rl.telemetry.sinks.tensorboard import TensorBoardSink

            events = TensorBoardSink(config.run_folder / "tensorboard", resumed_after=resumed_after)
            sinks.append(WriterThread("tensorboard", events))
        if wanted.prometheus_port:
            from async_rl.telemetry.sinks.prometheus import open_prometheus

            sinks.append(open_prometheus(wanted, run=config.run.name))
        if wanted.wandb_project:
            from async_rl.telemetry.sinks.wandb import WandbSink

            sinks.append(WriterThread("wandb", WandbSink(config)))
        if wanted.trackio_project:
            from async_rl.telemetry.sinks.trackio import TrackioSink

            sinks.append(WriterThread("trackio", TrackioSink(config)))
        if wanted.mlflow_experiment:
            from async_rl.telemetry.sinks.mlflow import MlflowSink

            sinks.append(WriterThread("mlflow", MlflowSink(config)))
        opened.pop_all()
    return Sinks(sinks)


EXTRAS = {
    "wandb_project": ("wandb", "wandb"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio_project": ("trackio", "trackio"),
    "mlflow_experiment": ("mlflow", "mlflow"),
}
"""Setting -> the package that it needs, and the extra that installs it."""


def _need_extra(package: str, extra: str, *, asked_by: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{asked_by} needs a package that is not installed: pip install 'async-rl[{extra}]'")
