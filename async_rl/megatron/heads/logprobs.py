"""Log-probabilities of given tokens and entropies, from hidden states; the vocabulary may be split among tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.heads.choices import Choices, Distribution, choices_on
from async_rl.megatron.heads.chunked_logits import HeadGradients
from async_rl.megatron.heads.packed_output import PackedOutput


def token_logprobs(
    output: PackedOutput, targets: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature)[targets] of the tokens of a packed row, at least in float32: [tokens] -> [tokens].

    All tensor and context ranks return the same. With `top_k` or `top_p`, probabilities are those of the truncated
    distribution; the truncation is treated as constant in the gradient. Differentiable in hidden states and weights.
    """
    (logprobs,) = _scored(output, targets, Distribution(temperature, top_k, top_p))
    return logprobs


def token_logprobs_and_entropies(
    output: PackedOutput, targets: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, and the entropies of the same distributions in nats. Both are differentiable."""
    logprobs, entropies = _scored(output, targets, Distribution(temperature, top_k, top_p, with_entropies=True))
    return logprobs, entropies


def _scored(output: PackedOutput, targets: Tensor, distribution: Distribution) -> list[Tensor]:
    hidden, weight = output.for_vocabulary()
    own = output.own_part(targets, filler=0)
    sizes = {"vocab_size": output.vocab_size, "bytes_at_once": output.bytes_at_once}
    make = partial(choices_on(hidden), of=distribution, **sizes)
    found: tuple[Tensor, ...] = Choice.apply(hidden, weight, own, make)  # pyright: ignore[reportAssignmentType]
    return [output.of_row(each) for each in found]


class Choice(torch.autograd.Function):
    """Keeps a few numbers per token, and the values of logits if a single chunk holds them all:

    d logprob / d z_j = (j is the target) - p_j          d entropy / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, make: Callable[..., Choices]) -> tuple[Tensor, ...]:
        chunks = make(hidden, weight, targets)
        if chunks.is_single:
            kept, lse = chunks.values(slice(0, len(hidden)))
            scores = chunks.scores(slice(0, len(hidden)), kept, lse)
        else:
            kept, parts = None, [chunks.scores(tokens, *chunks.values(tokens)) for tokens in chunks]
            scores = [torch.cat(each) for each in zip(*parts, strict=True)]
        scores, shift = chunks.whole(scores)
        ctx.save_for_backward(hidden, weight, targets, scores[-1], shift, chunks.cut, kept)
        ctx.make = make
        ctx.set_materialize_grads(False)
        return tuple(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = (*grads, None)[:2]
        if of_logprobs is None and of_entropies is None:
            return (None,) * 4
        hidden, weight, targets, entropies, shift, cut, kept = ctx.saved_tensors
        chunks = ctx.make(hidden, weight, targets, cut=cut)
        gradients = HeadGradients(chunks, hidden, weight, ctx.needs_input_grad[:2])
        for tokens in chunks:  # a chunk is gone before the next one is computed
            gradients.add(tokens, chunks.slope(tokens, kept, shift, entropies, of_logprobs, of_entropies))
        return *gradients.results(), None, None
