"""What a policy loss reports: numbers worked out by hand, by age, and against plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.telemetry import find_metric
from learner.losses.config import PolicyLossConfig
from learner.losses.functions import policy_loss
from tests.unit.learner.losses.loss_batches import TRUST_MASKS, Batch, random_batch


def metrics_of(choices: dict[str, Any], **given: torch.Tensor) -> dict[str, float]:
    return policy_loss(PolicyLossConfig.model_validate(choices), **given).metrics


def on_three_tokens(choices: dict[str, Any], **given: torch.Tensor) -> dict[str, float]:
    """Ratios 0.5 and 1.5 in one sequence, 1 in another; a fourth token is not trained on."""
    behaviour = torch.tensor([0.5, 0.5, 0.25, 0.9], dtype=torch.float64).log()
    current = torch.tensor([0.25, 0.75, 0.25, 0.1], dtype=torch.float64).log()
    plain = {
        "current": current,
        "behaviour": behaviour,
        "advantages": torch.ones(4),
        "mask": torch.tensor([1, 1, 1, 0]),
        "cu_seqlens": torch.tensor([0, 2, 4]),
    }
    return metrics_of(choices, **plain | given)


def test_ratios_and_divergences() -> None:
    metrics = on_three_tokens({"surrogate": "reinforce"})
    squares = 0.25 + 2.25 + 1
    assert metrics["tokens"] == 3
    assert metrics["ratio_mean"] == pytest.approx(1)
    assert metrics["ratio_std"] == pytest.approx(math.sqrt(1 / 6))
    assert metrics["ratio_min"] == pytest.approx(0.5)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["ess"] == pytest.approx(9 / (3 * squares))
    assert metrics["chi2"] == pytest.approx(squares / 3 - 1)
    # the sequences' ratios are 0.75 and 1
    assert metrics["ess_sequence"] == pytest.approx(1.75**2 / (2 * 1.5625))
    assert metrics["chi2_sequence"] == pytest.approx(1.5625 / 2 - 1)
    assert metrics["kl_behave"] == pytest.approx((0.5 - 1 + math.log(2) + 1.5 - 1 - math.log(1.5)) / 3)
    assert metrics["kl_current"] == pytest.approx((1 - 0.5 + 0.5 * math.log(0.5) + 1 - 1.5 + 1.5 * math.log(1.5)) / 3)
    assert metrics["perplexity_ratio"] == pytest.approx((0.5 * 1.5) ** (-1 / 3))
    assert metrics["entropy_estimate"] == pytest.approx(-(0.5 * math.log(0.25) + 1.5 * math.log(0.75) + math.log(0.25)) / 3)
    assert metrics["logprob_mean"] == pytest.approx(math.log(0.25 * 0.75 * 0.25) / 3)
    assert metrics["logprob_abs_diff"] == pytest.approx((math.log(2) + math.log(1.5)) / 3)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(math.log(2))


def test_what_was_clipped_masked_vetoed_and_corrected() -> None:
    clipped = {"surrogate": "ppo_clip"}
    assert clip_fractions(on_three_tokens(clipped)) == (pytest.approx(1 / 3), 0, pytest.approx(1 / 3))
    pushed_down = torch.tensor([-1.0, 1.0, 1.0, 1.0])
    both = on_three_tokens(clipped, advantages=pushed_down)
    assert clip_fractions(both) == (pytest.approx(2 / 3), pytest.approx(1 / 3), pytest.approx(1 / 3))

    masked = on_three_tokens(clipped | {"trust_mask": "tv"})
    assert masked["masked_frac"] == pytest.approx(1 / 3)
    assert clip_fractions(masked) == (0, 0, 0)  # the clipped token is the masked one

    vetoed = on_three_tokens(clipped | {"veto": {"min_ratio": 0.6}})
    assert vetoed["vetoed_frac"] == 1 / 2
    assert vetoed["masked_frac"] == pytest.approx(2 / 3)

    proximal = torch.tensor([0.4, 0.75, 0.25, 0.5], dtype=torch.float64).log()
    choices = {"anchor": "proximal", "correction": {"type": "truncate", "high": 1.2}}
    corrected = on_three_tokens(choices, proximal=proximal)
    assert corrected["corrected_frac"] == pytest.approx(1 / 3)
    assert corrected["correction_mean"] == pytest.approx((0.8 + 1.2 + 1) / 3)
    assert corrected["kl_proximal"] == pytest.approx((0.625 - 1 - math.log(0.625)) / 3)


@pytest.mark.parametrize(
    ("surrogate", "below", "above"),
    [
        ({"type": "cispo", "floor": 0.6, "cap": 1.4}, 1, 1),
        ({"type": "cispo", "floor": 0.4, "cap": 1.6}, 0, 0),
        # probabilities move from 0.5 to 0.25 and to 0.75
        ({"type": "dppo", "low": 0.2, "high": 0.3}, 1, 0),
        ({"type": "dppo", "low": 0.3, "high": 0.2}, 0, 1),
        # the ratio of both is sqrt(0.75), and the advantage of the first is negative
        ({"type": "gspo", "clip_low": 0.1}, 1, 0),
        ({"type": "topr", "cap": 0.4}, 0, 1),
        ("importance", 0, 0),
    ],
    ids=str,
)
def test_each_bound_counts_the_tokens_that_it_holds(surrogate: Any, below: int, above: int) -> None:
    metrics = on_three_tokens({"surrogate": surrogate}, advantages=torch.tensor([-1.0, 1.0, 1.0, 1.0]))
    assert clip_fractions(metrics) == pytest.approx(((below + above) / 3, below / 3, above / 3))


def clip_fractions(metrics: dict[str, float]) -> tuple[float, float, float]:
    return metrics["clip_frac"], metrics["clip_low_frac"], metrics["clip_high_frac"]


def test_each_age_has_its_own() -> None:
    ages = torch.tensor([0, 3, 2, 1], dtype=torch.int32)
    metrics = on_three_tokens({"surrogate": "ppo_clip", "trust_mask": "tv"}, ages=ages)
    assert {name.split("/")[0] for name in metrics if "/" in name} == {"age_0", "age_2_3"}
    assert metrics["age_0/tokens"] == 1
    assert metrics["age_0/ratio_mean"] == pytest.approx(0.5)
    assert metrics["age_0/ess"] == pytest.approx(1)
    assert metrics["age_0/logprob_abs_diff"] == pytest.approx(math.log(2))
    assert metrics["age_2_3/tokens"] == 2
    assert metrics["age_2_3/ess"] == pytest.approx(2.5**2 / (2 * 3.25))
    assert metrics["age_2_3/masked_frac"] == 1 / 2


@pytest.mark.parametrize(
    ("age", "bucket"), [(0, "0"), (1, "1"), (2, "2_3"), (3, "2_3"), (4, "4_7"), (7, "4_7"), (8, "8_up"), (500, "8_up")]
)
def test_buckets(age: int, bucket: str) -> None:
    metrics = on_three_tokens({}, ages=torch.full((4,), age, dtype=torch.int32))
    assert {name.split("/")[0] for name in metrics if "/" in name} == {f"age_{bucket}"}
    assert metrics[f"age_{bucket}/kl_behave"] == metrics["kl_behave"]


@pytest.fixture
def batch() -> Batch:
    return random_batch(7, [9, 30, 0, 1, 25], spread=0.4)


def test_numpy_finds_the_same(batch: Batch) -> None:
    found = metrics_of({"surrogate": "reinforce", "trust_mask": TRUST_MASKS}, **batch.whole())
    chosen = batch.mask.numpy() != 0
    current, behaviour, ages = (each.detach().numpy()[chosen] for each in (batch.current, batch.behaviour, batch.ages))
    ratio = np.exp(current - behaviour)

    def of(ratio: np.ndarray) -> dict[str, float]:
        return {
            "tokens": float(len(ratio)),
            "ratio_mean": ratio.mean(),
            "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
            "kl_behave": (ratio - 1 - np.log(ratio)).mean(),
            "kl_current": (ratio * np.log(ratio) - ratio + 1).mean(),
            "logprob_abs_diff": np.abs(np.log(ratio)).mean(),
        }

    expected = of(ratio) | {"ratio_std": ratio.std(), "entropy_estimate": -(ratio * current).mean()}
    for name, low, high in (("0", 0, 0), ("1", 1, 1), ("2_3", 2, 3), ("4_7", 4, 7), ("8_up", 8, 9)):
        of_age = of(ratio[(ages >= low) & (ages <= high)])
        expected |= {f"age_{name}/{key}": value for key, value in of_age.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_every_name_is_in_the_table(batch: Batch) -> None:
    for name in metrics_of({}, **batch.whole()):
        metric = find_metric(f"policy/{name}")
        assert metric is not None, name
