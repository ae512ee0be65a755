"""As a program under TRITON_INTERPRET=1: how many residual sums are computed with the norm after them, for each norm that is
computed alone; how an engine with Triton kernels differs from a plain forward pass, and how decoding through the tensors of
CUDA graphs differs from decoding without: of all generations, and of those whose prompts have one token and need no padding,
the last with experts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.layers import norm_kernels
from async_rl.megatron.layers.norms import Norm
from async_rl.megatron.model import build_model
from async_rl.models.shape import Experts, ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from tests.support.engine_stage import CPU, ENDLESS, SHAPE, engine, prompts, recomputed, weights
from tests.support.full_parameters import gather_full

WORKER = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8, kernels="triton", prompt_tokens_per_step=10, max_running=4)
BUDGETS, TOP_K = (7, 3, 5), (0, 4, 0)


Found = Sequence[Completion]


OF_EXPERTS = replace(SHAPE, experts=Experts(number=6, per_token=2, ffn=40, layers=(1,), shared_ffn=16))


async def generated(
    cuda_graphs: str, budgets: Sequence[int], top_k: Sequence[int], shape: ModelShape = SHAPE, longest: int = 23
) -> Found:
    worker = WORKER.model_copy(update={"cuda_graphs": cuda_graphs})
    async with engine(worker=worker, tokenizer=ENDLESS, shape=shape) as running:
        assert running.kernel == "triton"
        await running.swap(0, weights(1) if shape is SHAPE else random_weights(shape))
        return await asyncio.gather(
            *(
                running.generate(prompt, GenerationArgs(max_tokens=budget, top_k=number, seed=1))
                for prompt, budget, number in zip(prompts(len(budgets), longest), budgets, top_k, strict=True)
            )
        )


def from_forward_pass(found: Found) -> float:
    asked = prompts(len(found))
    return max(
        float(np.abs(completion.logprobs - recomputed(weights(1), prompt, completion, top_k=top_k)).max())
        for prompt, completion, top_k in zip(asked, found, TOP_K, strict=True)
    )


def between(found: Found, wanted: Found) -> float:
    """The largest difference of log-probabilities; infinite if the tokens are not the same."""
    if any(one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(found, wanted, strict=True)):
        return float("inf")
    return max(float(np.abs(one.logprobs - other.logprobs).max()) for one, other in zip(found, wanted, strict=True))


def random_weights(shape: ModelShape) -> Mapping[str, Tensor]:
    parallel.initialize(device=CPU)
    full = gather_full(build_model(shape, device=CPU, dtype=torch.float32, seed=1), shape)
    assert full is not None
    return full


class NormsByThemselves:
    """Counts the residual sums that are computed with the norm after them, and the other norms of the residual stream."""

    def __init__(self) -> None:
        self.sums, self.others = 0, 0
        self._fused, self._plain = norm_kernels.add_and_norm, Norm.forward

    def __enter__(self) -> NormsByThemselves:
        norm_kernels.add_and_norm = self._count_sum
        Norm.forward = lambda norm, x: self._count_other(norm, x)
        return self

    def __exit__(self, *_: object) -> None:
        norm_kernels.add_and_norm, Norm.forward = self._fused, self._plain

    def _count_sum(self, *given: Any) -> tuple[Tensor, Tensor]:
        self.sums += 1
        return self._fused(*given)

    def _count_other(self, norm: Norm, x: Tensor) -> Tensor:
        self.others += len(norm.weight) == SHAPE.hidden
        return self._plain(norm, x)


async def main() -> Sequence[float]:
    with NormsByThemselves() as norms:
        plain = await generated("never", BUDGETS, TOP_K)
    with_padding = await generated("always", BUDGETS, TOP_K)
    exactly = [
        between(*[await generated(graphs, (4, 4), (0, 0), shape, longest=2) for graphs in ("never", "always")])
        for shape in (SHAPE, OF_EXPERTS)
    ]
    return [norms.sums / norms.others, from_forward_pass(plain), between(with_padding, plain), *exactly]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
