"""Time of the worker's engine for the rollouts of one step."""

from __future__ import annotations

import asyncio
import time

import torch

from async_rl.config import Config
from async_rl.megatron.model import build_model
from async_rl.megatron.parameters.full_parameters import local_parameters
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from learner_parts.rollouts import PROMPT
from rollout_workers.inference.engine import MegatronEngine

CPU = torch.device("cpu")


class Generation:
    """Generates the rollouts of a step. `parallel.initialize` must have run, and the engine must be entered."""

    def __init__(self, config: Config, shape: ModelShape, tokenizer: Tokenizer) -> None:
        self._sampling = config.sampling.generation_args
        self._count = config.batch.groups_per_step * config.batch.group_size
        self._vocab_size = shape.vocab_size
        self._prompts = torch.Generator().manual_seed(7)
        self.engine = MegatronEngine(shape, tokenizer, config.worker, self._sampling, device=CPU, seed=7)
        model = build_model(shape, device=CPU, dtype=torch.float32, seed=1)
        self._weights = {name: parameter.detach() for name, parameter in local_parameters(model).items()}

    async def begin(self) -> None:
        await self.engine.swap(0, self._weights)

    async def step(self) -> tuple[float, list[int]]:
        """Return seconds, and the lengths of the generated rows."""
        prompts = torch.randint(4, self._vocab_size, (self._count, PROMPT), generator=self._prompts).tolist()
        started = time.perf_counter()
        found = await asyncio.gather(*(self.engine.generate(prompt, self._sampling) for prompt in prompts))
        return time.perf_counter() - started, [PROMPT + len(completion.token_ids) for completion in found]
