"""As a program under TRITON_INTERPRET=1: how an engine with Triton kernels differs from a plain forward pass."""

from __future__ import annotations

import asyncio
import json

import numpy as np

from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import GenerationArgs
from tests.support.engine_stage import ENDLESS, engine, prompts, recomputed, weights

WORKER = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8, kernels="triton", prompt_tokens_per_step=10)
BUDGETS, TOP_K = (7, 3, 5), (0, 4, 0)


async def largest_difference() -> float:
    asked = prompts(len(BUDGETS))
    async with engine(worker=WORKER, tokenizer=ENDLESS) as running:
        assert running.kernel == "triton"
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(
                running.generate(prompt, GenerationArgs(max_tokens=budget, top_k=top_k))
                for prompt, budget, top_k in zip(asked, BUDGETS, TOP_K, strict=True)
            )
        )
    return max(
        float(np.abs(completion.logprobs - recomputed(weights(1), prompt, completion, top_k=top_k)).max())
        for prompt, completion, top_k in zip(asked, found, TOP_K, strict=True)
    )


if __name__ == "__main__":
    print(json.dumps(asyncio.run(largest_difference())))
