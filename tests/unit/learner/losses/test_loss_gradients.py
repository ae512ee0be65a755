"""Every policy loss there is, value and gradient, against one written on paper; and that splitting a step changes nothing."""

from __future__ import annotations

import math
import random
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.losses.aggregation import count
from learner.losses.config import PolicyLossConfig
from learner.losses.diagnostics import POLICY, policy_metrics
from learner.losses.functions import Loss, policy_loss
from learner.losses.totals import Totals
from tests.unit.learner.losses.loss_batches import SURROGATES, Batch, batches, every_choice, random_batch
from tests.unit.learner.losses.naive_losses import naive_policy_loss

EXAMPLES = settings(max_examples=25, print_blob=True)


def gradients(loss: Tensor, batch: Batch) -> list[Tensor]:
    """0 for what the loss does not depend on."""
    inputs = (batch.current, batch.entropy)
    found = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True) if loss.requires_grad else (None, None)
    return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(inputs, found, strict=True)]


def assert_same(found: Tensor, expected: Tensor, scale: float) -> None:
    """Sums of large terms may cancel, so what counts is the distance as a share of the largest of them."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda each: "-".join(str(value) for value in each.values()))
def test_value_and_gradient_are_those_on_paper(surrogate: dict[str, Any]) -> None:
    @EXAMPLES
    @given(choices=every_choice(surrogate), batch=batches())
    def check(choices: dict[str, Any], batch: Batch) -> None:
        made = policy_loss(PolicyLossConfig.model_validate(choices), **batch.whole())
        expected = naive_policy_loss(choices, batch.on_paper())
        wanted = gradients(expected, batch)
        scale = max([1.0, *(float(each.abs().max()) for each in wanted if len(each))]) * max(len(batch.mask), 1)
        assert_same(made.loss, expected.detach(), scale)
        for grad, paper in zip(gradients(made.loss, batch), wanted, strict=True):
            assert_same(grad, paper, scale)
        assert all(math.isfinite(value) for value in made.metrics.values())

    check()


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda each: "-".join(str(value) for value in each.values()))
def test_any_split_gives_the_same_loss_gradient_and_metrics(surrogate: dict[str, Any]) -> None:
    @EXAMPLES
    @given(choices=every_choice(surrogate), batch=batches(), parts=st.integers(1, 4), rng=st.randoms(use_true_random=False))
    def check(choices: dict[str, Any], batch: Batch, parts: int, rng: random.Random) -> None:
        config, whole = PolicyLossConfig.model_validate(choices), batch.whole()
        expected = policy_loss(config, **whole)
        counts = count(mask=batch.mask, cu_seqlens=whole["cu_seqlens"], group_ids=batch.group_ids)
        order = rng.sample(range(len(batch.lengths)), len(batch.lengths))
        split = [policy_loss(config, **batch.part(order[part::parts]), normaliser=counts) for part in range(parts)]
        together = torch.stack([part.loss for part in split]).sum()

        wanted = gradients(expected.loss, batch)
        scale = max([1.0, *(float(each.abs().max()) for each in wanted if len(each))]) * max(len(batch.mask), 1)
        assert_same(together, expected.loss, scale)
        for grad, at_once in zip(gradients(together, batch), wanted, strict=True):
            assert_same(grad, at_once, scale)
        assert_same_metrics(policy_metrics(merged(split)), expected.metrics, scale)

    check()


def merged(parts: list[Loss]) -> Totals:
    return reduce(Totals.merged, [part.totals for part in parts], Totals.empty(POLICY))


def assert_same_metrics(found: dict[str, float], expected: dict[str, float], scale: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # a deviation is the root of a difference, so of its rounding too
        slack = 1e-6 * max(1.0, expected["ratio_max"]) if name == "ratio_std" else 1e-11 * scale
        assert found[name] == pytest.approx(value, rel=1e-9, abs=slack), name


# -- identities --------------------------------------------------------------------------------------------------------


def gradient_of(batch: Batch, **choices: Any) -> Tensor:
    return gradients(policy_loss(PolicyLossConfig.model_validate(choices), **batch.whole()).loss, batch)[0]


@pytest.fixture
def batch() -> Batch:
    return random_batch(3, [5, 3, 8, 1, 6], spread=0.1, advantages="sequence")


def test_an_unclipped_ratio_and_the_score_have_the_same_gradient(batch: Batch) -> None:
    score = gradient_of(batch, surrogate={"type": "cispo", "cap": 1e9})
    assert score.abs().max() > 0.01
    torch.testing.assert_close(gradient_of(batch, surrogate="importance"), score)
    torch.testing.assert_close(gradient_of(batch, surrogate={"type": "ppo_clip", "clip_low": 1, "clip_high": 1e9}), score)
    torch.testing.assert_close(gradient_of(batch, surrogate={"type": "dppo", "low": 1, "high": 1}), score)


def test_gspo_has_the_gradient_of_its_token_form_where_advantages_are_those_of_sequences(batch: Batch) -> None:
    """s_t = sg(s) exp(c_t - sg(c_t)), its loss a mean over sequences of the mean over tokens."""
    losses = []
    for sequence in batch.on_paper():
        if sequence.tokens:
            s = math.exp(sum(token.c.item() - token.b for token in sequence.tokens) / len(sequence.tokens))
            tokens = [s * torch.exp(token.c - token.c.item()) for token in sequence.tokens]
            clipped = [each.clamp(1 - 0.02, 1 + 0.03) for each in tokens]
            terms = zip(tokens, clipped, sequence.tokens, strict=True)
            losses.append(torch.stack([-torch.min(x * t.advantage, y * t.advantage) for x, y, t in terms]).mean())
    expected = gradients(torch.stack(losses).mean(), batch)[0]
    found = gradient_of(batch, surrogate={"type": "gspo", "clip_low": 0.02, "clip_high": 0.03})
    assert 0 < (expected == 0).sum() < len(expected)
    torch.testing.assert_close(found, expected)


def test_sapo_begins_as_the_ratio_does() -> None:
    on_policy = random_batch(3, [5, 3], density=1, spread=0)
    torch.testing.assert_close(
        gradient_of(on_policy, surrogate={"type": "sapo", "tau_positive": 3, "tau_negative": 7}),
        gradient_of(on_policy, surrogate="importance"),
    )


@pytest.mark.parametrize(
    "kl", [{"estimator": "k2"}, {"estimator": "k1", "unbiased": True}, {"estimator": "k3", "unbiased": True}]
)
def test_these_penalties_follow_the_divergence_on_average(kl: dict[str, Any]) -> None:
    """Over the policy's own tokens, here all of a vocabulary, each as often as it is likely."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    [expected] = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    config = PolicyLossConfig.model_validate({"kl": kl | {"coefficient": 1.0}})
    average = torch.zeros(())
    for token in range(6):
        c, q = logprobs[token : token + 1], reference[token : token + 1]
        penalty = policy_loss(
            config, current=c, behaviour=c, advantages=torch.zeros(1), reference=q,
            mask=torch.ones(1), cu_seqlens=torch.tensor([0, 1]),
        ).loss  # fmt: skip
        average = average + logprobs[token].exp().detach() * penalty
    torch.testing.assert_close(torch.autograd.grad(average, logits)[0], expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("surrogate", ["importance", "reinforce", "sapo", {"type": "gspo", "clip_low": 1, "clip_high": 1e3}])
def test_finite_differences_agree_where_the_loss_is_smooth(surrogate: Any, estimator: str) -> None:
    batch = random_batch(3, [4, 0, 1, 3])
    config = PolicyLossConfig.model_validate(
        {"surrogate": surrogate, "kl": {"estimator": estimator, "coefficient": 0.3}, "entropy_coefficient": 0.1}
    )

    def loss(current: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(config, **batch.whole() | {"current": current, "entropy": entropy}).loss

    assert torch.autograd.gradcheck(loss, (batch.current, batch.entropy))
