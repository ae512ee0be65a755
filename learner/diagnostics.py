"""What a policy loss reports about a step: sums and maxima that merge exactly over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.totals import Names, Totals

SUMS = (
    "loss", "surrogate", "kl_reference", "entropy",
    "tokens", "kept", "clipped", "sequences", "vetoed",
    "ratio", "ratio_squared", "kl_behave", "distance", "logprob",
)  # fmt: skip
MAXIMA = ("ratio", "distance")


POLICY = Names(sums=SUMS, maxima=MAXIMA)


def policy_metrics(totals: Totals) -> dict[str, float]:
    sums = dict(zip(SUMS, totals.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, totals.maxima.tolist(), strict=True))
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    return {
        "loss": sums["loss"],
        "surrogate": sums["surrogate"],
        "kl_reference": sums["kl_reference"],
        "entropy": sums["entropy"],
        "tokens": sums["tokens"],
        "clip_frac": sums["clipped"] / tokens,
        "masked_frac": (sums["tokens"] - sums["kept"]) / tokens,
        "vetoed_frac": sums["vetoed"] / sequences,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": maxima["ratio"],
        # effective share of the batch: 1 when every token has the same ratio
        "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if sums["ratio_squared"] > 0 else 0.0,
        "kl_behave": sums["kl_behave"] / tokens,
        "logprob_abs_diff": sums["distance"] / tokens,
        "logprob_abs_diff_max": maxima["distance"],
        "logprob_mean": sums["logprob"] / tokens,
    }


def measure(
    *,
    trained: Tensor,
    kept: Tensor,
    clipped: Tensor,
    moved: Tensor,
    current: Tensor,
    loss: Tensor,
    surrogate: Tensor,
    kl: Tensor,
    entropy: Tensor,
    num_sequences: Tensor,
    num_vetoed: Tensor,
) -> Totals:
    """`moved` is c - b, 0 where not trained; the ratios here are always against the behaviour policy."""
    moved, is_trained = moved.double(), trained.double()
    ratio = moved.exp() * is_trained
    distance = moved.abs()
    # KL(behaviour || current) from the behaviour's own samples: never negative, unlike the mean of b - c
    kl_behave = (ratio - 1 - moved) * is_trained
    sums = (
        loss.detach(), surrogate.detach(), kl.detach(), entropy.detach(),
        trained.sum(), kept.sum(), clipped.sum(), num_sequences, num_vetoed,
        ratio.sum(), ratio.square().sum(), kl_behave.sum(), distance.sum(), current.sum(),
    )  # fmt: skip
    maxima = (ratio.max(), distance.max()) if len(moved) else (moved.sum(), moved.sum())
    return Totals(names=POLICY, sums=torch.stack([each.double() for each in sums]), maxima=torch.stack(maxima))
