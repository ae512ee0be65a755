"""The policy loss: numbers worked out by hand, edges, and what a configuration may say.

That every combination of choices has the right value and gradient: test_loss_gradients.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from learner.losses.aggregation import count
from learner.losses.config import PolicyLossConfig
from learner.losses.functions import policy_loss
from learner.losses.segments import Segments
from tests.unit.learner.losses.loss_batches import AGGREGATIONS, ANCHORS, SURROGATES, TRUST_MASKS, random_batch


def config(**choices: Any) -> PolicyLossConfig:
    return PolicyLossConfig.model_validate(choices)


# -- numbers worked out by hand --------------------------------------------------------------------------------------------


def on_tokens(
    choices: dict[str, Any], ratios: tuple[float, ...], advantages: tuple[float, ...], **given: Any
) -> tuple[float, list[float]]:
    """Loss and gradient of one sequence, all of whose tokens the behaviour policy gave probability 0.2."""
    behaviour = torch.full((len(ratios),), math.log(0.2), dtype=torch.float64)
    current = (behaviour + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    if "weights" in given:
        given["proximal"] = behaviour + torch.tensor(given.pop("weights"), dtype=torch.float64).log()
    made = policy_loss(
        config(**({"aggregation": "sequence_mean_token_sum"} | choices)),
        current=current,
        behaviour=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(len(ratios)),
        cu_seqlens=torch.tensor([0, len(ratios)]),
        **given,
    )
    made.loss.backward()
    assert current.grad is not None
    return made.loss.item(), current.grad.tolist()


C = [math.log(0.2 * 1.5), math.log(0.2 * 0.5)]
"""Current log-probabilities at ratios 1.5 and 0.5."""
SOFT = 4 / (1 + math.exp(-0.5))
"""4 sigmoid(1.5 - 1), and its slope against log r:"""
SOFT_SLOPE = 1.5 * SOFT * (1 - SOFT / 4)


@pytest.mark.parametrize(
    ("surrogate", "advantages", "loss", "gradient"),
    [
        # min(1.5 * 2, 1.28 * 2) = 2.56 clipped; min(0.5 * 1, 0.8 * 1) = 0.5 free
        ("ppo_clip", (2.0, 1.0), -(2.56 + 0.5), [0.0, -0.5]),
        # negative advantages: min(-3, -2.56) = -3 free; min(-0.5, -0.8) = -0.8 clipped
        ("ppo_clip", (-2.0, -1.0), 3.0 + 0.8, [3.0, 0.0]),
        # the loss of the first may not exceed 1.2 * 2
        ({"type": "ppo_clip", "dual_clip": 1.2}, (-2.0, 1.0), 2.4 - 0.5, [0.0, -0.5]),
        # the ratio of both is sqrt(0.75) = 0.866, whose slope they share
        ({"type": "gspo", "clip_low": 0.2, "clip_high": 0.2}, (2.0, 1.0), -3 * 0.75**0.5, [-1.5 * 0.75**0.5] * 2),
        ("gspo", (2.0, -1.0), -2 * 0.75**0.5 + (1 - 3e-4), [-(0.75**0.5)] * 2),
        ({"type": "cispo", "cap": 1.25, "floor": 0.75}, (2.0, -1.0), -1.25 * 2 * C[0] + 0.75 * C[1], [-2.5, 0.75]),
        ("cispo", (2.0, -1.0), -1.5 * 2 * C[0] + 0.5 * C[1], [-3.0, 0.5]),
        # probabilities move from 0.2 to 0.3 and to 0.1
        ({"type": "dppo", "high": 0.05, "low": 0.2}, (2.0, -1.0), 0.5, [0.0, 0.5]),
        ({"type": "dppo", "high": 0.2, "low": 0.05}, (2.0, -1.0), -3.0, [-3.0, 0.0]),
        ({"type": "dppo", "high": 0.05, "low": 0.05}, (-2.0, 1.0), 3.0 - 0.5, [3.0, -0.5]),
        # KL(0.2 || 0.3) = 0.0258 and KL(0.2 || 0.1) = 0.0444
        ({"type": "dppo", "divergence": "kl", "high": 0.025, "low": 0.045}, (2.0, -1.0), 0.5, [0.0, 0.5]),
        ({"type": "dppo", "divergence": "kl", "high": 0.026, "low": 0.044}, (2.0, -1.0), -3.0, [-3.0, 0.0]),
        ({"type": "sapo", "tau_positive": 1.0}, (2.0, 0.0), -2 * SOFT, [-2 * SOFT_SLOPE, 0.0]),
        ({"type": "sapo", "tau_negative": 1.0}, (-2.0, 0.0), 2 * SOFT, [2 * SOFT_SLOPE, 0.0]),
        # the negative ones are weighed by their ratio, up to 1
        ("topr", (2.0, -1.0), -2 * C[0] + 0.5 * C[1], [-2.0, 0.5]),
        ("topr", (-2.0, 1.0), 2 * C[0] - C[1], [2.0, -1.0]),
        ("reinforce", (2.0, -1.0), -2 * C[0] + C[1], [-2.0, 1.0]),
        ("importance", (2.0, -1.0), -3.0 + 0.5, [-3.0, 0.5]),
    ],
    ids=str,
)
def test_surrogates(surrogate: Any, advantages: tuple[float, float], loss: float, gradient: list[float]) -> None:
    found = on_tokens({"surrogate": surrogate, "aggregation": "sequence_mean_token_sum"}, (1.5, 0.5), advantages)
    assert found[0] == pytest.approx(loss, rel=1e-12)
    assert found[1] == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # w = 2 and 0.25: product 0.5, geometric mean 0.707
        ("none", [1, 1]),
        ({"type": "truncate", "low": 0.5, "high": 1.5}, [1.5, 0.5]),
        ({"type": "truncate", "level": "sequence"}, [0.5, 0.5]),
        ({"type": "truncate", "level": "sequence", "high": 0.4}, [0.4, 0.4]),
        ("mask", [2, 0]),
        # bounds are inclusive
        ({"type": "mask", "low": 0.25, "high": 2}, [2, 0.25]),
        ({"type": "mask", "low": 0.26, "high": 1.99}, [0, 0]),
        ({"type": "sequence_mask", "low": 0.7, "high": 0.71}, [2, 0.25]),
        ({"type": "sequence_mask", "low": 0.7, "high": 0.71, "weight": "statistic"}, [0.5**0.5] * 2),
        ({"type": "sequence_mask", "low": 0.7, "high": 0.71, "weight": "one"}, [1, 1]),
        ({"type": "sequence_mask", "low": 0.71, "high": 2}, [0, 0]),
        ({"type": "sequence_mask", "statistic": "product", "low": 0.49, "high": 0.51, "weight": "statistic"}, [0.5, 0.5]),
        ({"type": "sequence_mask", "statistic": "product", "low": 0.51, "high": 2}, [0, 0]),
    ],
    ids=str,
)
def test_corrections(correction: Any, expected: list[float]) -> None:
    """What each token's loss is multiplied by: with an advantage of -1 and without a bound, the gradient over r."""
    choices = {"surrogate": "importance", "anchor": "proximal", "correction": correction}
    loss, gradient = on_tokens(choices, (3.0, 1.0), (-1.0, -1.0), weights=(2.0, 0.25))
    ratios = [3.0 / 2.0, 1.0 / 0.25]
    assert gradient == pytest.approx([weight * r for weight, r in zip(expected, ratios, strict=True)], rel=1e-12)
    assert loss == pytest.approx(sum(gradient), rel=1e-12)


def test_dppo_is_strict_with_what_becomes_certain() -> None:
    """From 0.2 to 1: KL = 0.2 log 0.2 + 0.8 log(0.8 / 1e-8) = 14.24, however much of the other tokens is left."""
    for high, loss in ((14.2, -1.0), (14.3, -6.0)):
        choices = {"surrogate": {"type": "dppo", "divergence": "kl", "high": high}}
        assert on_tokens(choices, (5.0, 1.0), (1.0, 1.0))[0] == pytest.approx(loss)


def test_the_loglinear_proximal_policy_is_one_version_back() -> None:
    """At age a, (a - 1) / a of the way from the sampling to the current log-probability; r is what is left of it."""
    choices = {"surrogate": "importance", "anchor": "proximal", "proximal_source": "loglinear"}
    ages = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    _, gradient = on_tokens(choices, (3.0,) * 4, (-1.0,) * 4, ages=ages)
    assert gradient == pytest.approx([3.0, 3.0, 3 ** (1 / 2), 3 ** (1 / 4)], rel=1e-12)
    _, gradient = on_tokens(choices | {"correction": {"type": "truncate", "high": 100}}, (3.0,) * 4, (-1.0,) * 4, ages=ages)
    assert gradient == pytest.approx([3.0] * 4, rel=1e-12)  # r w = rho


def test_trust_mask_drops_what_went_too_far_in_its_advantages_direction() -> None:
    # probabilities move from 0.2 to 0.5 and to 0.06; the denominator keeps both tokens
    choices = {"surrogate": "importance", "trust_mask": {"type": "tv", "high": 0.2, "low": 0.1}, "aggregation": "token_mean"}
    assert on_tokens(choices, (2.5, 0.3), (1.0, 1.0)) == (pytest.approx(-0.15), pytest.approx([0, -0.15]))
    assert on_tokens(choices, (2.5, 0.3), (-1.0, -1.0)) == (pytest.approx(1.25), pytest.approx([1.25, 0]))
    assert on_tokens(choices, (2.5, 0.3), (1.0, -1.0)) == (0, [0, 0])
    # each direction has its own bound: 0.35 is within the upper one, and beyond where the lower one would be
    assert on_tokens(choices, (1.75, 1.0), (1.0, -1.0)) == (pytest.approx(-0.375), pytest.approx([-0.875, 0.5]))


def test_off_policy_sequence_mask_drops_bad_samples_that_became_unlikely() -> None:
    # the mean of b - c is log(4) / 2 = 0.693
    masks = [{"type": "off_policy_sequence_mask", "delta": delta} for delta in (0.69, 0.7)]
    lost, kept = ({"surrogate": "importance", "trust_mask": mask} for mask in masks)
    assert on_tokens(lost, (0.25, 1.0), (-1.0, -2.0)) == (0, [0, 0])
    assert on_tokens(kept, (0.25, 1.0), (-1.0, -2.0)) == (pytest.approx(2.25), pytest.approx([0.25, 2.0]))
    assert on_tokens(lost, (0.25, 1.0), (1.0, 2.0)) == (pytest.approx(-2.25), pytest.approx([-0.25, -2.0]))
    # two masks: what either drops
    both = {"surrogate": "importance", "trust_mask": [masks[1], "tv"]}
    assert on_tokens(both, (2.5, 1.0), (1.0, 2.0)) == (-2.0, [0, -2.0])


def test_veto_removes_the_sequence_and_keeps_the_denominator() -> None:
    choices = {"surrogate": "importance", "veto": {"min_ratio": 1e-2}, "aggregation": "token_mean"}
    assert on_tokens(choices, (0.9, 0.5), (1.0, 1.0))[0] == pytest.approx(-0.7)
    assert on_tokens(choices, (0.9, 0.009), (1.0, 1.0)) == (0, [0, 0])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))]
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_estimators(estimator: str, value: float, slope: float, unbiased: bool) -> None:
    current = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    made = policy_loss(
        config(surrogate="reinforce", kl={"estimator": estimator, "coefficient": 0.1, "unbiased": unbiased}),
        current=current,
        behaviour=current.detach(),
        advantages=torch.zeros(1),
        mask=torch.ones(1),
        cu_seqlens=torch.tensor([0, 1]),
        reference=torch.tensor([-1.5], dtype=torch.float64),
    )
    made.loss.backward()
    assert current.grad is not None
    assert made.loss.item() == pytest.approx(0.1 * value)
    assert current.grad.item() == pytest.approx(0.1 * (slope + (value if unbiased else 0)))
    assert made.metrics["kl_reference"] == pytest.approx(value)


def test_an_entropy_bonus_pays_for_entropy() -> None:
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    choices = {"surrogate": "reinforce", "entropy_coefficient": 0.1, "aggregation": "token_mean"}
    loss, _ = on_tokens(choices, (1.0, 1.0), (0.0, 0.0), entropy=entropy)
    assert loss == pytest.approx(-0.2)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_what_has_no_coefficient_is_reported_where_it_is_known() -> None:
    batch = random_batch(11, [5, 3, 8])
    without = {name: each for name, each in batch.whole().items() if name not in ("reference", "entropy")}
    made, plain = policy_loss(config(), **batch.whole()), policy_loss(config(), **without)
    assert made.loss.item() == plain.loss.item()
    assert made.metrics["kl_reference"] > 0 == plain.metrics["kl_reference"]
    assert made.metrics["entropy"] == pytest.approx(batch.entropy[batch.mask != 0].mean().item())


def test_log_ratios_are_clamped_and_flat_outside() -> None:
    loss, gradient = on_tokens({"surrogate": "importance"}, (math.exp(30), 1.0), (1.0, 1.0))
    assert loss == pytest.approx(-(math.exp(20) + 1))
    assert gradient == [0, -1]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # sequences of 1, 3 and 2 trained tokens (and one of none); the last two are siblings
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean_token_mean", [1 / 3, 1 / 9, 1 / 6]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ({"type": "sequence_sum_norm", "length": 10}, [1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 2, 1 / 10, 1 / 10]),
    ],
    ids=str,
)
@pytest.mark.parametrize("ids_of", ["sequences", "tokens"])
def test_aggregations(aggregation: Any, expected: list[float], ids_of: str) -> None:
    current = torch.full((8,), -1.0, requires_grad=True)
    groups, lengths = torch.tensor([4, 9, 2, 2]), torch.tensor([2, 1, 3, 2])
    policy_loss(
        config(surrogate="reinforce", aggregation=aggregation),
        current=current,
        behaviour=current.detach(),
        advantages=-torch.ones(8),
        mask=torch.tensor([0, 1, 0, 1, 1, 1, 1, 1]),
        cu_seqlens=torch.tensor([0, 2, 3, 6, 8]),
        group_ids=groups if ids_of == "sequences" else groups.repeat_interleave(lengths),
    ).loss.backward()
    assert current.grad is not None
    one, three, two = expected
    assert current.grad.tolist() == pytest.approx([0, one, 0, three, three, three, two, two])


def test_a_plain_number_is_a_normaliser_too() -> None:
    batch = random_batch(11, [5, 3, 8, 1, 6, 4, 7])
    whole = policy_loss(config(), **batch.whole())
    parts = [policy_loss(config(), **batch.part([i]), normaliser=float(batch.mask.sum())) for i in range(7)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)


# -- edges ---------------------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "trust_mask": TRUST_MASKS,
    "veto": {"min_ratio": 0.55},
    "kl": {"coefficient": 0.2, "unbiased": True},
    "entropy_coefficient": 0.05,
}


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
def test_nothing_to_train_is_a_zero_that_can_be_differentiated(surrogate: Any) -> None:
    for tokens, anchored, aggregation in itertools.product((0, 4), ANCHORS[::2], AGGREGATIONS[::2]):
        current = torch.full((tokens,), -1.0, requires_grad=True)
        garbage = torch.full((tokens,), math.nan)
        made = policy_loss(
            config(surrogate=surrogate, aggregation=aggregation, **anchored, **EVERYTHING),
            current=current, behaviour=garbage, proximal=garbage, reference=garbage, entropy=garbage, advantages=garbage,
            ages=torch.zeros(tokens, dtype=torch.int32), mask=torch.zeros(tokens),
            cu_seqlens=torch.tensor([0, tokens] if tokens else [0]),
        )  # fmt: skip
        made.loss.backward()
        assert made.loss.item() == 0
        assert current.grad is not None
        assert current.grad.tolist() == [0] * tokens
        assert all(math.isfinite(value) for value in made.metrics.values())


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("anchored", ANCHORS[:6], ids=str)
def test_what_is_not_trained_on_never_enters(surrogate: Any, anchored: Any) -> None:
    """The other tensors hold NaN there already."""
    choices, batch = config(surrogate=surrogate, **anchored, **EVERYTHING), random_batch(11, [5, 3, 8, 1, 6, 4, 7])
    clean = policy_loss(choices, **batch.whole())
    with torch.no_grad():
        batch.current[batch.mask == 0] = math.inf
    dirty = policy_loss(choices, **batch.whole())
    dirty.loss.backward()
    assert dirty.loss.item() == clean.loss.item() != 0
    assert dirty.metrics == clean.metrics
    assert batch.current.grad is not None
    assert batch.current.grad[batch.mask == 0].count_nonzero() == 0
    assert batch.current.grad.isfinite().all()


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize(
    "rejecting",
    [
        {"veto": {"min_ratio": 0.999}},
        {"trust_mask": {"type": "tv", "high": 1e-9, "low": 1e-9}},
        {"anchor": "proximal", "correction": {"type": "mask", "low": 100, "high": 101}},
        {"anchor": "proximal", "correction": {"type": "sequence_mask", "low": 100, "high": 101}},
    ],
    ids=str,
)
def test_a_fully_masked_batch_has_no_gradient(surrogate: Any, rejecting: dict[str, Any]) -> None:
    """Every token is half as likely as it was, and should be."""
    current = torch.full((4,), math.log(0.1), dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((4,), math.log(0.2), dtype=torch.float64)
    made = policy_loss(
        config(surrogate=surrogate, **rejecting), current=current, behaviour=behaviour, proximal=behaviour,
        advantages=-torch.ones(4), mask=torch.ones(4), cu_seqlens=torch.tensor([0, 3, 4]),
    )  # fmt: skip
    made.loss.backward()
    assert made.loss.item() == 0
    assert current.grad is not None
    assert current.grad.tolist() == [0] * 4
    rejected = "corrected_frac" if "correction" in rejecting else "masked_frac"
    assert made.metrics[rejected] == 1
    assert made.metrics["tokens"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_dtype_of_its_tensors(dtype: torch.dtype) -> None:
    for surrogate, anchored in itertools.product(SURROGATES, ANCHORS[::4]):
        given = random_batch(1, [4, 3]).whole()
        given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}
        made = policy_loss(config(surrogate=surrogate, **anchored, **EVERYTHING), **given)
        assert made.loss.dtype == dtype


def test_sums_and_means_of_sequences() -> None:
    segments = Segments.of(torch.tensor([1, 0, 1, 0]), torch.tensor([0, 3, 3, 4]))
    values = segments.only(torch.tensor([1.0, math.nan, 2.0, math.nan]))
    assert segments.sums(values).tolist() == [3, 0, 0]
    assert segments.means(values).tolist() == [1.5, 0, 0]
    assert segments.spread(torch.tensor([7, 8, 9])).tolist() == [7, 7, 7, 9]


def test_counts_leave_out_what_has_nothing_to_train() -> None:
    counts = count(
        mask=torch.tensor([0, 1, 0, 1, 1]), cu_seqlens=torch.tensor([0, 2, 3, 3, 5]), group_ids=torch.tensor([5, 1, 5, 5])
    )
    assert (counts.tokens, counts.sequences) == (3, 2)
    assert (counts.groups.tolist(), counts.group_tokens.tolist()) == ([5], [3])


# -- configuration -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"surrogate": "gpso"}, "gpso"),
        ({"surrogate": {"type": "ppo_clip", "clip": 0.2}}, "clip"),
        ({"surrogate": {"type": "cispo", "cap": 1.0, "floor": 1.0}}, r"floor \(1.0\) must be below cap"),
        ({"correction": "truncate"}, "set anchor: proximal or correction: none"),
        ({"proximal_source": "loglinear"}, "set anchor: proximal"),
        ({"anchor": "proximal", "correction": {"type": "mask", "low": 2, "high": 1}}, r"low \(2.0\) must be below high"),
        ({"anchor": "proximal", "correction": "sequence_mask"}, "low"),
        ({"aggregation": "sequence_sum_norm"}, "length"),
        ({"trust_mask": "off_policy_sequence_mask"}, "delta"),
        ({"trust_mask": ["tv", "vt"]}, "vt"),
        ({"veto": {"min_ratio": 1}}, "less than 1"),
        ({"kl": {"estimator": "k4"}}, "k4"),
    ],
    ids=str,
)
def test_what_is_not_known_or_cannot_be_is_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        config(**choices)


def test_a_bare_name_has_its_defaults_and_gspo_averages_over_sequences() -> None:
    assert config(surrogate="gspo") == config(surrogate={"type": "gspo"}, aggregation={"type": "sequence_mean_token_mean"})
    assert config(surrogate="gspo", aggregation="token_mean").aggregation.type == "token_mean"
    assert config().aggregation.type == "token_mean"
    assert config(trust_mask="tv") == config(trust_mask=[{"type": "tv"}])
    assert config(trust_mask=None) == config(trust_mask=[]) == config(correction="none") == config()
    made = config(surrogate="sapo", anchor="proximal", correction="truncate", trust_mask=["tv"], veto={})
    assert PolicyLossConfig.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("choices", "missing"),
    [
        ({"anchor": "proximal"}, "proximal"),
        ({"anchor": "proximal", "proximal_source": "loglinear"}, "ages"),
        ({"kl": {"coefficient": 0.1}}, "reference"),
        ({"entropy_coefficient": 0.1}, "entropy"),
    ],
    ids=str,
)
def test_a_missing_input_is_named(choices: dict[str, Any], missing: str) -> None:
    given = random_batch(0, [3]).whole()
    del given[missing]
    with pytest.raises(ValueError, match=f"`{missing}` must be given"):
        policy_loss(config(**choices), **given)


def test_rows_that_do_not_add_up_are_refused() -> None:
    given = random_batch(0, [3, 2]).whole()
    with pytest.raises(ValueError, match="cu_seqlens ends at 4, but there are 5 tokens"):
        policy_loss(config(), **given | {"cu_seqlens": torch.tensor([0, 3, 4])})
    with pytest.raises(ValueError, match="group_ids has 3 entries for 2 sequences"):
        policy_loss(config(), **given | {"group_ids": torch.tensor([0, 0, 0])})
