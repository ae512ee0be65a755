"""The loop of `async-rl train`, the same on every rank.

    table ──▶ pack ──▶ rows of this shard ──▶ other models ──▶ forward, loss, backward ──▶ optimizer ──▶ checkpoint
      (step n+1, while n computes)                                                      (with the position in the table)

The state after a step depends only on the config and the table, so a run may stop after any step and be resumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from async_rl.config.training import TrainingConfig
from async_rl.errors import ConfigError, Diverged
from async_rl.megatron.compat import parallel_state
from async_rl.supervision import working
from learner.batches.device_rows import ModelRow
from learner.collectives import true_on_all
from learner.model import TrainingModel
from learner.step import RowLoss, StepResult, evaluate_loss, update
from learner.training.checkpoints import TableProgress, TrainingCheckpoints
from learner.training.methods import Method
from learner.training.packed import ExampleCounts, PackedExamples, pack
from learner.training.table import Table, TableSlice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableStep:
    """The outcome of a step, for reports."""

    progress: TableProgress
    table_slice: TableSlice
    packed: PackedExamples
    result: StepResult
    step_s: float
    waited_s: float


class StepReporter(Protocol):
    """Receives the results on rank 0."""

    def trained(self, trained: TableStep) -> None: ...

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutSet:
    """The held-out rows, which are evaluated every few steps."""

    rows: Sequence[ModelRow]
    """This rank's rows."""
    counts: ExampleCounts
    every: int


class TableTrainer:
    def __init__(
        self,
        config: TrainingConfig,
        *,
        steps: int,
        model: TrainingModel,
        method: Method,
        table: Table,
        held_out: Table | None,
        checkpoints: TrainingCheckpoints,
        report: StepReporter | None,
        stop: threading.Event,
    ) -> None:
        """`report` is None on ranks above 0. `stop` of any rank stops all of them after the current step."""
        self._batch, self._learner, self._steps = config.batch, config.learner, steps
        self._model, self._method, self._table = model, method, table
        self._checkpoints, self._report, self._stop = checkpoints, report, stop
        self._shard = parallel_state.get_data_parallel_rank()
        self._bad_steps = 0
        self._held_out = self._pack_held_out(config, held_out) if held_out is not None else None

    def run(self, start: TableProgress) -> TableProgress:
        """Train until the last step or `stop`; return the position reached.

        consumes: slices of the table          waits for:    the next packed step
        produces: checkpoints, metrics rows    unblocked by: the reading thread; `stop`
        """
        progress, saved = start, start
        if start.step == 0:
            self._evaluate_held_out(start)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="table") as ahead:
            prefetch = ahead.submit(self._fetch, start.place)
            while progress.step < self._steps and true_on_all(not self._stop.is_set()):
                began = time.monotonic()
                table_slice, packed = prefetch.result()
                waited_s = time.monotonic() - began
                prefetch = ahead.submit(self._fetch, table_slice.end)
                progress = TableProgress(step=progress.step + 1, place=table_slice.end)
                self._train(progress, table_slice, packed, waited_s)
                if self._held_out is not None and (progress.step == self._steps or progress.step % self._held_out.every == 0):
                    self._evaluate_held_out(progress)
                if progress.step % self._learner.checkpoint_every == 0:
                    self._checkpoints.begin(progress)
                    saved = progress
            prefetch.cancel()
        if progress != saved:
            self._checkpoints.begin(progress)
        self._checkpoints.finish()
        return progress

    @working("the table")
    def _fetch(self, place: int) -> tuple[TableSlice, PackedExamples]:
        """Read and pack the examples of a step, for all ranks."""
        table_slice = self._table.slice_at(place, self._batch.examples_per_step)
        if not table_slice.examples:
            raise ConfigError(
                f"all {table_slice.dropped} examples of a step are too long; raise batch.bin_tokens ({self._batch.bin_tokens})"
            )
        return table_slice, self._packed(table_slice)

    def _packed(self, table_slice: TableSlice) -> PackedExamples:
        return pack(table_slice.examples, capacity=self._batch.bin_tokens, num_shards=self._model.layout.data)

    @working("a training step")
    def _train(self, progress: TableProgress, table_slice: TableSlice, packed: PackedExamples, waited_s: float) -> None:
        began = time.monotonic()
        rows = self._method.prepared(packed.rows(self._shard, self._model.device))
        result = StepResult.of([update(self._model, self._loss(packed.counts), rows)])
        self._bad_steps = self._bad_steps + 1 if result.skipped else 0
        if self._bad_steps >= self._learner.max_bad_steps:
            raise Diverged(
                f"{self._bad_steps} steps in a row had a loss or gradient that is not finite, the last one step "
                f"{progress.step}; lower learner.optimizer.learning_rate, or resume from an older checkpoint"
            )
        if self._report is not None:
            step_s = time.monotonic() - began
            self._report.trained(
                TableStep(
                    progress=progress, table_slice=table_slice, packed=packed, result=result, step_s=step_s, waited_s=waited_s
                )
            )

    def _pack_held_out(self, config: TrainingConfig, table: Table) -> HeldOutSet:
        held_out = config.data.held_out
        assert held_out is not None
        most = min(len(table), held_out.examples) if held_out.examples is not None else len(table)
        packed = self._packed(table.slice_at(0, most))
        rows = self._method.prepared(packed.rows(self._shard, self._model.device))
        return HeldOutSet(rows=rows, counts=packed.counts, every=held_out.every)

    @working("the held-out rows")
    def _evaluate_held_out(self, progress: TableProgress) -> None:
        if self._held_out is None:
            return
        totals = evaluate_loss(self._model.chunks, self._loss(self._held_out.counts), self._held_out.rows)
        if self._report is not None:
            self._report.held_out(progress.step, totals.metrics)

    def _loss(self, counts: ExampleCounts) -> RowLoss[ModelRow]:
        return RowLoss(names=self._method.names, of_row=partial(self._method.loss, counts=counts))
