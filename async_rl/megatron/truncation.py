"""Top-k and top-p truncation of logits, shared by engine and learner, which must agree."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 1024
"""Limits the memory of sorting, which is several times that of its input."""


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, *, always: Tensor | None = None) -> Tensor:
    """Set logits [rows, vocabulary], already divided by the temperature, to -inf outside of top-k and top-p.

    `top_k` (0: all) and `top_p` (1: all) have one number per row; top-p applies to the probabilities after top-k. Tokens with
    the same logit as the last kept one are kept too, so that ties do not matter. `always` is a token per row that is kept in
    any case: a sampled token stays inside regardless of rounding.
    """
    inside = logits >= _threshold(logits, top_k, top_p)
    if always is not None:
        inside.scatter_(-1, always[:, None].long(), True)
    return logits.masked_fill(~inside, -torch.inf)


def _threshold(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token that is kept, [rows, 1]."""
    parts = zip(logits.split(ROWS_AT_ONCE), top_k.split(ROWS_AT_ONCE), top_p.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_threshold_of(*part) for part in parts])


def _threshold_of(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(logits.shape[-1], device=logits.device)
    among_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probability = ordered.masked_fill(~among_k, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    # Rounding may make the sum exceed 1, which must not cut anything if top_p is 1.
    among_p = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept = (among_k & among_p).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, kept.clamp(min=1) - 1)
