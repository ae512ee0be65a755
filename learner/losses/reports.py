"""Totals and metrics of the value, SFT, DPO and reward-model losses. Metric names have no prefix."""

from __future__ import annotations

import math

from learner.losses.totals import TotalNames, Totals


def _value_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "tokens")
    spread, unexplained = (of[f"{name}_squared"] - of[name] ** 2 for name in ("returns", "errors"))
    return {
        "loss": totals.sum_of("loss"),
        "mean": of["values"],
        "return_mean": of["returns"],
        "clip_frac": of["clipped"],
        # 1: values predict returns exactly; 0: no better than a constant
        "explained_variance": 1 - unexplained / spread if spread > 0 else 0.0,
    }


def _sft_metrics(totals: Totals) -> dict[str, float]:
    nll = _means(totals, "tokens")["nll"]
    return {
        "loss": totals.sum_of("loss"),
        "tokens": totals.sum_of("tokens"),
        "nll": nll,
        "perplexity": math.exp(min(nll, 700.0)),
    }


def _pair_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "pairs")
    return {
        "loss": totals.sum_of("loss"),
        "pairs": totals.sum_of("pairs"),
        "accuracy": of["right"],
        "margin": of["chosen"] - of["rejected"],
    }


def _dpo_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "pairs")
    return _pair_metrics(totals) | {"reward_chosen": of["chosen"], "reward_rejected": of["rejected"], "nll": of["nll"]}


def _reward_model_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "pairs")
    return _pair_metrics(totals) | {"score_mean": (of["chosen"] + of["rejected"]) / 2}


def _means(totals: Totals, over: str) -> dict[str, float]:
    """Return every sum divided by the sum `over`."""
    sums = totals.by_name()
    return {name: total / max(sums[over], 1.0) for name, total in sums.items()}


VALUE = TotalNames(
    sums=("loss", "tokens", "clipped", "values", "returns", "returns_squared", "errors", "errors_squared"),
    describe=_value_metrics,
)
SFT = TotalNames(sums=("loss", "tokens", "nll"), describe=_sft_metrics)
DPO = TotalNames(sums=("loss", "pairs", "right", "chosen", "rejected", "nll"), describe=_dpo_metrics)
REWARD_MODEL = TotalNames(sums=("loss", "pairs", "right", "chosen", "rejected"), describe=_reward_model_metrics)
