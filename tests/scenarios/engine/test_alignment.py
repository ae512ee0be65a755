"""From the engine's first token to the learner's loss: at equal weights, both give every sampled token the same probability.

Masks, positions and the shift to the predicting position are all on this way. One of them off by one, and the largest
difference is no longer rounding: the last test makes sure that it would show.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.config import Config
from async_rl.megatron.parallel import initialize
from async_rl.models.from_config import model_shape
from async_rl.protocols import EpisodeContext
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import RolloutGroup, TakenGroup, Ticket
from learner.batches.batch import pack_batch
from learner.batches.packed_rows import PackedRow
from learner.objective import load_objective
from learner.ranks.rank_group import RankGroup
from rollout_workers.agents import RewardOnlyAgent
from rollout_workers.environments.counting import Counting
from rollout_workers.environments.guess_number import GuessNumber
from rollout_workers.inference.engine import MegatronEngine
from tests.support.full_weights import weights_of

OBJECTIVE = load_objective("async_default")
SIBLINGS = 3


def config(**sampling: float) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "init_std": 0.3, "max_positions": 64}},
            "environments": [{"type": "counting"}],
            "sampling": {"max_tokens": 16, **sampling},
            "worker": {"kv_cache_gb": 0.01, "kv_block_tokens": 8},
            "learner": {"optimizer": {"learning_rate": 1e-9}},
            "device": "cpu",
        }
    )


async def played(config: Config, rank_group: RankGroup, agent: RewardOnlyAgent, tasks: int) -> list[TakenGroup]:
    """Groups of real episodes, sampled with the rank_group's weights."""
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    sampling = config.sampling.generation_args
    groups: list[TakenGroup] = []
    async with MegatronEngine(shape, tokenizer, config.worker, sampling, device=torch.device("cpu"), seed=3) as engine:
        await engine.swap(0, weights_of(rank_group))
        for index in range(tasks):
            ticket, task = Ticket(id=f"t{index}", task_index=index, version=0, attempt=1), agent.task(index)
            rollouts = [
                await agent.rollout(task, engine, EpisodeContext(ticket=ticket, sibling=sibling, seed=sibling))
                for sibling in range(SIBLINGS)
            ]
            group = RolloutGroup(id=ticket.id, task=task, rollouts=tuple(rollouts), worker="w")
            groups.append(TakenGroup(group=group, version_at_commit=0, version_at_take=0))
    return groups


@contextmanager
def rank_group_for(config: Config) -> Iterator[RankGroup]:
    initialize(device=torch.device("cpu"))
    rank_group = RankGroup(config, OBJECTIVE, model_shape(config.model, open_tokenizer(config.tokenizer).vocab_size))
    try:
        yield rank_group
    finally:
        rank_group.stop()


AGENTS = [Counting(name="counting"), GuessNumber(name="guess_number", highest=99)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 8, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_the_learner_recomputes_what_the_engine_sampled(agent: RewardOnlyAgent, sampling: dict[str, float]):
    settings = config(**sampling)
    with rank_group_for(settings) as rank_group:
        groups = await played(settings, rank_group, agent, tasks=4)
        found = rank_group.step(pack_batch(groups, objective=OBJECTIVE, capacity=128)).metrics
    assert found["policy/tokens"] == sum(taken.group.num_sampled for taken in groups) > 0
    assert found["policy/logprob_abs_diff_max"] < 1e-4


SHIFTS: dict[str, Callable[[PackedRow], PackedRow]] = {
    "behaviour": lambda row: replace(row, behaviour=np.roll(row.behaviour, 1)),
    "targets": lambda row: replace(row, targets=np.roll(row.targets, 1)),
    "mask": lambda row: replace(row, mask=np.roll(row.mask, -1)),
    "bounds": lambda row: replace(row, cu_seqlens=np.r_[0, row.cu_seqlens[1:-1] - 1, row.cu_seqlens[-1]].astype(np.int32)),
}


@pytest.mark.parametrize("shift", SHIFTS)
async def test_anything_off_by_one_would_show(shift: str):
    settings = config()
    with rank_group_for(settings) as rank_group:
        groups = await played(settings, rank_group, AGENTS[1], tasks=2)
        batch = pack_batch(groups, objective=OBJECTIVE, capacity=128)
        [minibatch] = batch.minibatches
        shifted = tuple(tuple(SHIFTS[shift](row) for row in bins) for bins in minibatch.shards)
        wrong = replace(batch, minibatches=(replace(minibatch, shards=shifted),))
        assert rank_group.step(wrong).metrics["policy/logprob_abs_diff_max"] > 1e-2
