"""What an example needs to be played: the real engine with random weights, and a gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from async_rl.models.from_config import model_shape
from async_rl.protocols import Agent, EpisodeContext, Gateway, GroupAgent, InferenceInterface
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Rollout, Status, Task, Ticket
from rollout_workers.gateway import open_gateway
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.registry import build_agent
from tests.support.full_parameters import gather_full

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """An example, ready to be played."""

    config: Config
    agent: Agent
    engine: InferenceInterface
    gateway: Gateway

    async def play(self, index: int = 0, siblings: int = 2) -> tuple[Task, list[Rollout]]:
        """The siblings of one task. What they sampled must be what the engine's own words for it are."""
        task = self.agent.task(index)
        assert self.agent.task(index) == task, "a task must be the same whenever it is posed"
        seats = contexts(siblings, self.gateway)
        if isinstance(self.agent, GroupAgent):
            rollouts = list(await self.agent.rollout_group(task, self.engine, seats))
        else:
            rollouts = list(await asyncio.gather(*(self.agent.rollout(task, self.engine, each) for each in seats)))
        for rollout in rollouts:
            check(rollout)
        return task, rollouts


def contexts(siblings: int, gateway: Gateway | None = None) -> list[EpisodeContext]:
    ticket = Ticket(id="t0", task_index=0, version=0, attempt=1)
    return [EpisodeContext(ticket=ticket, sibling=number, seed=number, gateway=gateway) for number in range(siblings)]


def check(rollout: Rollout) -> None:
    """What every rollout is like that can be trained on, or of a seat whose opponent lost before it had a move."""
    if rollout.status is Status.MASKED and not rollout.samples:
        return
    assert rollout.status in (Status.OK, Status.TRUNCATED), rollout.failure
    assert rollout.samples
    assert np.isfinite(rollout.reward)
    for sample in rollout.samples:
        sampled = np.zeros(len(sample), np.uint8)
        for span in sample.versions:
            assert span.version == 0
            sampled[span.start : span.stop] = 1
        assert sample.num_sampled
        np.testing.assert_array_equal(sampled, sample.loss_mask)
        assert (sample.logprobs[sampled == 1] < 0).all()


@asynccontextmanager
async def open_stage(config: Config) -> AsyncIterator[Stage]:
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    parallel.initialize(device=CPU)
    weights = gather_full(build_model(shape, device=CPU, dtype=torch.float32, seed=1), shape)
    assert weights is not None
    agent = build_agent(config.environments[0], seed=3)
    opened = agent if isinstance(agent, AbstractAsyncContextManager) else nullcontext()
    engine = MegatronEngine(
        shape, tokenizer, config.worker, config.sampling.generation_args, device=CPU, seed=7, layer_spec="local"
    )
    gateway = open_gateway(config.worker.gateway, context_tokens=shape.max_positions, run_token="run")
    async with engine, gateway as served, opened:
        await engine.swap(0, weights)
        yield Stage(config=config, agent=agent, engine=engine, gateway=served)
