"""Composition root of `async-rl train`, for one rank: config -> objects -> run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import structlog
import torch.distributed as dist

from async_rl.checkpoints.manifest import POLICY
from async_rl.cli.train import load_described
from async_rl.config.training import TrainingConfig
from async_rl.durable.failpoints import arm_from
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import boundary
from async_rl.launch.package_guard import guard
from async_rl.megatron import parallel
from async_rl.models.from_config import model_shape
from async_rl.supervision import die_with_parent, drain_flag, signs_of_life, work_limit
from async_rl.supervision.processes.descriptors import enough_descriptors
from async_rl.telemetry import configure_logs, open_sinks, read_last_row
from async_rl.tokenization.tokenizers import open_tokenizer
from learner.checkpoints.checkpointer import Checkpointer
from learner.ranks.distributed import init_distributed
from learner.ranks.place import RankPlace, place_from
from learner.ranks.rendezvous import open_local_rendezvous
from learner.training.checkpoints import TableProgress, TrainingCheckpoints
from learner.training.examples import ExampleReader
from learner.training.models import build_models, check
from learner.training.report import TrainingReport
from learner.training.table import Table, TokenLimits
from learner.training.trainer import TableTrainer

log = structlog.get_logger("learner.training")  # __name__ is __main__, which would count as a library


def main() -> None:
    with boundary("async-rl train"), signs_of_life(os.environ), enough_descriptors():
        guard()
        keep_files_private()
        config = load_described(sys.argv[1:])
        configure_logs("train", run_folder=config.run_folder)
        arm_from(os.environ)
        place = place_from(os.environ)
        if place.is_under_torchrun:  # an orphaned rank would keep writing beside its successor
            die_with_parent()
        with work_limit(config.supervision.work_limit_s):
            train(config, place)


def train(config: TrainingConfig, place: RankPlace) -> None:
    """Train until the last step or a signal. Errors in the config and the table are raised before a model is built."""
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    check(config, shape)
    read = ExampleReader.of(config.data, tokenizer, compares=config.compares)
    room = TokenLimits(row=config.batch.bin_tokens, context=shape.context_tokens)
    table = Table.to_train(config.data, read, room, seed=config.run.seed)
    held_out = Table.held_out(config.data, read, room)
    steps = config.steps(len(table))

    stop = drain_flag()
    with ExitStack() as ending:
        device = init_distributed(config, open_local_rendezvous(place))
        ending.callback(parallel.shutdown)
        model, method = build_models(config, shape, device, total_updates=steps)
        checkpointer = Checkpointer({POLICY: model}, device)
        ending.callback(checkpointer.close)
        checkpoints = TrainingCheckpoints(checkpointer, config.run_folder, keep=config.learner.keep_checkpoints)
        start = checkpoints.load()
        if start.step > 0:
            log.info(f"resumes from step {start.step}")
        report = ending.enter_context(open_report(config, len(table), start)) if dist.get_rank() == 0 else None
        TableTrainer(
            config,
            steps=steps,
            model=model,
            method=method,
            table=table,
            held_out=held_out,
            checkpoints=checkpoints,
            report=report,
            stop=stop,
        ).run(start)


@contextmanager
def open_report(config: TrainingConfig, table_rows: int, start: TableProgress) -> Iterator[TrainingReport]:
    with open_sinks(config, resumed_after=start.step) as sink:
        last = read_last_row(config.run_folder / "metrics.jsonl")
        yield TrainingReport(sink, table_rows=table_rows, before=last.values if last is not None else {})


if __name__ == "__main__":
    main()
