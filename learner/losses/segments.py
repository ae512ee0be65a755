"""Sums and means over the sequences of a packed row, restricted to trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """[T] tokens in [S] sequences; either may be 0."""

    trained: Tensor
    """[T], bool."""
    sequence: Tensor
    """[T]: index of each token's sequence."""
    starts: Tensor
    """[S]: index of each sequence's first token."""
    trained_tokens: Tensor
    """[S]: number of trained tokens of each sequence."""

    @staticmethod
    def of(mask: Tensor, cu_seqlens: Tensor) -> Segments:
        lengths = cu_seqlens.diff().to(torch.int64)
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
        if len(sequence) != len(mask):
            raise ValueError(f"cu_seqlens ends at {len(sequence)}, but there are {len(mask)} tokens")
        trained = mask != 0
        counts = lengths.new_zeros(len(lengths)).index_add(0, sequence, trained.to(torch.int64))
        return Segments(trained=trained, sequence=sequence, starts=cu_seqlens[:-1].long(), trained_tokens=counts)

    def only(self, per_token: Tensor) -> Tensor:
        """Set tokens that are not trained to 0, which also stops their gradient."""
        return torch.where(self.trained, per_token, 0.0)

    def sums(self, per_token: Tensor) -> Tensor:
        """Sum over each sequence, [S]; untrained tokens must be 0."""
        return per_token.new_zeros(len(self.starts)).index_add(0, self.sequence, per_token)

    def means(self, per_token: Tensor) -> Tensor:
        """Mean over each sequence's trained tokens, [S]; 0 for a sequence without any."""
        return self.sums(per_token) / self.trained_tokens.clamp(min=1).to(per_token.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Expand [S] to [T]: each token gets its sequence's value."""
        return per_sequence[self.sequence]
