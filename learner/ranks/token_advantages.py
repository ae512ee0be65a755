"""Per-token advantages and returns, from rows with the outputs of critic, reference and teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from learner.advantages.config import (
    DistillationAdvantages,
    GaeAdvantages,
    GroupAdvantages,
    PreferenceAdvantages,
    ReturnAdvantages,
)
from learner.advantages.gae import distillation_advantages, gae, whiten
from learner.batches.device_rows import DeviceRow
from learner.losses.segments import Segments
from learner.objective import Objective


def assign_token_credit(rows: Sequence[DeviceRow], objective: Objective, group: dist.ProcessGroup | None) -> list[DeviceRow]:
    """Return the rows with the advantages and returns of the objective. Collective over `group`, whose ranks hold the rows of
    one step.
    """
    config = objective.advantages
    match config:
        case GroupAdvantages():  # computed per rollout before packing
            return [*rows]
        case PreferenceAdvantages():
            return _preferred(config, rows, group)
        case DistillationAdvantages():
            credited = [replace(row, advantages=_towards_teacher(config, row)) for row in rows]
        case GaeAdvantages() | ReturnAdvantages():
            credited = [_of_rewards(config, row, objective.kl_in_reward) for row in rows]
    return _whitened(credited, group) if config.whiten else credited


def _towards_teacher(config: DistillationAdvantages, row: DeviceRow) -> Tensor:
    """Distillation advantages plus the group advantages of the row, which are 0 unless `advantages.rewards` is set."""
    assert row.teacher is not None
    own = distillation_advantages(teacher=row.teacher, student=row.behaviour, mask=row.mask)
    return config.coefficient * own + row.advantages


def _preferred(config: PreferenceAdvantages, rows: Sequence[DeviceRow], group: dist.ProcessGroup | None) -> list[DeviceRow]:
    """Scale the signs of a pair's rollouts, which may be in different rows and on different ranks, by the slope of its loss."""
    count = torch.stack([row.group_ids.max() for row in rows]).max() + 1
    if group is not None:
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    margins = torch.zeros(int(count), dtype=torch.float64, device=count.device)
    segments = [Segments.of(row.mask, row.cu_seqlens) for row in rows]
    for row, parts in zip(rows, segments, strict=True):
        assert row.proximal is not None
        assert row.reference is not None
        moved = parts.only(row.advantages * (row.proximal - row.reference))
        margins.index_add_(0, row.group_ids, parts.sums(moved.double()))
    if group is not None:
        dist.all_reduce(margins, group=group)
    if config.variant == "sigmoid":
        slopes = config.beta * torch.sigmoid(-config.beta * margins)
    else:
        slopes = 1 / config.beta - 2 * margins
    return [
        # twice: the mean over the rollouts of all pairs is half of that over pairs
        replace(row, advantages=row.advantages * parts.spread(2 * slopes[row.group_ids]).to(row.advantages.dtype))
        for row, parts in zip(rows, segments, strict=True)
    ]


def _of_rewards(config: GaeAdvantages | ReturnAdvantages, row: DeviceRow, kl_in_reward: float) -> DeviceRow:
    rewards = row.rewards
    if kl_in_reward > 0:
        assert row.reference is not None
        rewards = rewards - kl_in_reward * torch.where(row.mask != 0, row.behaviour - row.reference, 0.0)
    advantages, returns = token_advantages(
        config, token_rewards=rewards, values=row.values, mask=row.mask, cu_seqlens=row.cu_seqlens
    )
    return replace(row, advantages=advantages, returns=returns)


def token_advantages(
    config: GaeAdvantages | ReturnAdvantages,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages, and returns for the critic. Whitening is applied later, over all rows of the step."""
    if isinstance(config, ReturnAdvantages):
        return gae(token_rewards, torch.zeros_like(token_rewards), mask, cu_seqlens, gamma=config.gamma)
    if values is None:
        raise ValueError("advantages of type gae need a critic's `values`")
    advantages, returns = gae(token_rewards, values, mask, cu_seqlens, gamma=config.gamma, lam=config.lam)
    if config.length_adaptive is not None:
        lengths = Segments.of(mask, cu_seqlens).trained_tokens.clamp(min=1)
        lam = (1 - 1 / (config.length_adaptive * lengths)).clamp(min=0)
        advantages, _ = gae(token_rewards, values, mask, cu_seqlens, gamma=config.gamma, lam=lam)
    return advantages, returns


def _whitened(rows: Sequence[DeviceRow], group: dist.ProcessGroup | None) -> list[DeviceRow]:
    """Whiten with statistics over all updates of the step."""
    whole = whiten(torch.cat([row.advantages for row in rows]), torch.cat([row.mask for row in rows]), group=group)
    parts = whole.split([len(row.mask) for row in rows])
    return [replace(row, advantages=part) for row, part in zip(rows, parts, strict=True)]
