"""Groups that were rolled out once and for all: two runs that play them train on the very same tokens, in the same order."""

from __future__ import annotations

import numpy as np

from async_rl.config import Config
from async_rl.types import Rollout, RolloutGroup, Sample, Status, Task, Ticket, VersionSpan
from buffer import open_buffer

WORKER = "recording"
ANY_VERSION = 2**31
"""Whoever plays a recording is never behind the learner."""
WAIT_S = 5.0
VOCABULARY = 11


async def play(config: Config, groups: int) -> None:
    """Commits one group after the other, so that what is ready is always the recording's beginning, or the rest of it."""
    played = 0
    async with open_buffer(config) as buffer:
        while played < groups:
            count = min(4, groups - played)
            for ticket in await buffer.reserve(WORKER, version=ANY_VERSION, count=count, wait_s=WAIT_S):
                assert await buffer.commit(WORKER, _group(ticket, config.batch.group_size)) == "stored"
                played += 1


def _group(ticket: Ticket, siblings: int) -> RolloutGroup:
    """It depends only on the task, except for its version, which depends on when it was sampled."""
    rng = np.random.default_rng(ticket.task_index)
    task = Task(key=f"recording/{ticket.task_index}", environment="recording", prompt="p")
    rollouts = tuple(_rollout(rng, ticket.version) for _ in range(siblings))
    return RolloutGroup(id=ticket.id, task=task, rollouts=rollouts, worker=WORKER)


def _rollout(rng: np.random.Generator, version: int) -> Rollout:
    length = int(rng.integers(6, 40))
    mask = (np.arange(length) >= 2).astype(np.uint8)
    logprobs = rng.normal(-np.log(VOCABULARY), 0.2, length).astype(np.float32)
    row = Sample(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.minimum(logprobs, 0), np.float32(0)),
        versions=(VersionSpan(version=version, start=2, stop=length),),
    )
    return Rollout(samples=(row,), reward=float(rng.random()), status=Status.OK)
