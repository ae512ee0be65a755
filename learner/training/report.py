"""The metrics row of each step of `async-rl train`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from async_rl.protocols import MetricsSink
from learner.training.trainer import TableStep


class TrainingReport:
    def __init__(self, sink: MetricsSink, *, table_rows: int, before: Mapping[str, float]) -> None:
        """`before`: the last row of a resumed run; totals continue from it."""
        self._sink, self._table_rows = sink, table_rows
        self._tokens = before.get("progress/tokens", 0.0)
        self._examples = before.get("progress/samples", 0.0)
        self._started = time.monotonic() - before.get("progress/wall_s", 0.0)

    def trained(self, trained: TableStep) -> None:
        counts, result = trained.packed.counts, trained.result
        self._tokens += counts.tokens
        self._examples += counts.examples
        row = {
            **{f"train/{name}": value for name, value in result.metrics.items()},
            **result.experts,
            **trained.packed.metrics,
            "train/epoch": trained.progress.place / self._table_rows,
            "train/dropped": float(trained.table_slice.dropped),
            **{f"data/{name}": float(count) for name, count in trained.table_slice.by_dataset.items()},
            "optim/lr": result.learning_rate,
            "optim/grad_norm": result.grad_norm,
            "optim/skipped": float(result.skipped),
            "time/step": trained.step_s,
            "time/wait_data": trained.waited_s,
            "perf/tok_s": counts.tokens / max(trained.step_s + trained.waited_s, 1e-9),
            "progress/tokens": self._tokens,
            "progress/samples": self._examples,
            "progress/wall_s": time.monotonic() - self._started,
        }
        self._sink.log(trained.progress.step, row)

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sink.log(step, {f"held_out/{name}": value for name, value in metrics.items()})
