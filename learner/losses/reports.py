"""Totals and metrics of the value, SFT, DPO and reward-model losses. Metric names have no prefix."""

from __future__ import annotations

import math

from learner.losses.totals import TotalNames, Totals

VALUE = TotalNames(sums=("loss", "tokens", "clipped", "values", "returns", "returns_squared", "errors", "errors_squared"))
SFT = TotalNames(sums=("loss", "tokens", "nll"))
DPO = TotalNames(sums=("loss", "pairs", "right", "reward_chosen", "reward_rejected", "nll"))
REWARD_MODEL = TotalNames(sums=("loss", "pairs", "right", "score_chosen", "score_rejected"))


def value_metrics(totals: Totals) -> dict[str, float]:
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


def sft_metrics(totals: Totals) -> dict[str, float]:
    nll = _means(totals, "tokens")["nll"]
    return {
        "loss": totals.sum_of("loss"),
        "tokens": totals.sum_of("tokens"),
        "nll": nll,
        "perplexity": math.exp(min(nll, 700.0)),
    }


def dpo_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "pairs")
    return {
        "loss": totals.sum_of("loss"),
        "pairs": totals.sum_of("pairs"),
        "accuracy": of["right"],
        "margin": of["reward_chosen"] - of["reward_rejected"],
        "reward_chosen": of["reward_chosen"],
        "reward_rejected": of["reward_rejected"],
        "nll": of["nll"],
    }


def reward_model_metrics(totals: Totals) -> dict[str, float]:
    of = _means(totals, "pairs")
    return {
        "loss": totals.sum_of("loss"),
        "pairs": totals.sum_of("pairs"),
        "accuracy": of["right"],
        "margin": of["score_chosen"] - of["score_rejected"],
        "score_mean": (of["score_chosen"] + of["score_rejected"]) / 2,
    }


def _means(totals: Totals, over: str) -> dict[str, float]:
    """Return every sum divided by the sum `over`."""
    count = max(totals.sum_of(over), 1.0)
    return {name: total / count for name, total in zip(totals.names.sums, totals.sums.tolist(), strict=True)}
