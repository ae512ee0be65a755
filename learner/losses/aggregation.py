"""The weight of each token in the loss of a whole step.

Splitting a step into microbatches and ranks changes nothing: every part divides by counts of the *whole step*, so the parts
add up. Tokens removed by a mask, a veto or a correction leave the numerator and stay in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.losses.choices import Aggregation, PromptMean, SequenceMeanTokenMean, SequenceSumNorm, TokenMean
from learner.losses.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCounts:
    """The denominators of an optimizer step, counted over all its microbatches and ranks before the first one runs.

    Sequences and groups without a trained token are not counted.
    """

    tokens: int
    sequences: int
    groups: Tensor
    """The ids of the groups, ascending."""
    group_tokens: Tensor
    """Trained tokens of each group."""

    def to(self, device: torch.device) -> StepCounts:
        return replace(self, groups=self.groups.to(device), group_tokens=self.group_tokens.to(device))

    def normaliser(self, aggregation: Aggregation) -> float:
        match aggregation:
            case TokenMean():
                return float(self.tokens)
            case PromptMean():
                return float(len(self.groups))
            case SequenceSumNorm(length=length):
                return float(self.sequences * length)
            case _:
                return float(self.sequences)


Normaliser = StepCounts | float | None
"""The counts of the whole step, its denominator as a number, or None if the tensors hold the whole step.

With `prompt_mean` pass the counts: a number is right only if no group is split over microbatches.
"""


def count(*, mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor | None = None) -> StepCounts:
    """The counts of a batch given as one packed row. `group_ids` has one entry per sequence (or per token)."""
    segments = Segments.of(mask, cu_seqlens)
    return _counts(segments, _groups(segments, group_ids))


def token_shares(
    aggregation: Aggregation,
    segments: Segments,
    *,
    normaliser: Normaliser,
    dtype: torch.dtype,
    group_ids: Tensor | None = None,
) -> Tensor:
    """Return the factor of each token's loss, such that the sum over a whole step is the aggregate; 0 where not trained."""
    groups = _groups(segments, group_ids)
    counts = normaliser if isinstance(normaliser, StepCounts) else _counts(segments, groups)
    divisor = float(normaliser) if isinstance(normaliser, int | float) else counts.normaliser(aggregation)
    shares = segments.trained.to(dtype) / (divisor if divisor > 0 else 1.0)
    if isinstance(aggregation, SequenceMeanTokenMean):
        shares = shares / segments.spread(segments.trained_tokens.clamp(min=1)).to(dtype)
    if isinstance(aggregation, PromptMean) and len(counts.groups):
        place = torch.searchsorted(counts.groups, groups).clamp(max=len(counts.groups) - 1)
        shares = shares / segments.spread(counts.group_tokens[place]).to(dtype)
    return shares


def _groups(segments: Segments, group_ids: Tensor | None) -> Tensor:
    """Return one group id per sequence."""
    num_sequences, num_tokens = len(segments.starts), len(segments.sequence)
    if group_ids is None:
        return torch.arange(num_sequences, device=segments.starts.device)
    if len(group_ids) == num_sequences:
        return group_ids
    if len(group_ids) != num_tokens:
        raise ValueError(f"group_ids has {len(group_ids)} entries for {num_sequences} sequences")
    return group_ids[segments.starts.clamp(max=max(num_tokens - 1, 0))]


def _counts(segments: Segments, groups: Tensor) -> StepCounts:
    ids, place = torch.unique(groups, return_inverse=True)
    tokens = segments.trained_tokens.new_zeros(len(ids)).index_add(0, place, segments.trained_tokens)
    return StepCounts(
        tokens=int(segments.trained_tokens.sum()),
        sequences=int((segments.trained_tokens > 0).sum()),
        groups=ids[tokens > 0],
        group_tokens=tokens[tokens > 0],
    )
