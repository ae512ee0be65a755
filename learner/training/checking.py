"""`config check` for `async-rl train`: tokenizer, data, models, layout, precision, memory. Builds no model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from async_rl.cli.train import resolve_any
from async_rl.config.pretrained import Pretrained
from async_rl.config.training import Distillation, DistillSection, DpoSection, DpoTraining, TrainingConfig
from async_rl.datasets.opening import open_rows
from async_rl.errors import boundary
from async_rl.launch.package_guard import guard
from async_rl.launch.preflight import CannotCheck, answer, shape_to_check, tokenizer_to_check
from async_rl.plan.gpus import Gpus
from async_rl.plan.memory import MemoryPlan, training_plan
from learner.checking import check_layout, check_precision, fit, memory
from learner.training.examples import ExampleReader
from learner.training.models import check, frozen_weights
from learner.training.table import Table, TokenLimits


def main(words: Sequence[str]) -> None:
    guard()
    config = resolve_any(words[:2]).config
    assert isinstance(config, TrainingConfig)
    answer(checks(config, Gpus.parse(words[2]) if len(words) > 2 else None))


def checks(config: TrainingConfig, gpus: Gpus | None) -> Iterator[Callable[[], str]]:
    yield lambda: f"tokenizer: {tokenizer_to_check(config).vocab_size:,} tokens"
    yield partial(_data, config)
    if config.data.held_out is not None:
        yield partial(_held_out, config)
    yield partial(_models, config)
    yield partial(check_layout, config)
    yield partial(check_precision, config)
    yield lambda: memory(_planned(config))
    if gpus is not None:
        yield lambda: fit(_planned(config), gpus, config)


def _data(config: TrainingConfig) -> str:
    data = config.data
    for dataset in data.datasets or (data,):
        open_rows(dataset)
    table = Table.to_train(data, *_reading(config), seed=config.run.seed)
    return f"data: {_counted(table, config.batch.examples_per_step)}; {config.steps(len(table)):,} steps"


def _held_out(config: TrainingConfig) -> str:
    assert config.data.held_out is not None
    open_rows(config.data.held_out)
    table = Table.held_out(config.data, *_reading(config))
    assert table is not None
    return f"data.held_out: {_counted(table, config.batch.examples_per_step)}"


def _reading(config: TrainingConfig) -> tuple[ExampleReader, TokenLimits]:
    tokenizer, shape = tokenizer_to_check(config), shape_to_check(config)
    read = ExampleReader.of(config.data, tokenizer, compares=config.compares)
    return read, TokenLimits(row=config.batch.bin_tokens, context=shape.context_tokens)


def _counted(table: Table, most: int) -> str:
    """Read as many rows as a step has, which also checks their columns, template and lengths."""
    read = table.slice_at(0, min(most, len(table)))
    tokens = sum(map(len, read.examples))
    without = f", {read.dropped} too long" if read.dropped else ""
    return f"{len(table):,} rows; of those of a step {len(read.examples)} can be trained{without}, with {tokens:,} tokens"


def _models(config: TrainingConfig) -> str:
    check(_described(config), shape_to_check(config))
    return f"model: {config.method} can train it"


def _described(config: TrainingConfig) -> TrainingConfig:
    """The configuration, if the models that it names are here."""
    match config:
        case DpoTraining(dpo=DpoSection(reference=Pretrained(name=str(name), folder=None))) if name:
            raise CannotCheck(f"dpo.reference: the sizes of {name}, whose files are not here")
        case Distillation(distill=DistillSection(teacher=Pretrained(name=str(name), folder=None))):
            raise CannotCheck(f"distill.teacher: the sizes of {name}, whose files are not here")
        case _:
            return config


def _planned(config: TrainingConfig) -> MemoryPlan:
    shape, frozen = shape_to_check(config), frozen_weights(_described(config))
    if frozen is None or (frozen.folder is None and config.learner.lora is not None):  # the base of the adapters
        return training_plan(config, shape)
    held = frozen.shape(shape)
    is_teacher = isinstance(config, Distillation)
    return training_plan(config, shape, teacher=held if is_teacher else None, reference=None if is_teacher else held)


if __name__ == "__main__":
    with boundary("async-rl config check"):
        main(sys.argv[1:])
