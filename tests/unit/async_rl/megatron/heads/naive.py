"""Log-probabilities, entropies and divergences of whole logits in float64, written with log_softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.heads.divergence import REVERSE_SHARE, Direction
from async_rl.megatron.truncation import truncate


def logs(hidden: Tensor, weight: Tensor, vocab_size: int, temperature: float) -> Tensor:
    return (hidden @ weight[:vocab_size].T / temperature).log_softmax(-1)


def scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and entropies."""
    logits = hidden @ weight[:vocab_size].T / temperature
    if top_k or top_p < 1:
        rows = len(targets)
        cut = truncate(logits.detach(), torch.full((rows,), top_k), torch.full((rows,), top_p), always=targets)
        logits = logits.masked_fill(cut.isinf(), -1e30)
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def divergences(student: Tensor, teacher: Tensor, direction: Direction) -> Tensor:
    """Of log-probabilities [tokens, vocabulary]."""
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    share = REVERSE_SHARE[direction]
    return (1 - share) * forward + share * reverse


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Random hidden states and weights, where the last entries of the vocabulary are padding with large logits."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    vocab_size: int

    @staticmethod
    def random(tokens: int, *, vocab_size: int = 19, columns: int = 22, width: int = 6, seed: int = 1) -> Given:
        generator = torch.Generator().manual_seed(seed)
        weight = 2 * torch.randn(columns, width, generator=generator, dtype=torch.float64)
        weight[vocab_size:] *= 20
        hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
        return Given(hidden=hidden, weight=weight, targets=targets, vocab_size=vocab_size)

    def gradients(self, of: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The value of `of(hidden, weight)`, summed with different weights per token (some 0), and its two gradients."""
        hidden, weight = (each.to(dtype).requires_grad_() for each in (self.hidden, self.weight))
        value = of(hidden, weight)
        directions = torch.linspace(-1, 1, len(self.targets), dtype=value.dtype)
        directions[::3] = 0
        return [value.detach(), *torch.autograd.grad((value * directions).sum(), (hidden, weight))]
