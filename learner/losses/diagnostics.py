"""Diagnostics of a policy loss, as sums and maxima that merge exactly over microbatches and ranks.

They compare the current policy with the behaviour policy of each token. The most important ones are also split by age,
because only tokens of age 0 show the numerical difference between engine and learner alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from learner.losses.ratios import clamped, divergence
from learner.losses.surrogates import TokenLosses
from learner.losses.tokens import Tokens
from learner.losses.totals import TotalNames, Totals

AGES = {"0": 0, "1": 1, "2_3": 2, "4_7": 4, "8_up": 8}
"""Buckets of ages: name -> lowest age."""

_OF_PARTS = ("loss", "surrogate", "kl_reference", "entropy")
"""Already divided by the step's denominator: the parts of a step add up."""
_OF_TOKENS = ("tokens", "kept", "below", "above", "ratio", "ratio_squared", "kl_behave", "kl_current", "distance")
"""Sums over all tokens, and over those of each age bucket."""
_OF_ALL_TOKENS = ("moved", "logprob", "entropy_estimate", "weight", "corrected", "kl_proximal")
_OF_SEQUENCES = ("sequences", "vetoed", "sequence_ratio", "sequence_ratio_squared")


def measure(
    tokens: Tokens,
    *,
    parts: Mapping[str, Tensor],
    surrogate: TokenLosses,
    kept: Tensor,
    weights: Tensor,
    corrected: Tensor,
    is_vetoed: Tensor,
    ages: Tensor | None,
) -> Totals:
    segments, moved = tokens.segments, tokens.moved.double()
    bounded = clamped(moved)
    ratio = bounded.exp()
    of_tokens = {
        "tokens": torch.ones_like(ratio),
        "kept": kept,
        "below": surrogate.below & kept,
        "above": surrogate.above & kept,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        # both estimated from samples of the behaviour policy, and never negative
        "kl_behave": divergence("k3", -moved),
        "kl_current": ratio * divergence("k3", moved),
        "distance": moved.abs(),
    }
    of_all_tokens = {
        "moved": moved,
        "logprob": tokens.now,
        "entropy_estimate": -ratio * tokens.now,
        "weight": weights,
        "corrected": corrected,
        "kl_proximal": divergence("k3", (tokens.anchor - tokens.now).double()),
    }
    has_tokens = (segments.trained_tokens > 0).double()
    sequence_ratio = clamped(segments.sums(moved)).exp() * has_tokens
    of_sequences = {
        "sequences": has_tokens,
        "vetoed": is_vetoed,
        "sequence_ratio": sequence_ratio,
        "sequence_ratio_squared": sequence_ratio.square(),
    }
    columns = _stacked(of_tokens, _OF_TOKENS) * segments.trained
    others = _stacked(of_all_tokens, _OF_ALL_TOKENS) * segments.trained
    sums = (
        _stacked(parts, _OF_PARTS),
        _stacked(of_sequences, _OF_SEQUENCES).sum(dim=1),
        others.sum(dim=1),
        columns.sum(dim=1),
        _by_age(columns, ages).flatten(),
    )
    # 0 is below any ratio, so it means "none" in maxima; the maximum of inverses gives the minimum
    maxima = torch.stack([ratio, (-bounded).exp(), moved.abs()]) * segments.trained
    return Totals(names=POLICY, sums=torch.cat(sums), maxima=maxima.amax(dim=1) if len(moved) else maxima.sum(dim=1))


def _stacked(columns: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([columns[name].detach().double() for name in names])


def _by_age(columns: Tensor, ages: Tensor | None) -> Tensor:
    """[buckets, columns]"""
    found = columns.new_zeros(len(AGES), len(columns))
    if ages is None:
        return found
    older = torch.tensor(list(AGES.values())[1:], dtype=ages.dtype, device=ages.device)
    return found.index_add(0, torch.bucketize(ages, older, right=True), columns.T)


# -- metrics ---------------------------------------------------------------------------------------------------------


def policy_metrics(totals: Totals) -> dict[str, float]:
    """Turn totals into metrics, without the `policy/` prefix. Age buckets without a token are left out."""
    sums = totals.by_name()
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    mean_ratio, smallest = sums["ratio"] / tokens, totals.maximum_of("inverse_ratio")
    metrics = {
        **{name: sums[name] for name in _OF_PARTS},
        **_of_tokens({name: sums[name] for name in _OF_TOKENS}),
        "clip_low_frac": sums["below"] / tokens,
        "clip_high_frac": sums["above"] / tokens,
        "vetoed_frac": sums["vetoed"] / sequences,
        "corrected_frac": sums["corrected"] / tokens,
        "correction_mean": sums["weight"] / tokens,
        "ratio_min": 1 / smallest if smallest > 0 else 0.0,
        "ratio_max": totals.maximum_of("ratio"),
        "ratio_std": math.sqrt(max(sums["ratio_squared"] / tokens - mean_ratio**2, 0.0)),
        "chi2": sums["ratio_squared"] / tokens - 1 if sums["tokens"] > 0 else 0.0,
        "chi2_sequence": sums["sequence_ratio_squared"] / sequences - 1 if sums["sequences"] > 0 else 0.0,
        "ess_sequence": _ess(sums["sequences"], sums["sequence_ratio"], sums["sequence_ratio_squared"]),
        "perplexity_ratio": math.exp(min(-sums["moved"] / tokens, 700.0)),
        "kl_proximal": sums["kl_proximal"] / tokens,
        "entropy_estimate": sums["entropy_estimate"] / tokens,
        "logprob_abs_diff_max": totals.maximum_of("distance"),
        "logprob_mean": sums["logprob"] / tokens,
    }
    for age in AGES:
        of_age = {name: sums[f"age_{age}/{name}"] for name in _OF_TOKENS}
        if of_age["tokens"] > 0:
            metrics |= {f"age_{age}/{name}": value for name, value in _of_tokens(of_age).items()}
    return metrics


def _of_tokens(sums: Mapping[str, float]) -> dict[str, float]:
    tokens = max(sums["tokens"], 1.0)
    return {
        "tokens": sums["tokens"],
        "clip_frac": (sums["below"] + sums["above"]) / tokens,
        "masked_frac": (sums["tokens"] - sums["kept"]) / tokens,
        "ratio_mean": sums["ratio"] / tokens,
        "ess": _ess(sums["tokens"], sums["ratio"], sums["ratio_squared"]),
        "kl_behave": sums["kl_behave"] / tokens,
        "kl_current": sums["kl_current"] / tokens,
        "logprob_abs_diff": sums["distance"] / tokens,
    }


def _ess(count: float, weights: float, squares: float) -> float:
    """Effective sample size as a share of the sample: 1 if all weights are equal."""
    return weights**2 / (count * squares) if squares > 0 else 0.0


POLICY = TotalNames(
    sums=(
        *_OF_PARTS, *_OF_SEQUENCES, *_OF_ALL_TOKENS, *_OF_TOKENS, *(f"age_{age}/{name}" for age in AGES for name in _OF_TOKENS)
    ),
    maxima=("ratio", "inverse_ratio", "distance"),
    describe=policy_metrics,
)  # fmt: skip
