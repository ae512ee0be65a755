"""Log-probabilities of given tokens and entropies, from logits that may be split among tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.parallel import all_reduced, tensor_group
from async_rl.megatron.truncation import truncate


def token_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature)[targets], at least in float32: [tokens, vocabulary part], [tokens] -> [tokens].

    `logits` are this tensor rank's columns; all tensor ranks return the same. Columns beyond `vocab_size` are padding with
    probability 0. With `top_k` or `top_p`, probabilities are those of the truncated distribution; the truncation is treated as
    constant in the gradient. Differentiable in `logits`.
    """
    return _Choice.apply(logits, targets, vocab_size, temperature, top_k, top_p, False)[0]  # pyright: ignore[reportOptionalSubscript]


def token_logprobs_and_entropies(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, and the entropies of the same distributions in nats. Both are differentiable."""
    return _Choice.apply(logits, targets, vocab_size, temperature, top_k, top_p, True)  # pyright: ignore[reportReturnType]


class _Choice(torch.autograd.Function):
    """Saves one probability per logit, which both gradients need:

    d logprob / d z_j = (j is the target) - p_j          d entropy / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        top_k: int,
        top_p: float,
        with_entropies: bool,
    ) -> tuple[Tensor, Tensor | None]:
        group = tensor_group()
        columns = logits.shape[-1]
        first = group.rank() * columns
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        if (real := vocab_size - first) < columns:
            scaled[:, max(real, 0) :] = -torch.inf
        if top_k > 0 or top_p < 1:
            # needs all columns: the configuration refuses it with tensor parallelism
            assert group.size() == 1, "top_k and top_p need the whole vocabulary on one tensor rank"
            scaled = truncate(scaled, torch.full_like(targets, top_k), scaled.new_full(targets.shape, top_p), always=targets)

        largest = all_reduced(scaled.amax(dim=-1), group, dist.ReduceOp.MAX)
        shifted = scaled - largest[:, None]
        is_here = (targets >= first) & (targets < first + columns)
        column = (targets - first).clamp(0, columns - 1).long()
        own = torch.where(is_here, shifted.gather(-1, column[:, None])[:, 0], 0.0)
        chosen = all_reduced(own, group)
        probabilities = shifted.exp_()
        total = all_reduced(probabilities.sum(dim=-1), group)
        probabilities.div_(total[:, None])
        entropies = all_reduced(torch.special.entr(probabilities).sum(dim=-1), group) if with_entropies else None

        ctx.save_for_backward(probabilities, column, is_here, entropies)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        return chosen - total.log(), entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = grads
        probabilities, column, is_here, entropies = ctx.saved_tensors
        toward_logits = torch.zeros_like(probabilities)
        if of_entropies is not None:
            toward_logits += torch.special.entr(probabilities)
            toward_logits -= probabilities * entropies[:, None]
            toward_logits *= of_entropies[:, None]
        if of_logprobs is not None:
            toward_logits -= probabilities * of_logprobs[:, None]
            toward_logits.scatter_add_(-1, column[:, None], torch.where(is_here, of_logprobs, 0.0)[:, None])
        return (toward_logits / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None
