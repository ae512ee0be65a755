"""Groups as a worker would commit them."""

from __future__ import annotations

import numpy as np

from async_rl.types import Rollout, RolloutGroup, Sample, Status, Task, Ticket, spans_of


def sample(versions: tuple[int, ...] = (0, 0), prompt: int = 2) -> Sample:
    """Make a sample of `prompt` given tokens and one sampled token per version."""
    length = prompt + len(versions)
    sampled = np.arange(length) >= prompt
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)).astype(np.float32),
        versions=spans_of(versions, offset=prompt),
    )


def group(
    ticket: Ticket | str, versions: tuple[int, ...] | None = None, worker: str = "w", reward: float = 1.0
) -> RolloutGroup:
    """Make a group of the ticket, sampled by the ticket's version or by `versions`."""
    born = ticket.version if isinstance(ticket, Ticket) else 0
    tokens = versions if versions is not None else (born, born)
    rollouts = tuple(Rollout(samples=(sample(tokens),), reward=reward + index, status=Status.OK) for index in range(2))
    ticket_id = ticket.id if isinstance(ticket, Ticket) else ticket
    index = ticket.task_index if isinstance(ticket, Ticket) else 0
    return RolloutGroup(id=ticket_id, task=Task(key=f"k{index}", environment="e", prompt="p"), rollouts=rollouts, worker=worker)
