"""Weights & Biases. Works offline and without an account under WANDB_MODE=offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.config.loading import to_show
from async_rl.config.training import AnyRun
from async_rl.telemetry.writer_thread import WriterThread


class WandbSink(WriterThread):
    """Everything, the login included, happens on the writer's thread."""

    def __init__(self, config: AnyRun) -> None:
        super().__init__("wandb", _WandbRun(config))


class _WandbRun:
    def __init__(self, config: AnyRun) -> None:
        self._config = config
        self._run: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._start()
        # The step is a value and not W&B's own counter, which refuses the steps that a resumed learner trains again.
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
