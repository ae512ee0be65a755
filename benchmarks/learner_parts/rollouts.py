"""Groups of random rollouts of given lengths."""

from __future__ import annotations

import math

import numpy as np

from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan

PROMPT = 8


def lognormal_lengths(count: int, *, median: int, longest: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(math.log(median), 1, count), PROMPT + 2, longest).astype(int).tolist()


def groups_of(
    lengths: list[int], *, group_size: int, vocab_size: int, padded_to: int | None = None, seed: int
) -> list[TakenGroup]:
    """Make groups of random rollouts. `padded_to` lengthens every row by untrained tokens."""
    rng = np.random.default_rng(seed)
    rollouts = [_rollout(length, padded_to if padded_to is not None else length, vocab_size, rng) for length in lengths]
    return [_group(tuple(rollouts[start : start + group_size])) for start in range(0, len(rollouts), group_size)]


def _rollout(length: int, size: int, vocab_size: int, rng: np.random.Generator) -> Rollout:
    ids, mask = np.zeros(size, np.int32), np.zeros(size, np.uint8)
    ids[:length] = rng.integers(0, vocab_size, length)
    mask[PROMPT:length] = 1
    row = Sample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -math.log(vocab_size), 0).astype(np.float32),
        versions=(VersionSpan(version=0, start=PROMPT, stop=length),),
    )
    return Rollout(samples=(row,), reward=float(rng.random()), status=Status.OK)


def _group(rollouts: tuple[Rollout, ...]) -> TakenGroup:
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
    return TakenGroup(group=group, version_at_commit=0, version_at_take=0)
