"""The critic's loss, supervised fine-tuning, preferences and distillation: by hand, by finite differences, and in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from async_rl.config.training import DpoConfig
from async_rl.telemetry import find_metric
from learner.advantages.gae import distillation_advantages
from learner.losses.aggregation import count
from learner.losses.config import PolicyLossConfig, ValueLossConfig
from learner.losses.functions import Loss, dpo_loss, policy_loss, reward_model_loss, sequence_logprobs, sft_loss, value_loss
from learner.losses.totals import Totals


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_parts(parts: list[Loss]) -> tuple[float, dict[str, float]]:
    totals = reduce(Totals.merged, [part.totals for part in parts])
    return sum(part.loss.item() for part in parts), totals.metrics


# -- the critic ----------------------------------------------------------------------------------------------------------


def of_values(values: Tensor, clip: float | None = 0.2) -> Loss:
    return value_loss(
        ValueLossConfig(clip=clip),
        values=values,
        old_values=doubles(1.0, 1.0, 1.0, math.nan),
        returns=doubles(2.0, 2.0, 0.0, math.nan),
        mask=torch.tensor([1, 1, 1, 0]),
        cu_seqlens=torch.tensor([0, 2, 4]),
    )


def test_value_loss_by_hand() -> None:
    values = doubles(1.5, 1.1, 1.5, math.nan).requires_grad_()
    made = of_values(values)
    # the first moved 0.5 towards its return, of which 0.2 count: (1.2 - 2)^2 and no slope; the third moved away from its own
    assert made.loss.item() == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 2 / 3)
    made.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, -0.9 / 3, 1.5 / 3, 0])
    assert made.metrics["clip_frac"] == pytest.approx(1 / 3)
    assert made.metrics["mean"] == pytest.approx(4.1 / 3)
    assert made.metrics["return_mean"] == pytest.approx(4 / 3)
    errors = [0.5, 0.9, -1.5]
    left = sum(each**2 for each in errors) / 3 - (sum(errors) / 3) ** 2
    assert made.metrics["explained_variance"] == pytest.approx(1 - left / (8 / 9))

    free = of_values(values, clip=None)
    assert free.loss.item() == pytest.approx((0.5**2 + 0.9**2 + 1.5**2) / 2 / 3)


def test_value_loss_in_parts_and_by_finite_differences() -> None:
    mask, cu_seqlens = torch.tensor([1, 0, 1, 1, 0, 1, 1]), torch.tensor([0, 3, 3, 7])
    values, old, returns = (normal(7, seed) for seed in range(3))
    counts = count(mask=mask, cu_seqlens=cu_seqlens)

    def part(values: Tensor, chosen: slice, cu_seqlens: Tensor) -> Loss:
        return value_loss(
            ValueLossConfig(), values=values[chosen], old_values=old[chosen], returns=returns[chosen], mask=mask[chosen],
            cu_seqlens=cu_seqlens, normaliser=counts,
        )  # fmt: skip

    whole = part(values, slice(0, 7), cu_seqlens)
    parts = [part(values, slice(0, 3), torch.tensor([0, 3])), part(values, slice(3, 7), torch.tensor([0, 0, 4]))]
    loss, metrics = in_parts(parts)
    assert loss == pytest.approx(whole.loss.item())
    assert metrics == pytest.approx(whole.metrics)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda values: part(values, slice(0, 7), cu_seqlens).loss, values)


# -- supervised fine-tuning ------------------------------------------------------------------------------------------------


def test_sft_loss() -> None:
    current, mask = doubles(-1.0, -math.inf, -2.0, -4.5).requires_grad_(), torch.tensor([1, 0, 1, 1])
    made = sft_loss(current, mask)
    made.loss.backward()
    assert made.loss.item() == pytest.approx(2.5)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3])
    assert made.metrics == pytest.approx({"loss": 2.5, "tokens": 3, "nll": 2.5, "perplexity": math.exp(2.5)})
    counts = count(mask=mask, cu_seqlens=torch.tensor([0, 4]))
    loss, metrics = in_parts(
        [sft_loss(current[:3], mask[:3], normaliser=counts), sft_loss(current[3:], mask[3:], normaliser=3)]
    )
    assert loss == pytest.approx(2.5)
    assert metrics == pytest.approx(made.metrics)


# -- preferences -------------------------------------------------------------------------------------------------------------


def test_logprobs_of_whole_answers() -> None:
    sums, tokens = sequence_logprobs(
        doubles(-1, -2, -4, math.nan, -8), torch.tensor([1, 1, 1, 0, 0]), torch.tensor([0, 2, 2, 4, 5])
    )
    assert sums.tolist() == [-3, 0, -4, 0]
    assert tokens.tolist() == [2, 0, 1, 0]


def of_pairs(**choices: Any) -> Callable[..., Loss]:
    """Two pairs, with implicit advantages of 3 and -2 over the reference: 1 and -1/2 for each token."""

    def loss(chosen: Tensor, rejected: Tensor, pairs: slice = slice(0, 2), normaliser: float | None = None) -> Loss:
        return dpo_loss(
            DpoConfig(**choices), chosen[pairs], doubles(-6, -8)[pairs], rejected[pairs], doubles(-9, -5)[pairs],
            chosen_tokens=torch.tensor([2, 4])[pairs], rejected_tokens=torch.tensor([1, 4])[pairs], normaliser=normaliser,
        )  # fmt: skip

    return loss


PAIRS = (doubles(-4, -9), doubles(-10, -4))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"beta": 0.5}, -log_sigmoid(1.5) - log_sigmoid(-1)),
        (
            {"beta": 0.5, "label_smoothing": 0.1},
            -0.9 * (log_sigmoid(1.5) + log_sigmoid(-1)) - 0.1 * (log_sigmoid(-1.5) + log_sigmoid(1)),
        ),
        # for each token: 2 / 2 + 1 / 1 and -1 / 4 - 1 / 4
        ({"beta": 0.5, "length_normalised": True}, -log_sigmoid(1) - log_sigmoid(-0.25)),
        ({"variant": "ipo", "beta": 0.5}, (2 - 1) ** 2 + (-0.5 - 1) ** 2),
        ({"variant": "ipo", "beta": 0.5, "length_normalised": False}, (3 - 1) ** 2 + (-2 - 1) ** 2),
        ({"beta": 0.5, "nll_coefficient": 2.0}, -log_sigmoid(1.5) - log_sigmoid(-1) + 2 * (4 / 2 + 9 / 4)),
    ],
    ids=str,
)
def test_dpo_loss(choices: dict[str, Any], expected: float) -> None:
    loss = of_pairs(**choices)
    whole = loss(*PAIRS)
    assert whole.loss.item() == pytest.approx(expected / 2)
    split, metrics = in_parts([loss(*PAIRS, slice(0, 1), 2), loss(*PAIRS, slice(1, 2), 2), loss(*PAIRS, slice(2, 2), 2)])
    assert split == pytest.approx(whole.loss.item())
    assert metrics == pytest.approx(whole.metrics)
    inputs = tuple(each.clone().requires_grad_() for each in PAIRS)
    assert torch.autograd.gradcheck(lambda chosen, rejected: loss(chosen, rejected).loss, inputs)


def test_dpo_metrics() -> None:
    metrics = of_pairs(beta=0.5)(*PAIRS).metrics
    assert metrics["pairs"] == 2
    assert metrics["accuracy"] == 1 / 2
    assert (metrics["reward_chosen"], metrics["reward_rejected"]) == (pytest.approx(0.25), 0)
    assert metrics["margin"] == pytest.approx(0.25)


def test_dpo_configuration() -> None:
    assert DpoConfig(variant="ipo").length_normalised
    assert not DpoConfig().length_normalised
    with pytest.raises(ValidationError, match="label_smoothing belongs to variant: sigmoid"):
        DpoConfig(variant="ipo", label_smoothing=0.1)
    with pytest.raises(ValueError, match="`chosen_tokens` must be given"):
        dpo_loss(DpoConfig(nll_coefficient=0.1), *(doubles(-1.0) for _ in range(4)))


def test_reward_model_loss() -> None:
    chosen, rejected = doubles(2, -1).requires_grad_(), doubles(0.5, 1).requires_grad_()
    whole = reward_model_loss(chosen, rejected)
    assert whole.loss.item() == pytest.approx(-(log_sigmoid(1.5) + log_sigmoid(-2)) / 2)
    assert whole.metrics["accuracy"] == 1 / 2
    assert whole.metrics["margin"] == pytest.approx(-0.25)
    assert whole.metrics["score_mean"] == pytest.approx(2.5 / 4)
    loss, metrics = in_parts(
        [reward_model_loss(chosen[:1], rejected[:1], normaliser=2), reward_model_loss(chosen[1:], rejected[1:], normaliser=2)]
    )
    assert loss == pytest.approx(whole.loss.item())
    assert metrics == pytest.approx(whole.metrics)
    assert torch.autograd.gradcheck(lambda *scores: reward_model_loss(*scores).loss, (chosen, rejected))


# -- distillation ------------------------------------------------------------------------------------------------------------


def test_distillation_advantages_pull_towards_the_teacher() -> None:
    advantages = distillation_advantages(
        teacher=doubles(-1, -3, math.nan, -100), student=doubles(-2, -1, -1, -1), mask=torch.tensor([1, 1, 0, 1])
    )
    assert advantages.tolist() == [1, -2, 0, -20]


def test_distillation_follows_the_reverse_divergence() -> None:
    """Over the student's own tokens, here all of a vocabulary, each as often as it is likely."""
    logits, teacher = normal(6, 1).requires_grad_(), normal(6, 2).log_softmax(0)
    student = logits.log_softmax(0)
    [expected] = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    ones = torch.ones(6)
    advantages = distillation_advantages(teacher=teacher, student=student, mask=ones)
    average = torch.zeros(())
    for token in range(6):
        chosen = slice(token, token + 1)
        loss = policy_loss(
            PolicyLossConfig.model_validate({"surrogate": "importance"}), current=student[chosen], behaviour=student[chosen],
            advantages=advantages[chosen], mask=ones[chosen], cu_seqlens=torch.tensor([0, 1]),
        ).loss  # fmt: skip
        average = average + student[token].exp().detach() * loss
    torch.testing.assert_close(torch.autograd.grad(average, logits)[0], expected)


# -- all of them -------------------------------------------------------------------------------------------------------------


NO_SEQUENCES = torch.tensor([0])


@pytest.mark.parametrize(
    ("prefix", "loss"),
    [
        ("value", lambda x: value_loss(ValueLossConfig(), values=x, old_values=x, returns=x, mask=x, cu_seqlens=NO_SEQUENCES)),
        ("train", lambda x: sft_loss(x, x)),
        ("train", lambda x: dpo_loss(DpoConfig(nll_coefficient=1), x, x, x, x, chosen_tokens=x)),
        ("train", lambda x: reward_model_loss(x, x)),
    ],
)
def test_nothing_to_train_is_a_zero_that_can_be_differentiated(prefix: str, loss: Callable[[Tensor], Loss]) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    made = loss(nothing)
    made.loss.backward()
    assert made.loss.item() == 0
    assert all(math.isfinite(value) for value in made.metrics.values())
    for name in made.metrics:
        assert find_metric(f"{prefix}/{name}") is not None, name
