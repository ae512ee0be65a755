"""One process: the gradient is the formula's, bins do not matter, a bad step changes nothing, temperature counts."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import bare, load_full
from async_rl.types import Status
from learner.batches.batch import PackedBatch, pack_batch
from learner.objective import Objective, load_objective, preset_names
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of
from tests.support.learner_rank import CPU, OBJECTIVE, VOCABULARY, batch, config, shape, taken_groups
from tests.support.ppo_stage import SHARED, learner_config

REINFORCE = Objective.model_validate(
    {"advantages": {"scale": "none"}, "policy_loss": {"surrogate": "reinforce", "aggregation": "sequence_mean_token_mean"}}
)


@pytest.fixture
def rank_group() -> Iterator[RankGroup]:
    made = RankGroup(config(), OBJECTIVE, shape(config()))
    yield made
    made.stop()


@pytest.fixture
def unclipped() -> Iterator[RankGroup]:
    made = RankGroup(config(clip_grad=0), OBJECTIVE, shape(config()))
    yield made
    made.stop()


def gradients(rank_group: RankGroup, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step, after which the weights are what they were."""
    before = weights_of(rank_group)
    result = rank_group.step(batch)
    found = {name: parameter.main_grad.clone() for name, parameter in bare(rank_group.model.chunks[0]).named_parameters()}
    rank_group.model.load(before)
    return result.loss, found


@pytest.mark.parametrize("tied", [False, True], ids=["own output layer", "the embedding's"])
@pytest.mark.parametrize("logits_gb", [2.0, 1e-6], ids=["whole logits", "chunks of 4 tokens"])
def test_the_gradient_is_that_of_the_written_formula(logits_gb: float, tied: bool) -> None:
    """Sequence by sequence, without packing, bins or our loss functions."""
    under = config(clip_grad=0, tied=tied, logits_gb=logits_gb)
    rank_group = RankGroup(under, REINFORCE, shape(under))
    groups = taken_groups(1)
    loss, found = gradients(rank_group, pack_batch(groups, objective=REINFORCE, capacity=40))

    # not the model that was trained, whose gradients go to its buffers
    gpt, total, rollouts = build_model(shape(under), device=CPU, dtype=torch.float32, seed=None), torch.zeros(()), 0
    load_full(gpt, shape(under), weights_of(rank_group))
    for taken in groups:
        mean = np.mean([rollout.reward for rollout in taken.group.rollouts])
        for rollout in taken.group.rollouts:
            [row] = rollout.samples
            ids = torch.from_numpy(row.token_ids).long()
            logits = forward_packed(gpt, *pack([ids])).logits()[:, :VOCABULARY] / 0.9
            logprobs = logits[:-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            sampled = torch.from_numpy(row.loss_mask[1:]).bool()
            total = total - float(rollout.reward - mean) * logprobs[sampled].mean()
            rollouts += 1
    expected = torch.autograd.grad(total / rollouts, list(gpt.parameters()))
    rank_group.stop()
    assert loss == pytest.approx(total.item() / rollouts, abs=1e-6)
    for (name, _), gradient in zip(gpt.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("capacity", [20, 33, 50])
def test_bins_do_not_matter(unclipped: RankGroup, capacity: int) -> None:
    groups = taken_groups(1)
    loss, expected = gradients(unclipped, pack_batch(groups, objective=OBJECTIVE, capacity=10_000))
    divided = pack_batch(groups, objective=OBJECTIVE, capacity=capacity)
    assert len(divided.minibatches[0].shards[0]) > 1
    found_loss, found = gradients(unclipped, divided)
    assert found_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "preset", sorted({*preset_names()} - {"on_policy_distill"})
)  # which needs a folder: test_ppo_learns.py
def test_every_preset_trains(preset: str) -> None:
    objective = load_objective(preset)
    under = learner_config(objective=preset, critic=SHARED if objective.needs_values else None)
    rank_group = RankGroup(under, objective, shape(under))
    before = weights_of(rank_group)
    result = rank_group.step(pack_batch(taken_groups(1), objective=objective, capacity=40))
    after = weights_of(rank_group)
    rank_group.stop()
    assert math.isfinite(result.loss)
    assert not result.skipped
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(rank_group: RankGroup, poison: float) -> None:
    rank_group.step(batch(1, 1))
    before = weights_of(rank_group)
    good = batch(2, 1)
    [minibatch] = good.minibatches
    [[*bins]] = minibatch.shards
    spoilt = bins[0].advantages.copy()
    spoilt[bins[0].mask != 0] = poison
    spoilt_shards = ((replace(bins[0], advantages=spoilt), *bins[1:]),)
    result = rank_group.step(replace(good, minibatches=(replace(minibatch, shards=spoilt_shards),)))
    assert result.skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(rank_group).items())

    resumed = rank_group.step(good)
    undisturbed = RankGroup(config(), OBJECTIVE, shape(config()))
    undisturbed.step(batch(1, 1))
    assert resumed == undisturbed.step(good)


def test_nothing_to_train_on_is_a_step_without_gradient(rank_group: RankGroup) -> None:
    empty = pack_batch([], objective=OBJECTIVE, capacity=40)
    result = rank_group.step(empty)
    assert (result.loss, result.grad_norm, result.skipped) == (0, 0, False)


def test_a_step_of_several_updates_reports_what_one_comes_to(rank_group: RankGroup) -> None:
    """Also where some of them have no token of an age, or nothing to train on at all."""
    groups = [replace(taken, version_at_take=version) for version, taken in zip((2, 1, 0), taken_groups(1), strict=True)]
    failed = [replace(rollout, status=Status.FAILED) for rollout in groups[2].group.rollouts]
    groups[2] = replace(groups[2], group=replace(groups[2].group, rollouts=tuple(failed)))
    made = pack_batch(groups, objective=OBJECTIVE, capacity=40, minibatches=3)
    metrics = rank_group.step(made).metrics
    trained = [each.counts.tokens for each in made.minibatches]
    assert trained[2] == 0
    assert [3 * metrics[f"policy/age_{age}/tokens"] for age in ("2_3", "1")] == pytest.approx(trained[:2])
    assert 3 * metrics["policy/tokens"] == pytest.approx(sum(trained))
    assert "policy/age_0/tokens" not in metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=0.2)  # the empty update is no ratio of 0
    assert metrics["policy/ess"] > 0.8
    assert metrics["policy/skipped_updates"] == 0


def test_the_batch_must_be_cut_for_these_ranks(rank_group: RankGroup) -> None:
    with pytest.raises(ValueError, match="2 shards for 1 data-parallel ranks"):
        rank_group.step(batch(1, 2))
