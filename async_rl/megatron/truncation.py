"""Which tokens top-k and top-p leave to sample from: one definition for the engine and for the learner, who must agree."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 1024
"""Sorting takes several times the memory of what is sorted."""


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, *, always: Tensor | None = None) -> Tensor:
    """[rows, vocabulary] logits, already divided by the temperature, with minus infinity where a row may not sample.

    `top_k` (0 means all) and `top_p` (1 means all) hold one number per row; top-p counts the probability of what top-k left.
    Tokens as likely as the last one that is kept are kept too, so that the order of equals does not matter. `always` names a
    token per row that is kept in any case: one that was sampled lies inside, whatever rounding says.
    """
    inside = logits >= _least_likely(logits, top_k, top_p)
    if always is not None:
        inside.scatter_(-1, always[:, None].long(), True)
    return logits.masked_fill(~inside, -torch.inf)


def _least_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token that is kept, [rows, 1]."""
    parts = zip(logits.split(ROWS_AT_ONCE), top_k.split(ROWS_AT_ONCE), top_p.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_least_likely_of(*part) for part in parts])


def _least_likely_of(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(logits.shape[-1], device=logits.device)
    among_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probability = ordered.masked_fill(~among_k, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    # The sum of all probabilities may round to a little more than 1, and must not cut where nothing is to be cut.
    among_p = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept = (among_k & among_p).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, kept.clamp(min=1) - 1)
