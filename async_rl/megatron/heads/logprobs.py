"""Log-probabilities of given tokens and entropies, from hidden states; the vocabulary may be split among tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.heads.chunked_logits import IMPOSSIBLE, HeadGradients, LogitChunks, log_share, wide
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.parallel import all_reduced, tensor_group
from async_rl.megatron.truncation import thresholds


def token_logprobs(
    output: PackedOutput, targets: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature)[targets] of the tokens of a packed row, at least in float32: [tokens] -> [tokens].

    All tensor and context ranks return the same. With `top_k` or `top_p`, probabilities are those of the truncated
    distribution; the truncation is treated as constant in the gradient. Differentiable in hidden states and weights.
    """
    (logprobs,) = _scored(output, targets, _Distribution(temperature, top_k, top_p))
    return logprobs


def token_logprobs_and_entropies(
    output: PackedOutput, targets: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, and the entropies of the same distributions in nats. Both are differentiable."""
    logprobs, entropies = _scored(output, targets, _Distribution(temperature, top_k, top_p, with_entropies=True))
    return logprobs, entropies


@dataclass(frozen=True, slots=True)
class _Distribution:
    temperature: float
    top_k: int
    top_p: float
    with_entropies: bool = False


def _scored(output: PackedOutput, targets: Tensor, distribution: _Distribution) -> list[Tensor]:
    hidden, weight = output.for_vocabulary()
    own = output.own_part(targets, filler=0)
    sizes = output.vocab_size, output.bytes_at_once
    found: tuple[Tensor, ...] = _Choice.apply(hidden, weight, own, distribution, *sizes)  # pyright: ignore[reportAssignmentType]
    return [output.of_row(each) for each in found]


class _Choice(torch.autograd.Function):
    """Keeps a few numbers per token, and the log-probabilities if a single chunk holds them all:

    d logprob / d z_j = (j is the target) - p_j          d entropy / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, of: _Distribution, vocab_size: int, bytes_at_once: int
    ) -> tuple[Tensor, ...]:
        chunks = _Choices(hidden, weight, targets, of, vocab_size, bytes_at_once)
        if chunks.is_single:
            kept, lse = chunks.log_softmax(slice(0, len(hidden)))
            scores = chunks.scores(slice(0, len(hidden)), kept, lse)
        else:
            kept, parts = None, [chunks.scores(tokens, *chunks.log_softmax(tokens)) for tokens in chunks]
            scores = [torch.cat(each) for each in zip(*parts, strict=True)]
        share = None
        if tensor_group().size() > 1:
            *scores, share = chunks.over_tensor_ranks(scores)
            kept = kept.add_(share[:, None]) if kept is not None else None
        ctx.save_for_backward(hidden, weight, targets, scores[-1], share, chunks.cut, kept)
        ctx.settings = of, vocab_size, bytes_at_once
        ctx.set_materialize_grads(False)
        return tuple(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = (*grads, None)[:2]
        if of_logprobs is None and of_entropies is None:
            return (None,) * 6
        hidden, weight, targets, entropies, share, cut, kept = ctx.saved_tensors
        chunks = _Choices(hidden, weight, targets, *ctx.settings, cut=cut)
        gradients = HeadGradients(chunks, hidden, weight, ctx.needs_input_grad[:2])

        def add(tokens: slice) -> None:  # a chunk is gone before the next one is computed
            log_p = kept
            if log_p is None:
                log_p, _ = chunks.log_softmax(tokens)
                log_p = log_p.add_(share[tokens, None]) if share is not None else log_p
            if of_entropies is None:
                assert of_logprobs is not None
                slope = torch.exp(log_p, out=log_p if kept is None else None).mul_(-of_logprobs[tokens, None])
            else:
                slope = (log_p + entropies[tokens, None]).mul_(of_entropies[tokens, None])
                slope = slope.add_(of_logprobs[tokens, None]) if of_logprobs is not None else slope
                slope.mul_(torch.exp(log_p, out=log_p if kept is None else None)).neg_()
            if of_logprobs is not None:
                slope.scatter_add_(-1, chunks.column[tokens, None], chunks.if_here(of_logprobs, tokens)[:, None])
            gradients.add(tokens, slope)

        for tokens in chunks:
            add(tokens)
        return *gradients.results(), None, None, None, None


class _Choices(LogitChunks):
    """Logits from which the targets were chosen."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        of: _Distribution,
        vocab_size: int,
        bytes_at_once: int,
        *,
        cut: Tensor | None = None,
    ) -> None:
        """`cut`: the smallest logit inside of top-k and top-p per token, where the forward pass has found it."""
        super().__init__(hidden, weight, vocab_size=vocab_size, bytes_at_once=bytes_at_once, temperature=of.temperature)
        self._of, self._is_here, self.column = of, None, targets.long()
        """The targets' entries on this rank; any, where they are on another."""
        if tensor_group().size() > 1:
            self._is_here = (targets >= self.first) & (targets < self.first + self.columns)
            self.column = (self.column - self.first).clamp_(0, self.columns - 1)
        self._has_cut, self.cut = cut is not None, cut
        if cut is None and (of.top_k > 0 or of.top_p < 1):
            # needs all columns: the configuration refuses it with tensor parallelism
            assert tensor_group().size() == 1, "top_k and top_p need the whole vocabulary on one tensor rank"
            self.cut = self.hidden.new_empty(len(targets), dtype=wide(hidden.dtype))

    def logits(self, tokens: slice) -> Tensor:
        """A chunk, whose logits outside of top-k and top-p are impossible. The target is inside in any case."""
        logits = super().logits(tokens)
        if self.cut is None:
            return logits
        if not self._has_cut:
            k = torch.full_like(self.column[tokens], self._of.top_k)
            self.cut[tokens] = thresholds(logits, k, logits.new_full((len(logits),), self._of.top_p))
        outside = (logits < self.cut[tokens, None]).scatter_(-1, self.column[tokens, None], False)
        return logits.masked_fill_(outside, IMPOSSIBLE)

    def scores(self, tokens: slice, log_p: Tensor, lse: Tensor | None) -> list[Tensor]:
        """Return from what `log_softmax` returned: the targets' log-probabilities, entropies if they are wanted, and `lse` if
        there is one.
        """
        found = [log_p.gather(-1, self.column[tokens, None])[:, 0]]
        if self._of.with_entropies:
            found.append(log_p.exp().mul_(log_p).sum(dim=-1).neg_())
        return found if lse is None else [*found, lse]

    def over_tensor_ranks(self, scores: list[Tensor]) -> list[Tensor]:
        """Return from each rank's scores those of the whole vocabulary; and in place of `lse`, the log of the rank's share."""
        own, *entropies, lse = scores
        share = log_share(lse)
        parts = [self.if_here(own + share), *(share.exp() * (each - share) for each in entropies)]
        return [*all_reduced(torch.stack(parts), tensor_group()).unbind(), share]

    def if_here(self, values: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Return the tokens' values, and 0 where the target is on another rank."""
        return values[tokens] if self._is_here is None else torch.where(self._is_here[tokens], values[tokens], 0.0)
