"""The memory plan of a run: bytes of each GPU and of the host, by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from async_rl.config import Config
from async_rl.config.learner import OptimizerConfig, OwnCritic, SharedCritic
from async_rl.config.training import AnyRun, TrainingConfig
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.table import VALUE_HEAD, table
from async_rl.models.shape import ModelShape
from async_rl.plan.activations import BUFFERS, FLOAT, Activations, Compute, activations
from async_rl.plan.parameters import MOMENTS, held_by_stages
from async_rl.plan.worker import EngineMemory, engine_memory, num_parcels_on_gpus

BFLOAT16 = 2
RECEIVED = "received weights"
"""The part of a worker that reads weights in place where it shares the learner's only GPU."""
POLICY = ""
"""Before the names of the policy's parts; those of a critic begin with "critic's "."""
CACHE, AUTO_CACHE = "KV cache", "KV cache, at least"
"""Names of a worker's cache; the second where its size depends on the GPU."""
PACKED = "packed weights"
"""The part of a learner with copies of the versions that are being sent."""
PUSHED = "weights of a push"
"""The part of the host with what every worker gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes at the moment that needs most, of the rank that needs most."""

    learner: tuple[Part, ...]
    """On the GPU of a learner rank."""
    worker: tuple[Part, ...]
    """On each GPU of a rollout worker."""
    engine: EngineMemory | None
    """What the parts of a worker were made from; None: there is none."""
    host: tuple[Part, ...]
    """In the memory of all machines: the buffer, the weights of one push, and what the learner's ranks keep there."""
    learner_gpus: int
    """GPUs of the learner, one for each rank."""
    worker_gpus: int
    """GPUs of one rollout worker: engines x tensor."""
    workers: int
    """Rollout workers that `async-rl run` starts."""
    has_evaluator: bool
    """Whether an evaluator runs beside them, with the engines of a worker."""
    reads_in_place: bool
    """Whether workers beside the learner on its GPU read new weights where it packed them."""

    @property
    def has_auto_cache(self) -> bool:
        return any(part.name == AUTO_CACHE for part in self.worker)


def total(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def memory_plan(
    config: Config,
    shape: ModelShape,
    *,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
    teacher: ModelShape | None = None,
) -> MemoryPlan:
    """Plan a run of a model of `shape`. `critic`: of a critic with weights of its own; None: as the policy. `reference`,
    `teacher`: of frozen models beside the policy; None: the run has none.
    """
    worker, learner = config.worker, config.learner
    trained = _trained(config, shape, critic if critic is not None else shape)
    if learner.lora is not None and not learner.reference.is_given and not isinstance(learner.critic, SharedCritic):
        reference = None  # the base of the adapters
    return MemoryPlan(
        learner=_learner(
            config, row_tokens(config, shape), trained, [each for each in (reference, teacher) if each is not None]
        ),
        worker=_worker(config, _engine(config, shape)),
        engine=_engine(config, shape),
        host=_host(config, shape, trained),
        learner_gpus=config.learner.parallel.ranks,
        worker_gpus=worker.engines * worker.tensor,
        workers=worker.processes,
        has_evaluator=config.evaluation.every > 0,
        reads_in_place=config.wire.shared_memory and config.learner.parallel.ranks == 1,
    )


def evaluation_plan(config: Config, shape: ModelShape) -> MemoryPlan:
    """Plan a run of `async-rl eval`, which opens the engines of one worker."""
    engine = _engine(config, shape)
    return MemoryPlan(
        learner=(),
        worker=_worker(config, engine),
        engine=engine,
        host=(),
        learner_gpus=0,
        worker_gpus=config.worker.engines * config.worker.tensor,
        workers=1,
        has_evaluator=False,
        reads_in_place=False,
    )


def training_plan(
    config: TrainingConfig, shape: ModelShape, *, reference: ModelShape | None = None, teacher: ModelShape | None = None
) -> MemoryPlan:
    """Plan a run of `async-rl train`. `reference`, `teacher`: of a model beside the trained one; None: the run has none."""
    trained = {POLICY: (shape.with_head(config.head), config.learner.optimizer)}
    tokens = config.batch.bin_tokens
    parts = _learner(config, tokens, trained, [each for each in (reference, teacher) if each is not None])
    if teacher is not None:  # the third of a chunk's memory that is not needed otherwise
        parts = (*parts, Part(name="teacher's logits", bytes=round(config.learner.logits_gb * 2**30 / BUFFERS)))
    ranks = config.learner.parallel.ranks
    return MemoryPlan(
        learner=parts,
        worker=(),
        engine=None,
        host=_host(config, shape, trained),
        learner_gpus=ranks,
        worker_gpus=0,
        workers=0,
        has_evaluator=False,
        reads_in_place=False,
    )


def weight_bytes(config: AnyRun) -> int:
    """Return the bytes of one weight of the learner's models."""
    return FLOAT if config.learner.precision == "float32" else _default_bytes(config, config.learner.precision == "auto")


def row_tokens(config: Config, shape: ModelShape) -> int:
    """Return the tokens of the longest packed row: a bin, or one sequence that is longer."""
    return max(config.batch.bin_tokens, _sequence_tokens(config, shape))


def _sequence_tokens(config: Config, shape: ModelShape) -> int:
    """Return the tokens of a long sequence: model.max_sequence, or else one generation."""
    if config.model.max_sequence is not None:
        return config.model.max_sequence
    return min(config.sampling.max_tokens, shape.max_positions)


def _default_bytes(config: AnyRun, is_default: bool = True) -> int:
    return FLOAT if is_default and config.device == "cpu" else BFLOAT16


# -- the learner -----------------------------------------------------------------------------------------------------------


Trained = Mapping[str, tuple[ModelShape, OptimizerConfig]]
"""The trained models by what the names of their parts begin with."""


def _trained(config: Config, shape: ModelShape, critic: ModelShape) -> Trained:
    learner = config.learner
    trained = {POLICY: (replace(shape, head="both") if isinstance(learner.critic, SharedCritic) else shape, learner.optimizer)}
    if isinstance(learner.critic, OwnCritic):
        trained["critic's "] = critic.with_head("scalar"), learner.critic.optimizer
    return trained


def _learner(config: AnyRun, tokens: int, trained: Trained, frozen: Sequence[ModelShape]) -> tuple[Part, ...]:
    """Return the parts of the pipeline stage that needs most."""
    stages = [_stage(config, tokens, trained, frozen, stage) for stage in range(config.learner.parallel.pipeline)]
    return max(stages, key=total)


def _stage(config: AnyRun, tokens: int, trained: Trained, frozen: Sequence[ModelShape], stage: int) -> tuple[Part, ...]:
    learner, weight, on_cpu = config.learner, weight_bytes(config), config.device == "cpu"
    compute = Compute(learner=learner, element=weight, tokens=tokens, on_cpu=on_cpu)
    parts: Counter[str] = Counter()
    passes: list[Activations] = []
    updates: list[float] = []
    for owner, (model, optimizer) in trained.items():
        held = held_by_stages(model, learner.parallel, learner.lora if owner == POLICY else None)[stage]
        state = held.trained_bytes(weight, offload=optimizer.offload)
        parts.update({f"{owner}{name}": round(number) for name, number in state.items()})
        passes.append(activations(model, compute, stage=stage))
        updates.append(held.update_bytes(offload=optimizer.offload))
    for model in frozen:
        parts["frozen models"] += round(weight * held_by_stages(model, learner.parallel)[stage].numbers)
    largest = max(passes, key=lambda each: each.total)
    parts.update({"activations": round(largest.layers), "logits": round(largest.logits)})
    # an update begins when there are no activations any more: it counts for what it exceeds them
    parts["update"] = max(0, round(max(updates) - largest.total))
    if isinstance(config, Config) and not on_cpu:
        parts[PACKED] = 2 * _push_bytes(config, trained[POLICY][0]) // learner.parallel.ranks
    return _parts(parts)


# -- a worker --------------------------------------------------------------------------------------------------------------


def _worker(config: Config, needs: EngineMemory) -> tuple[Part, ...]:
    gb = config.worker.kv_cache_gb
    parts = {
        "weights": needs.weights,
        CACHE if gb != "auto" else AUTO_CACHE: round(gb * 2**30) if gb != "auto" else needs.sequence,
        "activations": needs.activations,
        "logits": needs.logits,
        RECEIVED: needs.received,
    }
    return _parts(parts)


def _engine(config: Config, shape: ModelShape) -> EngineMemory:
    most = config.worker.max_running
    running = most if config.worker.kv_cache_gb == "auto" else min(most, _concurrent(config))  # an engine knows no more
    return engine_memory(
        shape,
        config.worker,
        element=_default_bytes(config),
        running=running,
        on_cpu=config.device == "cpu",
        num_parcels=num_parcels_on_gpus(config),
    )


def _concurrent(config: Config) -> int:
    worker = config.worker
    groups = worker.groups_at_most if worker.groups_in_flight == "auto" else worker.groups_in_flight
    return -(-groups * config.batch.group_size // worker.engines)


# -- the host --------------------------------------------------------------------------------------------------------------


def _host(config: AnyRun, shape: ModelShape, trained: Trained) -> tuple[Part, ...]:
    learner, parts = config.learner, Counter[str]()
    if isinstance(config, Config):
        parts["buffer"] = round(config.buffer_mb(_sequence_tokens(config, shape)) * 2**20)
        parts[PUSHED] = _push_bytes(config, shape)
    for owner, (model, optimizer) in trained.items():
        lora = learner.lora if owner == POLICY else None
        if optimizer.offload:
            of_stages = sum(held.optimized + held.optimized_adapters for held in held_by_stages(model, learner.parallel, lora))
            parts["optimizer's moments"] += round(MOMENTS * of_stages * learner.parallel.ranks / learner.parallel.pipeline)
        parts["checkpoint"] += (FLOAT + MOMENTS) * sum(prod(row.shape) for row in trained_rows(model, lora))
    return _parts(parts)


def _push_bytes(config: Config, shape: ModelShape) -> int:
    element = weight_bytes(config) if config.wire.dtype == "model" else BFLOAT16
    return element * sum(prod(row.shape) for row in table(shape) if row.name not in VALUE_HEAD)


def _parts(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    return tuple(Part(name=name, bytes=size) for name, size in sizes.items() if size)
