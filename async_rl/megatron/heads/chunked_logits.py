"""Logits in float32, computed from hidden states in chunks of tokens, and the gradients of what was computed from them.

The logits of a packed row would take more memory than the model (32,768 tokens x 151,936 entries x 4 bytes are 18.5 GiB), so
they never exist at once: a chunk is computed, used and dropped, and the backward pass computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.parallel import all_reduced, tensor_group
from async_rl.megatron.products import add_product_, factor, product, wide

IMPOSSIBLE = -1e30
"""The logit of an entry with probability 0. Finite, because 0 times infinity is not a number."""
BUFFERS = 3
"""As many numbers in float32 may exist for a logit of a chunk: it, its log-probability and gradient; or those of two models."""
ROWS_OF_A_TILE = 128
"""Larger chunks are a multiple of it, which is the number of rows that a GPU's matrix product computes together."""


class LogitChunks:
    """The logits of tokens, [tokens, this tensor rank's part of the vocabulary], a chunk of tokens at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, *, vocab_size: int, bytes_at_once: int, temperature: float = 1.0
    ) -> None:
        """`hidden`: [tokens, hidden]. `weight`: this tensor rank's rows of the output layer. The last ones may be padding."""
        self.first = tensor_group().rank() * len(weight)
        """The first entry of this rank."""
        real = min(vocab_size - self.first, len(weight))
        self.columns = max(real, 1)
        """Entries of this rank without padding. A rank with padding alone has one entry, which is impossible."""
        self._is_padding, self._temperature = real < 1, temperature
        self.hidden, self.weight = factor(hidden), factor(weight[: self.columns])
        rows = bytes_at_once // (BUFFERS * self.columns * wide(hidden.dtype).itemsize)
        self.is_single = len(hidden) <= rows
        """Whether one chunk holds all tokens."""
        self._rows = max(rows - rows % ROWS_OF_A_TILE if rows > ROWS_OF_A_TILE else rows, 1)

    def __iter__(self) -> Iterator[slice]:
        """The tokens of each chunk; there is one chunk at least."""
        tokens = len(self.hidden)
        rows = max(tokens, 1) if self.is_single else self._rows
        for begin in range(0, max(tokens, 1), rows):
            yield slice(begin, min(begin + rows, tokens))

    def logits(self, tokens: slice) -> Tensor:
        """Compute a chunk, divided by the temperature. It is the caller's, who may change it in place."""
        logits = product(self.hidden[tokens], self.weight.t())
        if self._is_padding:
            logits.fill_(IMPOSSIBLE)
        return self.over_temperature_(logits)

    def log_softmax(self, tokens: slice) -> tuple[Tensor, Tensor | None]:
        """Compute a chunk's log-probabilities among the entries of this rank; and, for `log_share`, their log-sum-exp."""
        logits = self.logits(tokens)
        log_p = logits.log_softmax(dim=-1)
        if tensor_group().size() == 1:
            return log_p, None
        largest, entry = logits.max(dim=-1)
        return log_p, largest - log_p.gather(-1, entry[:, None])[:, 0]

    def over_temperature_(self, values: Tensor) -> Tensor:
        """Divide in place by the temperature: logits, or the gradient of what was divided."""
        return values.div_(self._temperature) if self._temperature != 1 else values


def log_share(lse: Tensor) -> Tensor:
    """The log of this tensor rank's share of the probability, from the log-sum-exp of its logits."""
    group = tensor_group()
    largest = all_reduced(lse.clone(), group, dist.ReduceOp.MAX)
    below = lse - largest
    return below - all_reduced(below.exp(), group).log_()


class HeadGradients:
    """Sums the gradients of hidden states and of the output layer's weight over the chunks of a backward pass.

    As Megatron's fused accumulation does, the weight's gradient is added to its `main_grad` in float32, if it has one. The hook
    of Megatron's DDP must then not add what autograd brings it: a placeholder, because it refuses a missing gradient. A weight
    that is also the embedding's gets its real one from there.
    """

    def __init__(
        self, chunks: LogitChunks, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool], *, is_fused: bool = True
    ) -> None:
        """`needs`: whether hidden states and weight want gradients. `hidden`, `weight`: those that `chunks` was made of.
        `is_fused`: add to `main_grad`, rather than return the gradient.
        """
        of_hidden, of_weight = needs
        self._chunks, self._given, self._weight = chunks, hidden, weight
        self._of_hidden = torch.empty_like(chunks.hidden) if of_hidden else None
        self._is_fused = is_fused and hasattr(weight, "main_grad")
        self._total: Tensor | None = None
        if of_weight:
            fused: Any = weight
            self._total = fused.main_grad if self._is_fused else weight.new_zeros(weight.shape, dtype=wide(weight.dtype))

    def add(self, tokens: slice, slope: Tensor) -> None:
        """Add the gradients of a chunk, from those of its matrix product."""
        chunks = self._chunks
        slope = slope.to(chunks.hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(slope, chunks.weight, out=self._of_hidden[tokens])
        if self._total is not None:
            add_product_(self._total[: chunks.columns], slope.t(), chunks.hidden[tokens])

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients as autograd wants them, each of its tensor's dtype or None."""
        of_hidden = self._of_hidden.to(self._given.dtype) if self._of_hidden is not None else None
        if self._total is None:
            return of_hidden, None
        weight: Any = self._weight
        if not self._is_fused:
            return of_hidden, self._total.to(weight.dtype)
        if getattr(weight, "zero_out_wgrad", False):  # Megatron's mark of a weight that is also the embedding's
            return of_hidden, None
        weight.grad_added_to_main_grad = True
        return of_hidden, torch.empty_like(weight)
