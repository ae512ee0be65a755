"""Advantages of single tokens, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.training import DpoConfig
from learner.advantages.group import best_and_worst
from learner.batches.batch import pack_batch
from learner.batches.device_rows import DeviceRow
from learner.losses.aggregation import count
from learner.losses.functions import dpo_loss
from learner.objective import Objective, load_objective
from learner.ranks.token_advantages import assign_token_credit
from tests.unit.learner.test_batch import rollout, sample, taken

MASK = [0, 1, 1, 0, 1, 0]
"""Mask of one row: an answer of two tokens, an observation, an answer of one."""


def row(*, reward: float = 1.0) -> DeviceRow:
    floats = torch.zeros(6)
    rewards = floats.clone()
    rewards[4] = reward
    behaviour = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, 0.0])
    nothing: Any = None
    return DeviceRow(
        token_ids=nothing, positions=nothing, targets=nothing, group_ids=nothing, ages=nothing, packing=nothing,
        mask=torch.tensor(MASK, dtype=torch.uint8), behaviour=behaviour, advantages=0.5 * torch.tensor(MASK), rewards=rewards,
        cu_seqlens=torch.tensor([0, 6], dtype=torch.int32),
        # garbage where nothing is trained
        reference=torch.tensor([9.0, -1.5, -2.0, 9.0, -5.0, 9.0]), teacher=torch.tensor([9.0, -0.5, -4.0, 9.0, -3.0, 9.0]),
    )  # fmt: skip


def credited(objective: dict[str, Any], *rows: DeviceRow) -> list[list[float]]:
    found = assign_token_credit(rows, Objective.model_validate(objective), None)
    return [[round(value, 6) for value in each.advantages.tolist()] for each in found]


def test_those_of_siblings_stay_as_they_are() -> None:
    assert credited({}, row()) == [[0, 0.5, 0.5, 0, 0.5, 0]]


def test_returns_are_what_is_still_to_come() -> None:
    assert credited({"advantages": {"type": "returns", "whiten": False}}, row()) == [[0, 1, 1, 0, 1, 0]]
    discounted = {"advantages": {"type": "returns", "gamma": 0.5, "whiten": False}}
    assert credited(discounted, row()) == [[0, 0.25, 0.5, 0, 1, 0]], "an observation takes no time"


def test_each_token_pays_for_its_distance_from_the_reference() -> None:
    objective = {"advantages": {"type": "returns", "whiten": False}, "kl_in_reward": 0.1}
    # distances 0.5, 0 and 2
    assert credited(objective, row()) == [[0, 0.75, 0.8, 0, 0.8, 0]]


def test_whitening_is_over_all_rows() -> None:
    high, low = credited({"advantages": "returns"}, row(reward=1.0), row(reward=-1.0))
    scale = np.sqrt(6 / 5)
    assert [*high, *low] == pytest.approx([value / scale for value in [*MASK, *(-each for each in MASK)]], abs=1e-5)


def test_distillation_adds_group_advantages() -> None:
    alone = {"advantages": {"type": "distillation", "coefficient": 2.0}}
    assert credited(alone, replace(row(), advantages=torch.zeros(6))) == [[0, 1, -4, 0, 0, 0]]
    assert credited(alone, row()) == [[0, 1.5, -3.5, 0, 0.5, 0]]


@pytest.mark.parametrize(("rewards", "counts"), [(None, False), ({"scale": "none"}, True)])
def test_rewards_count_beside_a_teacher_only_where_they_are_asked_for(rewards: dict[str, str] | None, counts: bool) -> None:
    objective = Objective.model_validate({"advantages": {"type": "distillation", "rewards": rewards}})
    siblings = [rollout(sample([1, 2], [0, 1]), reward=reward) for reward in (0.0, 1.0)]
    packed = pack_batch([taken(*siblings)], objective=objective, capacity=100)
    assert any(each.advantages.any() for each in packed.minibatches[0].shards[0]) == counts


# -- preferences ----------------------------------------------------------------------------------------------------------


def test_pairs_are_the_best_and_the_worst_of_those_that_are_trained() -> None:
    rewards, groups = [1, 3, 2, 3, 5, 5, 0, 9, 4], [0, 0, 0, 0, 1, 1, 2, 2, 2]
    valid = [True] * 7 + [False, True]
    assert best_and_worst(rewards, groups, valid=valid).tolist() == [-1, 1, 0, 0, 0, 0, -1, 0, 1]

    siblings = [rollout(sample([1, 2], [0, 1]), reward=reward) for reward in (0.0, 1.0, 0.5)]
    packed = pack_batch([taken(*siblings)], objective=load_objective("online_dpo"), capacity=100)
    (only,) = packed.minibatches[0].shards[0]
    assert len(only.cu_seqlens) == 3, "the one in the middle is left out"
    assert sorted(only.advantages[only.mask != 0]) == [-1, 1]


@pytest.mark.parametrize("variant", ["sigmoid", "ipo"])
def test_a_step_has_the_gradient_of_the_preference_loss_of_pairs_in_different_rows(variant: str) -> None:
    random = torch.Generator().manual_seed(0)
    nothing: Any = None

    def of_pairs(sign: float) -> DeviceRow:
        """One side of both pairs: answers of 2 and 3 tokens."""
        mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.uint8)
        proximal, behaviour, reference = (-torch.rand(7, generator=random) for _ in range(3))
        return DeviceRow(
            token_ids=nothing, positions=nothing, targets=nothing, ages=nothing, packing=nothing, rewards=nothing,
            mask=mask, behaviour=behaviour, advantages=sign * mask, reference=reference, proximal=proximal,
            cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32), group_ids=torch.tensor([0, 1]),
        )  # fmt: skip

    objective = load_objective("online_dpo").model_dump()
    objective["advantages"] |= {"variant": variant, "beta": 0.3}
    objective["policy_loss"] |= {"trust_mask": ()}
    rows, chosen = [of_pairs(1.0), of_pairs(-1.0)], Objective.model_validate(objective)
    whole = {
        "mask": torch.cat([row.mask for row in rows]),
        "cu_seqlens": torch.tensor([0, 3, 7, 10, 14], dtype=torch.int32),
        "group_ids": torch.tensor([0, 1, 0, 1]),
    }
    found: list[torch.Tensor] = []
    for row in assign_token_credit(rows, chosen, None):
        assert row.proximal is not None
        current = row.proximal.clone().requires_grad_()
        loss = chosen.loss(
            current=current, behaviour=row.behaviour, advantages=row.advantages, mask=row.mask, cu_seqlens=row.cu_seqlens,
            group_ids=row.group_ids, normaliser=count(**whole), proximal=None, reference=None, entropy=None, ages=None,
        ).loss  # fmt: skip
        loss.backward()
        assert current.grad is not None
        found.append(current.grad)

    inputs = [row.proximal.clone().requires_grad_() for row in rows if row.proximal is not None]
    sums, references = (
        [torch.stack([each[1:3].sum(), each[4:7].sum()]) for each in per_row]
        for per_row in (inputs, [row.reference for row in rows if row.reference is not None])
    )
    config = DpoConfig.model_validate({"variant": variant, "beta": 0.3, "length_normalised": False})
    dpo_loss(config, sums[0], references[0], sums[1], references[1]).loss.backward()
    for mine, other in zip(found, inputs, strict=True):
        torch.testing.assert_close(mine, other.grad)
        assert mine.any()
