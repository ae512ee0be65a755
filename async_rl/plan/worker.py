"""What an inference engine needs of each of its devices, and how large its KV cache is with `worker.kv_cache_gb: auto`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from async_rl.config import Config
from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError
from async_rl.megatron.parameters.table import Parameter, Split, table
from async_rl.models.shape import ModelShape
from async_rl.plan.activations import FLOAT
from async_rl.plan.learner_sizes import learner_sizes, ranks_per_machine

CONTEXT_BYTES = 2**30
"""What a process takes from a GPU besides its tensors: CUDA's context, libraries' workspaces, gaps between allocations."""
ASSEMBLED_BYTES = 2**28
"""A rank's part of parameters that are assembled from several parcels before they are copied (transport/bulk_copy.py)."""
MOST_ON_CPU = 2**30
"""The largest cache that `auto` makes on a CPU, where it is written at the start and the rest of the machine is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on each device of an engine besides its KV cache."""

    weights: int
    activations: int
    """Bytes of one layer of one step."""
    logits: int
    received: int
    """During a swap: the parcels that this GPU receives, or its part of weights that come from host memory; 0 where they are
    read in place, or on a CPU.
    """
    sequence: int
    """The smallest KV cache: one sequence of the model's positions."""

    @property
    def beside_weights(self) -> int:
        return self.activations + self.logits + self.received


def engine_memory(
    shape: ModelShape,
    worker: WorkerConfig,
    *,
    element: int,
    running: int,
    on_cpu: bool,
    in_place: bool = False,
    num_parcels: int = 0,
) -> EngineMemory:
    """`element`: bytes of a weight; `running`: generations that are decoded at once, at most worker.max_running; `in_place`:
    whether new weights are read where a learner on the same GPU packed them; `num_parcels`: see num_parcels_on_gpus.
    """
    weights = sum(prod(row.shape) / _ranks_of_engine(row, worker) for row in table(shape))
    own_part = round(element * weights)
    tokens = running + worker.prompt_tokens_per_step
    # an MLP's input and residual, both halves of linear_fc1's output with their copies, and their product
    widest = max(5 * max(shape.ffn, shape.shared_ffn) / worker.tensor, _of_experts(shape))
    blocks = -(-shape.context_tokens // worker.kv_block_tokens) + 2
    return EngineMemory(
        weights=own_part,
        activations=round(tokens * element * (2 * shape.hidden + widest)),
        logits=round(running * shape.vocab_size * (element + 4 * FLOAT)),
        received=0 if on_cpu or in_place else _received(shape, worker, num_parcels, element, own_part),
        sequence=blocks * worker.kv_block_tokens * token_bytes(shape, worker, element),
    )


def num_parcels_on_gpus(config: Config) -> int:
    """Return the number of parcels of a version that engines of several GPUs receive on these; of several numbers, which a
    learner on fewer machines has, the one with which a GPU receives most. 0: in host memory, as `wire.shared_memory` is off.
    """
    if not config.wire.shared_memory:
        return 0
    gpus = config.worker.engines * config.worker.tensor
    each = ranks_per_machine(config)
    return max((nodes * each for nodes in learner_sizes(config)), key=lambda number: -(-number // gpus) / number)


def _received(shape: ModelShape, worker: WorkerConfig, num_parcels: int, element: int, own_part: int) -> int:
    """Return the bytes of the parcels that one of a worker's several GPUs receives, and of the parameters that are assembled
    there; `own_part`, those of its part of the weights, for a single GPU, or if host memory receives them.
    """
    gpus = worker.engines * worker.tensor
    if gpus == 1 or not num_parcels:
        return own_part
    sizes = [element * prod(row.shape) for row in table(shape)]
    assembled = min(sum(sizes), worker.tensor * ASSEMBLED_BYTES + max(sizes)) if num_parcels > 1 else 0
    return round(sum(sizes) * -(-num_parcels // gpus) / num_parcels) + assembled


def _of_experts(shape: ModelShape) -> int:
    """Return the numbers per token that a layer's experts make at most, where they are computed together."""
    if (experts := shape.experts) is None:
        return 0
    hidden, ffn = shape.hidden, experts.ffn
    # their tokens, and beside them these padded and linear_fc1's output, or its product with the shares of experts in float32
    inside = experts.per_token * (hidden + max(hidden + 2 * ffn, 4 * ffn))
    # their tokens, their outputs, these in the order of tokens, and the sum in float32
    return max(inside, experts.per_token * 3 * hidden + 2 * hidden)


def token_bytes(shape: ModelShape, worker: WorkerConfig, element: int) -> int:
    """Return what the KV cache of a rank takes for each token."""
    return 2 * shape.layers * (shape.kv_heads // worker.tensor) * shape.head_dim * element


def auto_cache_on_gpu(needs: EngineMemory, *, share: float, total: int, free: int | None = None) -> int:
    """Return the bytes of the cache: what remains of the engine's share of a GPU, and of what is free there once the engine has
    its weights (None: not known). Raises ConfigError if that does not hold one sequence.
    """
    cache = int(share * total) - CONTEXT_BYTES - needs.weights - needs.beside_weights
    if free is not None:
        cache = min(cache, free - needs.beside_weights)
    if cache >= needs.sequence:
        return cache
    others = needs.weights + needs.beside_weights + CONTEXT_BYTES
    gb = 2**30
    said_free = f", of which {free / gb:.1f} are free beside its weights," if free is not None else ""
    by_host = ", or set wire.shared_memory: false, so that new weights come by way of host memory"
    raise ConfigError(
        f"worker.gpu_share: {share:g} of a GPU of {total / gb:.1f} GB{said_free} leaves no room for a KV cache of one sequence "
        f"({needs.sequence / gb:.2f} GB): the engine takes {others / gb:.1f} GB besides; raise it, or lower "
        "worker.max_running, worker.prompt_tokens_per_step or model.max_sequence"
        f"{by_host if needs.received > needs.weights else ''}"
    )


def auto_cache_on_cpu(shape: ModelShape, worker: WorkerConfig, needs: EngineMemory, element: int) -> int:
    """Return the bytes of the cache: room for worker.max_running sequences, at most 1 GB, but at least for one."""
    wanted = worker.max_running * shape.context_tokens * token_bytes(shape, worker, element)
    return max(min(wanted, MOST_ON_CPU), needs.sequence)


def _ranks_of_engine(row: Parameter, worker: WorkerConfig) -> int:
    """Return among how many ranks of an engine the parameter is divided."""
    if row.expert is not None:
        return worker.expert
    return 1 if row.split is Split.WHOLE else worker.tensor
