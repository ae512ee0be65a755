"""Advantages of single tokens, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.batches.batch import pack_batch
from learner.batches.device_rows import DeviceRow
from learner.objective import Objective
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
