"""Top-k and top-p truncation of logits by sorting them: of the learner, and of engines that sample with torch.

Engines with Triton's kernels search the cut without a sort (rollout_workers/inference/sampling_kernels.py) and sum
probabilities in float32, in another order: the token at the edge of top-p may be kept by one side alone. The learner keeps
sampled tokens in any case, so the two then differ by that token's share in the sum of probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

BYTES_AT_ONCE = 2**25
"""Limits the memory of sorting, which is about eight times that of its input."""
ONE = 2**40
"""Probabilities are summed as integers with this for 1: sums of floats depend on their order, which varies on a GPU, and torch
refuses them if it is to be deterministic."""


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, *, always: Tensor | None = None) -> Tensor:
    """Set logits [rows, vocabulary], already divided by the temperature, to -inf outside of top-k and top-p.

    `top_k` (0: all) and `top_p` (1: all) have one number per row; top-p applies to the probabilities after top-k. Tokens with
    the same logit as the last kept one are kept too, so that ties do not matter. `always` is a token per row that is kept in
    any case: a sampled token stays inside regardless of rounding.
    """
    inside = logits >= thresholds(logits, top_k, top_p)[:, None]
    if always is not None:
        inside.scatter_(-1, always[:, None].long(), True)
    return logits.masked_fill(~inside, -torch.inf)


def thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token that is kept in each row, [rows]."""
    rows = max(BYTES_AT_ONCE // (logits.shape[-1] * logits.element_size()), 1)
    parts = zip(logits.split(rows), top_k.split(rows), top_p.split(rows), strict=True)
    return torch.cat([_thresholds(*part) for part in parts])


def _thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(logits.shape[-1], device=logits.device)
    among_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probability = ordered.masked_fill(~among_k, -torch.inf).softmax(dim=-1).mul_(ONE).long()
    before = probability.cumsum(dim=-1).sub_(probability)
    # Rounding may make the sum exceed 1, which must not cut anything if top_p is 1.
    among_p = (before < (top_p.double() * ONE).long()[:, None]) | (top_p[:, None] >= 1)
    kept = (among_k & among_p).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, kept.clamp(min=1) - 1)[:, 0]
