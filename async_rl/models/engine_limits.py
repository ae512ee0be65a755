"""Limits that a model sets for an engine: the size of its KV cache, and its parallelism."""

from __future__ import annotations

from async_rl.errors import ConfigError
from async_rl.models.shape import ModelShape


def check_kv_cache(shape: ModelShape, *, gb: float, block_tokens: int, tensor: int, element: int) -> None:
    """Raise ConfigError unless the cache of a rank can hold one sequence. `element`: bytes of a number in it."""
    block_bytes = 2 * shape.layers * block_tokens * (shape.kv_heads // tensor) * shape.head_dim * element
    num_blocks = int(gb * 2**30) // block_bytes
    needed = -(-shape.context_tokens // block_tokens) + 1
    if num_blocks < needed + 1:
        raise ConfigError(
            f"worker.kv_cache_gb: {gb:g} GB hold {num_blocks} blocks of {block_tokens} tokens, but "
            f"one sequence of {shape.context_tokens} tokens needs {needed + 1}; give it at least "
            f"{(needed + 1) * block_bytes / 2**30:.3g} GB, or lower model.max_sequence"
        )


def uses_cuda_graphs(
    shape: ModelShape,
    *,
    wanted: str,
    on_gpu: bool,
    kernels: str,
    layer_spec: str,
    tensor: int,
    grouped_experts: bool = True,
) -> bool:
    """Whether decode steps are CUDA graphs, or without a GPU their dry run. `grouped_experts`: whether the GPU, if there are
    experts, computes all of a layer at once. Raises ConfigError where graphs are `wanted` (the setting worker.cuda_graphs) and
    cannot be.
    """
    reason = _no_cuda_graphs(shape, kernels if on_gpu else "auto", layer_spec, tensor, grouped_experts or not on_gpu)
    if wanted == "always" and reason is not None:
        raise ConfigError(f"worker.cuda_graphs: always cannot be, because {reason}; auto decodes without")
    return reason is None and wanted != "never" and (on_gpu or wanted == "always")


def _no_cuda_graphs(shape: ModelShape, kernels: str, layer_spec: str, tensor: int, grouped_experts: bool) -> str | None:
    if tensor > 1:
        return f"worker.tensor is {tensor}, and graphs that exchange numbers between GPUs have not been tried"
    if shape.experts is not None and not grouped_experts:
        return "the model's experts are computed one by one here, and the host reads in every layer how many tokens each gets"
    if layer_spec != "local":
        return f"model.layer_spec is {layer_spec}, and only `local` has been written for it"
    if kernels == "torch":
        return "worker.kernels is torch, where the sizes of tensors depend on the lengths of sequences"
    return None


def check_worker_ranks(shape: ModelShape, tensor: int, expert: int) -> None:
    """Raise ConfigError unless that many ranks can divide the model, and its experts."""
    widths = {"kv_heads": shape.kv_heads, "ffn": shape.ffn, "the width of its shared expert": shape.shared_ffn}
    if any(width % tensor for width in widths.values()):
        named = " and ".join(f"{name} ({width})" for name, width in widths.items() if width)
        raise ConfigError(f"worker.tensor ({tensor}) must divide the model's {named}")
    experts_of_a_layer = shape.experts.number if shape.experts is not None else 1
    if experts_of_a_layer % expert:
        raise ConfigError(f"worker.expert ({expert}) must divide the number of experts in a layer ({experts_of_a_layer})")
