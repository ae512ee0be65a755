"""Trackio sink: metrics and tables in a local SQLite file, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from async_rl.config.loading import to_show
from async_rl.config.training import AnyRun
from async_rl.telemetry.sinks.tables import (
    EVALUATION_COLUMNS,
    ROWS_PER_TABLE,
    SAMPLE_COLUMNS,
    NewSamples,
    ages_of,
    evaluation_table,
    repeated,
)


class TrackioSink:
    """Logs metrics, tables of samples and evaluations, and a histogram of ages. A restarted learner continues the same run."""

    def __init__(self, config: AnyRun) -> None:
        self._config = config
        self._run: Any = None
        self._step = 0
        self._samples = NewSamples(config.run_folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        library: Any = import_module("trackio")
        if self._run is None:
            self._run = self._start(library)
        self._step = step
        row: dict[str, Any] = {**metrics, **self._sample_table(library, least=ROWS_PER_TABLE)}
        if evaluated := evaluation_table(metrics):
            row["tables/evaluation"] = library.Table(columns=list(EVALUATION_COLUMNS), data=evaluated)
        if ages := ages_of(metrics):
            row["tables/age"] = library.Histogram(repeated(ages), num_bins=min(512, max(ages) + 1))
        self._run.log(row, step=step)

    def close(self) -> None:
        if self._run is not None:
            if rest := self._sample_table(import_module("trackio"), least=1):
                self._run.log(rest, step=self._step)
            self._run.finish()

    def _sample_table(self, library: Any, *, least: int) -> dict[str, Any]:
        rows = self._samples.take(least=least)
        return {"tables/samples": library.Table(columns=list(SAMPLE_COLUMNS), data=rows)} if rows else {}

    def _start(self, library: Any) -> Any:
        return library.init(
            project=self._config.metrics.trackio_project,
            name=self._config.run.name,
            config=to_show(self._config),
            resume="allow",
            embed=False,
        )
