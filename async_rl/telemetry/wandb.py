"""Weights & Biases sink. WANDB_MODE=offline needs no account."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.config.loading import to_show
from async_rl.config.training import AnyRun


class WandbSink:
    """Logs to W&B; the first row logs in."""

    def __init__(self, config: AnyRun) -> None:
        self._config = config
        self._run: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._start()
        # Not W&B's own step counter: it refuses steps that a resumed learner trains again.
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        run: Any = wandb.init(
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
