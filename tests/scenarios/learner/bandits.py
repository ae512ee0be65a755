"""A task played in the learner's own process: say tokens that are odd or even as the prompt is. Some prompts are worth more."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import ModelShape
from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of

ANSWER = 3
PROMPTS = 4


class Bandits:
    """Samples with a copy of the rank_group's weights, as a worker would, at temperature 0.9."""

    def __init__(self, shape: ModelShape, seed: int = 0):
        self._model = build_model(shape, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
        self._vocabulary = shape.vocab_size
        self._random = torch.Generator().manual_seed(seed)

    def groups(self, rank_group: RankGroup, *, groups: int = 8, siblings: int = 4) -> list[TakenGroup]:
        self._follow(rank_group)
        prompts = [place % PROMPTS for place in range(groups) for _ in range(siblings)]
        ids = torch.tensor(prompts)[:, None]
        logprobs: list[Tensor] = []
        with torch.no_grad():
            for _ in range(ANSWER):
                ids, said = self._one_more(ids)
                logprobs.append(said)
        rollouts = [
            _rollout(prompt, row, said)
            for prompt, row, said in zip(prompts, ids.numpy(), torch.stack(logprobs, 1).numpy(), strict=True)
        ]
        return [_group(rollouts[place * siblings : (place + 1) * siblings]) for place in range(groups)]

    def _follow(self, rank_group: RankGroup) -> None:
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights_of(rank_group).items():
                own[name].copy_(tensor)

    def _one_more(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = forward_packed(self._model, *pack(list(ids))).logits().view(*ids.shape, -1)[:, -1, : self._vocabulary]
        log_p = (logits / 0.9).log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1, generator=self._random)
        return torch.cat([ids, chosen], dim=1), log_p.gather(1, chosen)[:, 0]


def _rollout(prompt: int, ids: np.ndarray, logprobs: np.ndarray) -> Rollout:
    length = len(ids)
    sample = Sample(
        token_ids=ids.astype(np.int32),
        loss_mask=np.array([0] + [1] * ANSWER, np.uint8),
        logprobs=np.concatenate([[0.0], logprobs]).astype(np.float32),
        versions=(VersionSpan(version=0, start=1, stop=length),),
    )
    right = float(np.mean(ids[1:] % 2 == prompt % 2))
    return Rollout(samples=(sample,), reward=right + 0.5 * prompt, status=Status.OK)


def _group(rollouts: list[Rollout]) -> TakenGroup:
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=tuple(rollouts), worker="w")
    return TakenGroup(group=group, version_at_commit=0, version_at_take=0)


def share_right(groups: list[TakenGroup]) -> float:
    """How often a token was odd or even as asked: one half by chance."""
    rewards = [
        rollout.reward - 0.5 * int(rollout.samples[0].token_ids[0]) for each in groups for rollout in each.group.rollouts
    ]
    return float(np.mean(rewards))
