"""MLflow sink (package mlflow-skinny): metrics, settings, and tables as JSON. MLFLOW_TRACKING_URI names the server."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from async_rl.config.loading import leaves, to_show
from async_rl.config.training import AnyRun
from async_rl.telemetry.sinks.tables import (
    EVALUATION_COLUMNS,
    ROWS_PER_TABLE,
    SAMPLE_COLUMNS,
    Cell,
    NewSamples,
    ages_of,
    evaluation_table,
)

RUN_TAG = "async_rl.run"
METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
"""Limits of one request to an MLflow server."""
LONGEST_PARAMETER = 500
"""Characters of a setting; servers before 2.8 refuse more."""


class MlflowSink:
    """Logs metrics, settings, and tables of samples and evaluations. A restarted learner continues the same MLflow run."""

    def __init__(self, config: AnyRun) -> None:
        self._config = config
        self._client: Any = None
        self._run = ""
        self._samples = NewSamples(config.run_folder)
        self._step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._client is None:
            self._client = self._start()
        self._step = step
        entities: Any = import_module("mlflow.entities")
        now = round(time.time() * 1000)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        values = [entities.Metric(logged_name(name), float(value), now, step) for name, value in finite.items()]
        for part in _parts(values, METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=part)
        self._log_table("evaluation", EVALUATION_COLUMNS, evaluation_table(metrics))
        self._log_table("age", ("age", "groups"), [list(each) for each in ages_of(metrics).items()] if _is_shown(step) else [])
        self._log_table("samples", SAMPLE_COLUMNS, self._samples.take(least=ROWS_PER_TABLE))

    def close(self) -> None:
        if self._client is not None:
            self._log_table("samples", SAMPLE_COLUMNS, self._samples.take(least=1))
            self._client.set_terminated(self._run)

    def _log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Write a table in the form that MLflow's page shows (`log_table`, without pandas)."""
        if rows:
            text = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]})
            self._client.log_text(self._run, text, f"{name}/step-{self._step:08d}.json")

    def _start(self) -> Any:
        client: Any = import_module("mlflow").MlflowClient()
        name, wanted = self._config.metrics.mlflow_experiment, self._config.run.name
        experiment: Any = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], f"tags.`{RUN_TAG}` = '{wanted}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(number, run_name=wanted, tags={RUN_TAG: wanted}).info.run_id
            self._log_settings(client)
        return client

    def _log_settings(self, client: Any) -> None:
        entities: Any = import_module("mlflow.entities")
        settings = {".".join(keys): json.dumps(value)[:LONGEST_PARAMETER] for keys, value in leaves(to_show(self._config))}
        for part in _parts([entities.Param(logged_name(key), value) for key, value in settings.items()], PARAMETERS_AT_ONCE):
            client.log_batch(self._run, params=part)


AGES_EVERY = 20
"""Steps between tables of ages."""


def _is_shown(step: int) -> bool:
    return step % AGES_EVERY == 0


def logged_name(name: str) -> str:
    """A name that MLflow accepts: pass@1 becomes pass_at_1, other characters become _."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))


def _parts(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part
