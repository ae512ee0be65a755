"""Weights, gradients and optimizer state of a rank, from the parameter table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod

from async_rl.config.learner import LoraConfig, ParallelConfig
from async_rl.megatron.parameters.adapters import adapters, trained_rows
from async_rl.megatron.parameters.table import EMBEDDING, VALUE_HEAD, Parameter, Split, table
from async_rl.models.shape import ModelShape

GRADIENT = 4
"""Gradients are accumulated in float32."""
MOMENTS = 4 + 4
"""Adam's two moments, float32."""
MASTER = 4
"""The optimizer's float32 copy of a bfloat16 weight."""
CHUNK = 2**28
"""Bytes of moments that an update brings to the GPU at once if they are offloaded: some milliseconds of a PCIe bus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameters:
    """The parameters of a rank."""

    numbers: float = 0.0
    """Numbers of the model's weights; adapted matrices count twice, because they are also held with their adapters."""
    trained: float = 0.0
    """Those of them with gradients."""
    optimized: float = 0.0
    """Those whose optimizer state is on this rank: data-parallel ranks divide it."""
    adapters: float = 0.0
    """Numbers of adapters, which are float32."""
    optimized_adapters: float = 0.0
    largest: float = 0.0
    """Numbers of the largest parameter."""

    def plus(self, other: HeldParameters) -> HeldParameters:
        """Add what is held beside it."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return HeldParameters(**sums | {"largest": max(self.largest, other.largest)})

    def trained_bytes(self, weight: int, *, offload: bool = False) -> dict[str, float]:
        """Return the bytes of a trained model between updates, with weights of `weight` bytes. `offload`: of the moments."""
        master = MASTER if weight < MASTER else 0
        moments = 0 if offload else MOMENTS
        return {
            "weights": weight * self.numbers + MASTER * self.adapters,
            "gradients": GRADIENT * (self.trained + self.adapters),
            "optimizer": (master + moments) * self.optimized + moments * self.optimized_adapters,
        }

    def update_bytes(self, *, offload: bool) -> float:
        """Return what an update takes in addition: Adam works in place, but offloaded moments come in chunks, two at a time, of
        which a large parameter is one of its own.
        """
        moments = MOMENTS * (self.optimized + self.optimized_adapters)
        return min(moments, CHUNK + max(CHUNK, MOMENTS * self.largest)) if offload else 0.0


def held_by_stages(shape: ModelShape, parallel: ParallelConfig, lora: LoraConfig | None = None) -> list[HeldParameters]:
    """Return what one rank of each pipeline stage holds; with `lora`, of a model whose adapters are trained."""
    stages = [HeldParameters() for _ in range(parallel.pipeline)]
    for row, held in _held(shape, parallel, lora):
        for stage in _stages_of(row, shape, parallel):
            stages[stage] = stages[stage].plus(held)
    return stages


def _held(shape: ModelShape, parallel: ParallelConfig, lora: LoraConfig | None) -> Iterator[tuple[Parameter, HeldParameters]]:
    """Yield each parameter with what it adds to the ranks that have a part of it."""
    adapted = {each.matrix for each in adapters(shape, lora)} if lora is not None else set[str]()
    for row in table(shape):
        numbers, copies = _share(row, parallel)
        if lora is None:
            yield row, HeldParameters(numbers=numbers, trained=numbers, optimized=numbers / copies, largest=numbers)
        elif row.name not in VALUE_HEAD:
            yield row, HeldParameters(numbers=numbers * (2 if row.name in adapted else 1), largest=numbers)
    for row in trained_rows(shape, lora) if lora is not None else ():
        numbers, copies = _share(row, parallel)
        yield row, HeldParameters(adapters=numbers, optimized_adapters=numbers / copies, largest=numbers)


def _share(row: Parameter, parallel: ParallelConfig) -> tuple[float, int]:
    """Return the numbers of a parameter on a rank, and how many ranks divide their optimizer state."""
    divided, copies = _division(row, parallel)
    return prod(row.shape) / divided, copies


def trained_bytes(shape: ModelShape, parallel: ParallelConfig, weight: int = 2, lora: LoraConfig | None = None) -> int:
    """Return the bytes of weights, gradients and optimizer on a rank of the stage that needs most."""
    return round(max(sum(held.trained_bytes(weight).values()) for held in held_by_stages(shape, parallel, lora)))


def layouts(shape: ModelShape) -> Iterator[ParallelConfig]:
    """Yield the simple layouts on up to 8 GPUs that the model's sizes allow."""
    yield ParallelConfig()
    for gpus in (2, 4, 8):
        yield ParallelConfig(processes=gpus)
        if shape.kv_heads % gpus == shape.ffn % gpus == 0:
            yield ParallelConfig(tensor=gpus)
        if shape.layers % gpus == 0:
            yield ParallelConfig(pipeline=gpus)
        if shape.experts is not None and shape.experts.number % gpus == 0:
            yield ParallelConfig(expert=gpus)


def _division(row: Parameter, parallel: ParallelConfig) -> tuple[int, int]:
    """Return among how many ranks the parameter is divided, and how many ranks divide the optimizer state of each part."""
    of_a_stage = parallel.ranks // parallel.pipeline
    has_data_ranks = of_a_stage > parallel.tensor * parallel.context  # else Megatron's optimizer is not divided
    if row.expert is not None:
        return parallel.expert, of_a_stage // parallel.expert if has_data_ranks else 1
    return 1 if row.split is Split.WHOLE else parallel.tensor, of_a_stage // parallel.tensor if has_data_ranks else 1


def _stages_of(row: Parameter, shape: ModelShape, parallel: ParallelConfig) -> set[int]:
    last = parallel.pipeline - 1
    if row.layer is not None:
        chunk = row.layer * parallel.pipeline * parallel.virtual_stages // shape.layers
        return {chunk % parallel.pipeline}
    if row.name == EMBEDDING:  # the last stage has a copy of a matrix that is also the output layer
        return {0, last} if shape.tied_embeddings else {0}
    return {last}
