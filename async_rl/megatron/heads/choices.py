"""Logits from which tokens were chosen: scores of the choices, and the slopes of the logits, a chunk of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.heads.chunked_logits import IMPOSSIBLE, LogitChunks, log_share
from async_rl.megatron.parallel import all_reduced, tensor_group
from async_rl.megatron.products import wide
from async_rl.megatron.triton_kernels import has_kernels
from async_rl.megatron.truncation import thresholds


@dataclass(frozen=True, slots=True)
class Distribution:
    temperature: float
    top_k: int
    top_p: float
    with_entropies: bool = False


class Choices(LogitChunks):
    """Logits from which the targets were chosen."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        of: Distribution,
        vocab_size: int,
        bytes_at_once: int,
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

    def values(self, tokens: slice) -> tuple[Tensor, Tensor | None]:
        """Compute what scores and slopes of a chunk are made of, a number per logit: here, log-probabilities among the entries
        of this rank. And their log-sum-exp, if `scores` needs it.
        """
        return self.log_softmax(tokens)

    def scores(self, tokens: slice, values: Tensor, lse: Tensor | None) -> list[Tensor]:
        """Return from what `values` returned: the targets' log-probabilities, entropies if they are wanted, and `lse` if
        there is one.
        """
        found = [values.gather(-1, self.column[tokens, None])[:, 0]]
        if self._of.with_entropies:
            found.append(values.exp().mul_(values).sum(dim=-1).neg_())
        return found if lse is None else [*found, lse]

    def whole(self, scores: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return from each rank's scores those of the whole vocabulary, without `lse`; and what must be added
        to a token's `values` to make them log-probabilities over it (None: nothing).
        """
        if tensor_group().size() == 1:
            return scores, None
        own, *entropies, lse = scores
        share = log_share(lse)
        parts = [self.if_here(own + share), *(share.exp() * (each - share) for each in entropies)]
        return [*all_reduced(torch.stack(parts), tensor_group()).unbind()], share

    def slope(
        self,
        tokens: slice,
        kept: Tensor | None,
        shift: Tensor | None,
        entropies: Tensor,
        of_logprobs: Tensor | None,
        of_entropies: Tensor | None,
    ) -> Tensor:
        """Return the gradient of a chunk's matrix product from those of all log-probabilities and entropies. `kept`: the values
        of all tokens, where the forward pass has kept them.
        """
        log_p = self.log_softmax(tokens)[0] if kept is None else kept
        if shift is not None:
            log_p = log_p.add_(shift[tokens, None]) if kept is None else log_p + shift[tokens, None]
        spare = None if log_p is kept else log_p
        if of_entropies is None:
            assert of_logprobs is not None
            slope = torch.exp(log_p, out=spare).mul_(-of_logprobs[tokens, None])
        else:
            slope = (log_p + entropies[tokens, None]).mul_(of_entropies[tokens, None])
            slope = slope.add_(of_logprobs[tokens, None]) if of_logprobs is not None else slope
            slope.mul_(torch.exp(log_p, out=spare)).neg_()
        if of_logprobs is not None:
            slope.scatter_add_(-1, self.column[tokens, None], self.if_here(of_logprobs, tokens)[:, None])
        return self.over_temperature_(slope)

    def if_here(self, values: Tensor, tokens: slice = slice(None), *, other: float = 0) -> Tensor:
        """Return the tokens' values, and `other` where the target is on another rank."""
        return values[tokens] if self._is_here is None else torch.where(self._is_here[tokens], values[tokens], other)


class FusedChoices(Choices):
    """The same by kernels, whose values are logits: nothing else of that size is written but the slope, rounded once."""

    def values(self, tokens: slice) -> tuple[Tensor, None]:
        return self.logits(tokens), None

    def scores(self, tokens: slice, values: Tensor, lse: Tensor | None) -> list[Tensor]:
        from async_rl.megatron.heads.logit_kernels import row_scores  # late: not everyone has Triton

        return row_scores(values, self.column[tokens], with_entropies=self._of.with_entropies)

    def whole(self, scores: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        found, share = super().whole(scores)
        lse = scores[-1]
        return (scores[:-1], -lse) if share is None else (found, share - lse)

    def slope(
        self,
        tokens: slice,
        kept: Tensor | None,
        shift: Tensor | None,
        entropies: Tensor,
        of_logprobs: Tensor | None,
        of_entropies: Tensor | None,
    ) -> Tensor:
        from async_rl.megatron.heads.logit_kernels import slopes

        assert shift is not None
        return slopes(
            self.logits(tokens) if kept is None else kept,
            self.if_here(self.column, tokens, other=-1),
            shift[tokens],
            entropies[tokens],
            of_logprobs[tokens] if of_logprobs is not None else None,
            of_entropies[tokens] if of_entropies is not None else None,
            factor=1 / self._temperature,
            dtype=self.hidden.dtype,
        )


def choices_on(hidden: Tensor) -> type[Choices]:
    """How choices are scored where hidden states are: by kernels on a GPU that has them, for logits in float32."""
    is_fused = wide(hidden.dtype) is torch.float32 and has_kernels(hidden.device)
    return FusedChoices if is_fused else Choices
