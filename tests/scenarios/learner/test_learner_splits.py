"""However a batch is split into rows, and whatever masked places hold, the update is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.megatron import parallel
from learner.batches.batch import Minibatch, PackedBatch, pack_batch
from learner.batches.packed_rows import PackedRow
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup
from learner.step import StepResult
from tests.support.full_weights import weights_of
from tests.support.learner_rank import CPU, OBJECTIVE, VOCABULARY, config, shape, taken_groups

OBJECTIVES = [
    OBJECTIVE,
    Objective.model_validate({"policy_loss": {"surrogate": "gspo", "aggregation": "sequence_mean_token_mean"}}),
    Objective.model_validate({"policy_loss": {"surrogate": "cispo", "aggregation": "token_mean"}}),
]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    parallel.initialize(device=CPU)
    yield
    parallel.shutdown()


def updated(batch: PackedBatch, objective: Objective) -> tuple[StepResult, dict[str, Tensor]]:
    """What one step makes of the first weights."""
    rank_group = RankGroup(config(), objective, shape(config()))
    return rank_group.step(batch), weights_of(rank_group)


def of_one_rank(batch: PackedBatch, bins: list[PackedRow]) -> PackedBatch:
    counts = batch.minibatches[0].counts
    return replace(batch, minibatches=(Minibatch(shards=(tuple(bins),), counts=counts),))


def all_bins(batch: PackedBatch) -> list[PackedRow]:
    return [each for shard in batch.minibatches[0].shards for each in shard]


def with_garbage(source: PackedRow, rng: np.random.Generator) -> PackedRow:
    """Where nothing is trained, whatever can be there is."""
    tokens, masked = len(source.token_ids), source.mask == 0
    noise = rng.normal(0, 100, (2, tokens)).astype(np.float32)
    return replace(
        source,
        targets=np.where(masked, rng.integers(0, VOCABULARY, tokens), source.targets).astype(np.int32),
        behaviour=np.where(masked, noise[0], source.behaviour),
        advantages=np.where(masked, noise[1], source.advantages),
        ages=np.where(masked, 1000, source.ages).astype(np.int32),
    )


@settings(max_examples=10, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    objective=st.sampled_from(OBJECTIVES),
    step=st.integers(0, 50),
    capacity=st.integers(20, 60),
    shards=st.integers(1, 3),
    empty=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_any_split_gives_the_same_loss_gradient_and_weights(
    objective: Objective, step: int, capacity: int, shards: int, empty: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = pack_batch(taken_groups(step), objective=objective, capacity=10_000)
    split = pack_batch(taken_groups(step), objective=objective, capacity=capacity, num_shards=shards)
    nothing = all_bins(pack_batch([], objective=objective, capacity=capacity))[:1] * empty
    bins = [with_garbage(each, rng) for each in all_bins(split)] + nothing
    rng.shuffle(bins)  # pyright: ignore[reportArgumentType]

    expected, next_weights = updated(whole, objective)
    found, weights = updated(of_one_rank(split, bins), objective)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6), "its terms are of order 1, and float32"
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4, abs=1e-7)
    for name, tensor in next_weights.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
