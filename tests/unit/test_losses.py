"""The policy loss: hand-computed numbers, an independent formulation, and that splitting a step changes nothing."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from learner.diagnostics import POLICY, policy_metrics
from learner.losses import PolicyLoss, PolicyLossConfig, count, policy_loss
from learner.totals import Totals

AGGREGATIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    {"type": "sequence_sum_norm", "length": 7},
    "prompt_mean",
]
SURROGATES = [
    "ppo_clip",
    {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.5},
    {"type": "cispo", "cap": 1.3, "floor": 0.8},
    "reinforce",
    "importance",
]


@dataclass
class Batch:
    """Ragged sequences; the last token of each is never trained on, and one sequence is not trained on at all."""

    current: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor

    def sequences(self) -> list[slice]:
        bounds = self.cu_seqlens.tolist()
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def part(self, chosen: list[int]) -> dict[str, Tensor]:
        places = torch.cat([torch.arange(each.start, each.stop) for each in (self.sequences()[index] for index in chosen)])
        lengths = [self.sequences()[index].stop - self.sequences()[index].start for index in chosen]
        per_token = {
            name: getattr(self, name)[places]
            for name in ("current", "behaviour", "proximal", "reference", "entropy", "advantages", "mask")
        }
        return per_token | {
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
            "group_ids": self.group_ids[torch.tensor(chosen)],
        }

    def whole(self) -> dict[str, Tensor]:
        return self.part(list(range(len(self.group_ids))))


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(11)
    lengths = [5, 3, 8, 1, 6, 4, 7]

    def normal(spread: float) -> Tensor:
        return torch.randn(sum(lengths), generator=generator, dtype=torch.float64) * spread

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = (torch.rand(sum(lengths), generator=generator) < 0.8).to(torch.uint8)
    mask[cu_seqlens[1:].long() - 1] = 0
    mask[cu_seqlens[4] : cu_seqlens[5]] = 0
    mask[cu_seqlens[1] : cu_seqlens[2]] = torch.tensor([0, 1, 0])
    behaviour = -normal(1).abs() - 0.2
    return Batch(
        current=(behaviour + normal(0.3)).requires_grad_(),
        behaviour=behaviour,
        proximal=behaviour + normal(0.1),
        reference=behaviour + normal(0.4),
        entropy=normal(1).abs().requires_grad_(),
        advantages=normal(1),
        mask=mask,
        cu_seqlens=cu_seqlens,
        group_ids=torch.tensor([40, 40, 7, 7, 7, 12, 12]),
    )


def config(**choices: Any) -> PolicyLossConfig:
    return PolicyLossConfig.model_validate(choices)


# -- numbers worked out by hand --------------------------------------------------------------------------------------------


def on_two_tokens(
    choices: dict[str, Any], ratios: tuple[float, float], advantages: tuple[float, float]
) -> tuple[float, list[float]]:
    """Loss and gradient of one sequence of two tokens, both of which the behaviour policy gave probability 0.2."""
    behaviour = torch.full((2,), math.log(0.2), dtype=torch.float64)
    current = (behaviour + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    made = policy_loss(
        config(**choices),
        current=current,
        behaviour=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2]),
    )
    made.loss.backward()
    assert current.grad is not None
    return made.loss.item(), current.grad.tolist()


C = [math.log(0.2 * 1.5), math.log(0.2 * 0.5)]
"""Current log-probabilities at ratios 1.5 and 0.5."""


@pytest.mark.parametrize(
    ("surrogate", "advantages", "loss", "gradient"),
    [
        # min(1.5 * 2, 1.28 * 2) = 2.56 clipped; min(0.5 * 1, 0.8 * 1) = 0.5 free
        ("ppo_clip", (2.0, 1.0), -(2.56 + 0.5), [0.0, -0.5]),
        # negative advantages: min(-3, -2.56) = -3 free; min(-0.5, -0.8) = -0.8 clipped
        ("ppo_clip", (-2.0, -1.0), 3.0 + 0.8, [3.0, 0.0]),
        # the loss of the first may not exceed 1.2 * 2
        ({"type": "ppo_clip", "dual_clip": 1.2}, (-2.0, 1.0), 2.4 - 0.5, [0.0, -0.5]),
        ({"type": "cispo", "cap": 1.25, "floor": 0.75}, (2.0, -1.0), -1.25 * 2 * C[0] + 0.75 * C[1], [-2.5, 0.75]),
        ("cispo", (2.0, -1.0), -1.5 * 2 * C[0] + 0.5 * C[1], [-3.0, 0.5]),
        ("reinforce", (2.0, -1.0), -2 * C[0] + C[1], [-2.0, 1.0]),
        ("importance", (2.0, -1.0), -3.0 + 0.5, [-3.0, 0.5]),
    ],
)
def test_surrogates(surrogate: Any, advantages: tuple[float, float], loss: float, gradient: list[float]) -> None:
    found = on_two_tokens({"surrogate": surrogate, "aggregation": "sequence_mean_token_sum"}, (1.5, 0.5), advantages)
    assert found[0] == pytest.approx(loss, rel=1e-12)
    assert found[1] == pytest.approx(gradient, rel=1e-12)


def test_trust_mask_drops_what_went_too_far_in_its_advantages_direction() -> None:
    # probabilities move from 0.2 to 0.5 and to 0.06; the denominator keeps both tokens
    choices = {"surrogate": "importance", "trust_mask": {"type": "tv", "high": 0.2, "low": 0.1}}
    assert on_two_tokens(choices, (2.5, 0.3), (1.0, 1.0)) == (pytest.approx(-0.15), pytest.approx([0, -0.15]))
    assert on_two_tokens(choices, (2.5, 0.3), (-1.0, -1.0)) == (pytest.approx(1.25), pytest.approx([1.25, 0]))
    assert on_two_tokens(choices, (2.5, 0.3), (1.0, -1.0)) == (0, [0, 0])
    # each direction has its own bound: 0.35 is within the upper one, and beyond where the lower one would be
    assert on_two_tokens(choices, (1.75, 1.0), (1.0, -1.0)) == (pytest.approx(-0.375), pytest.approx([-0.875, 0.5]))


def test_veto_removes_the_sequence_and_keeps_the_denominator() -> None:
    choices = {"surrogate": "importance", "veto": {"min_ratio": 1e-2}}
    assert on_two_tokens(choices, (0.9, 0.5), (1.0, 1.0))[0] == pytest.approx(-0.7)
    assert on_two_tokens(choices, (0.9, 0.009), (1.0, 1.0)) == (0, [0, 0])


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


def test_log_ratios_are_clamped_and_flat_outside() -> None:
    loss, gradient = on_two_tokens({"surrogate": "importance"}, (math.exp(30), 1.0), (1.0, 1.0))
    assert loss == pytest.approx(-(math.exp(20) + 1) / 2)
    assert gradient == pytest.approx([0, -0.5])


# -- against a formulation of its own ------------------------------------------------------------------------------------------


def expected_loss(batch: Batch, choices: PolicyLossConfig) -> tuple[float, list[float]]:
    """Plain loops over tokens: the loss, and d loss / d current written down by hand."""
    terms: list[tuple[int, int, float, float]] = []  # sequence, token, loss, slope
    anchor = batch.behaviour if choices.anchor == "behaviour" else batch.proximal
    for sequence, tokens in enumerate(batch.sequences()):
        for t in range(tokens.start, tokens.stop):
            if batch.mask[t]:
                c, a, r = batch.current[t].item(), batch.advantages[t].item(), (batch.current[t] - anchor[t]).exp().item()
                terms.append((sequence, t, *token_loss(choices, c, a, r)))
    per_sequence = {s: sum(1 for each in terms if each[0] == s) for s, *_ in terms}
    groups = batch.group_ids.tolist()
    per_group = {g: sum(1 for each in terms if groups[each[0]] == g) for g in groups}
    name = choices.aggregation.type
    value, gradient = 0.0, [0.0] * len(batch.mask)
    for s, t, loss, slope in terms:
        weight = {
            "token_mean": 1 / len(terms),
            "sequence_mean_token_mean": 1 / len(per_sequence) / per_sequence[s],
            "sequence_mean_token_sum": 1 / len(per_sequence),
            "sequence_sum_norm": 1 / len(per_sequence) / 7,
            "prompt_mean": 1 / len({groups[each[0]] for each in terms}) / per_group[groups[s]],
        }[name]
        value += weight * loss
        gradient[t] = weight * slope
    return value, gradient


def token_loss(choices: PolicyLossConfig, c: float, a: float, r: float) -> tuple[float, float]:
    surrogate: Any = choices.surrogate
    if surrogate.type == "reinforce":
        return -a * c, -a
    if surrogate.type == "importance":
        return -a * r, -a * r
    if surrogate.type == "cispo":
        bounded = min(max(r, surrogate.floor), surrogate.cap)
        return -bounded * a * c, -bounded * a
    low, high = 1 - surrogate.clip_low, 1 + surrogate.clip_high
    is_clipped = (a > 0 and r > high) or (a < 0 and r < low)
    loss, slope = (-min(max(r, low), high) * a, 0.0) if is_clipped else (-r * a, -r * a)
    if surrogate.dual_clip is not None and a < 0 and loss > -surrogate.dual_clip * a:
        return -surrogate.dual_clip * a, 0.0
    return loss, slope


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_value_and_gradient_against_plain_loops(batch: Batch, surrogate: Any, aggregation: Any, anchor: str) -> None:
    choices = config(surrogate=surrogate, aggregation=aggregation, anchor=anchor)
    made = policy_loss(choices, **batch.whole())
    made.loss.backward()
    assert batch.current.grad is not None
    loss, gradient = expected_loss(batch, choices)
    assert made.loss.item() == pytest.approx(loss, rel=1e-12)
    assert batch.current.grad.tolist() == pytest.approx(gradient, rel=1e-12)


# -- splitting a step changes nothing ----------------------------------------------------------------------------------------

SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[0], [1], [2], [3], [4], [5], [6]],
    [[6, 1], [3, 4], [0, 2, 5]],
    [[4], [3], [5, 2, 6, 0, 1]],
]
FULL = {
    "trust_mask": {"type": "tv", "high": 0.1, "low": 0.1},
    "veto": {"min_ratio": 0.55},
    "kl": {"coefficient": 0.2},
    "entropy_coefficient": 0.05,
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same_loss_gradient_and_metrics(
    batch: Batch, surrogate: Any, aggregation: Any, split: list[list[int]]
) -> None:
    choices = config(surrogate=surrogate, aggregation=aggregation, **FULL)
    whole = policy_loss(choices, **batch.whole())
    [expected] = torch.autograd.grad(whole.loss, batch.current)
    assert 0 < whole.metrics["vetoed_frac"] < 1
    assert 0 < whole.metrics["masked_frac"] < 1

    counts = count(mask=batch.mask, cu_seqlens=batch.cu_seqlens, group_ids=batch.group_ids)
    parts = [policy_loss(choices, **batch.part(chosen), normaliser=counts) for chosen in split]
    loss = torch.stack([part.loss for part in parts]).sum()
    [gradient] = torch.autograd.grad(loss, batch.current)
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert whole.metrics["loss"] == whole.loss.item() != whole.metrics["surrogate"]
    torch.testing.assert_close(gradient, expected)
    assert policy_metrics(merged(parts)) == pytest.approx(whole.metrics)


def merged(parts: list[PolicyLoss]) -> Totals:
    totals = Totals.empty(POLICY)
    for part in parts:
        totals = totals.merged(part.totals)
    return totals


def test_a_plain_number_is_a_normaliser_too(batch: Batch) -> None:
    whole = policy_loss(config(), **batch.whole())
    parts = [policy_loss(config(), **batch.part([i]), normaliser=float(batch.mask.sum())) for i in range(7)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)


def test_group_ids_may_come_per_token(batch: Batch) -> None:
    given = batch.whole()
    per_token = torch.repeat_interleave(batch.group_ids, batch.cu_seqlens.diff())
    choices = config(aggregation="prompt_mean")
    assert policy_loss(choices, **given | {"group_ids": per_token}).loss == policy_loss(choices, **given).loss


# -- edges ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_train_is_a_zero_that_can_be_differentiated(surrogate: Any, aggregation: Any, tokens: int) -> None:
    current = torch.full((tokens,), -1.0, requires_grad=True)
    made = policy_loss(
        config(surrogate=surrogate, aggregation=aggregation),
        current=current,
        behaviour=torch.full((tokens,), math.nan),
        advantages=torch.full((tokens,), math.nan),
        mask=torch.zeros(tokens),
        cu_seqlens=torch.tensor([0, tokens] if tokens else [0]),
    )
    made.loss.backward()
    assert made.loss.item() == 0
    assert current.grad is not None
    assert current.grad.tolist() == [0] * tokens
    assert all(math.isfinite(value) for value in made.metrics.values())


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
def test_what_is_not_trained_on_never_enters(batch: Batch, surrogate: Any, anchor: str) -> None:
    choices = config(surrogate=surrogate, anchor=anchor, **FULL)
    clean = policy_loss(choices, **batch.whole())
    untrained = batch.mask == 0
    with torch.no_grad():
        for name in ("current", "behaviour", "proximal", "reference", "entropy", "advantages"):
            getattr(batch, name)[untrained] = math.inf if name == "current" else math.nan
    dirty = policy_loss(choices, **batch.whole())
    dirty.loss.backward()
    assert dirty.loss.item() == clean.loss.item()
    assert dirty.metrics == clean.metrics
    assert batch.current.grad is not None
    assert batch.current.grad[untrained].tolist() == [0] * int(untrained.sum())
    assert batch.current.grad.isfinite().all()


def test_metrics_against_hand_computed_numbers() -> None:
    behaviour = torch.tensor([0.5, 0.5, 0.25, 0.9], dtype=torch.float64).log()
    current = torch.tensor([0.25, 0.75, 0.25, 0.1], dtype=torch.float64).log()
    metrics = policy_loss(
        config(surrogate="ppo_clip", trust_mask="tv"),
        current=current,
        behaviour=behaviour,
        advantages=torch.tensor([1.0, 1.0, 1.0, 1.0]),
        mask=torch.tensor([1, 1, 1, 0]),
        cu_seqlens=torch.tensor([0, 2, 4]),
    ).metrics
    assert metrics["tokens"] == 3
    assert metrics["ratio_mean"] == pytest.approx((0.5 + 1.5 + 1) / 3)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["ess"] == pytest.approx(9 / (3 * (0.25 + 2.25 + 1)))
    assert metrics["masked_frac"] == pytest.approx(1 / 3)
    assert metrics["clip_frac"] == 0  # the clipped token is the masked one
    assert metrics["logprob_abs_diff"] == pytest.approx((math.log(2) + math.log(1.5)) / 3)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["kl_behave"] == pytest.approx((0.5 - 1 + math.log(2) + 1.5 - 1 - math.log(1.5)) / 3)


@pytest.mark.parametrize(
    "choices",
    [
        {"surrogate": "gspo"},
        {"surrogate": {"type": "ppo_clip", "clip": 0.2}},
        {"surrogate": {"type": "cispo", "cap": 1.0, "floor": 1.0}},
        {"correction": "truncate"},
        {"aggregation": "sequence_sum_norm"},
        {"trust_mask": "off_policy_sequence_mask"},
        {"kl": {"estimator": "k4"}},
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**choices)


@pytest.mark.parametrize(
    ("choices", "missing"),
    [
        ({"anchor": "proximal"}, "proximal"),
        ({"kl": {"coefficient": 0.1}}, "reference"),
        ({"entropy_coefficient": 0.1}, "entropy"),
    ],
    ids=str,
)
def test_a_missing_input_is_named(batch: Batch, choices: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"`{missing}` must be given"):
        policy_loss(config(**choices), **{name: each for name, each in batch.whole().items() if name != missing})
