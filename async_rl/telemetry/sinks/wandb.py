"""Weights & Biases sink. WANDB_MODE=offline needs no account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from async_rl.config.loading import to_show
from async_rl.config.training import AnyRun
from async_rl.telemetry.sinks.tables import (
    EVALUATION_COLUMNS,
    ROWS_PER_TABLE,
    SAMPLE_COLUMNS,
    Cell,
    NewSamples,
    ages_of,
    evaluation_table,
    repeated,
)


class WandbSink:
    """Logs metrics, tables of samples and evaluations, and a histogram of ages; the first row logs in. A restarted learner
    continues the same W&B run."""

    def __init__(self, config: AnyRun) -> None:
        self._config = config
        self._run: Any = None
        self._samples = NewSamples(config.run_folder)
        self._sent: set[str] = set(self._checkpoints()) if config.metrics.wandb_checkpoints else set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        wandb: Any = import_module("wandb")
        if self._run is None:
            self._run = self._start()
        row: dict[str, Any] = {**metrics, "step": step, **self._sample_table(least=ROWS_PER_TABLE)}
        if evaluated := evaluation_table(metrics):
            row["tables/evaluation"] = _table(EVALUATION_COLUMNS, evaluated)
        if ages := ages_of(metrics):
            row["tables/age"] = wandb.Histogram(repeated(ages), num_bins=min(512, max(ages) + 1))
        # Not W&B's own step counter: it refuses steps that a resumed learner trains again.
        self._run.log(row)
        self._send_checkpoints()

    def close(self) -> None:
        if self._run is not None:
            if rest := self._sample_table(least=1):
                self._run.log(rest)
            self._send_checkpoints()
            self._run.finish()

    def _sample_table(self, *, least: int) -> dict[str, Any]:
        rows = self._samples.take(least=least)
        return {"tables/samples": _table(SAMPLE_COLUMNS, rows)} if rows else {}

    def _send_checkpoints(self) -> None:
        """Send checkpoints that became complete, if asked for: a manifest is written last."""
        if not self._config.metrics.wandb_checkpoints:
            return
        wandb: Any = import_module("wandb")
        for name in self._checkpoints():
            if name not in self._sent:
                self._sent.add(name)
                artifact = wandb.Artifact(f"{self._config.run.name}-checkpoint", type="model", metadata={"checkpoint": name})
                artifact.add_dir(str(self._config.run_folder / "checkpoints" / name))
                self._run.log_artifact(artifact, aliases=["latest", name])

    def _checkpoints(self) -> list[str]:
        return sorted(path.parent.name for path in self._config.run_folder.glob("checkpoints/*/manifest.json"))

    def _start(self) -> Any:
        run: Any = import_module("wandb").init(
            project=self._config.metrics.wandb_project,
            id=self._config.run.name,
            name=self._config.run.name,
            resume="allow",
            dir=self._config.run_folder,
            config=to_show(self._config),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Any:
    return import_module("wandb").Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
