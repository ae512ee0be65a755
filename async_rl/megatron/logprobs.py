"""Log-probabilities of given tokens under logits that tensor ranks may hold in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.parallel import tensor_group
from async_rl.megatron.truncation import truncate


def token_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature)[targets], at least in float32: [tokens, vocabulary part], [tokens] -> [tokens].

    `logits` are this tensor rank's columns; every tensor rank gets the same answer. Columns beyond `vocab_size` are
    padding and take no probability. With `top_k` or `top_p` the probabilities are those among the tokens that they leave, and
    which ones these are counts as given: the gradient flows through the kept ones. Differentiable in `logits`.
    """
    return _TokenLogprobs.apply(logits, targets, vocab_size, temperature, top_k, top_p)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    """Keeps one probability per logit for the backward pass, where plain log_softmax and gather would keep two."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, temperature: float, top_k: int, top_p: float
    ) -> Tensor:
        group = tensor_group()
        columns = logits.shape[-1]
        first = group.rank() * columns
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        if (real := vocab_size - first) < columns:
            scaled = scaled.clone() if scaled is logits else scaled
            scaled[:, max(real, 0) :] = -torch.inf
        if top_k > 0 or top_p < 1:
            # Needs all columns at once: the configuration refuses it together with tensor ranks.
            assert group.size() == 1, "top_k and top_p need the whole vocabulary on one tensor rank"
            scaled = truncate(scaled, torch.full_like(targets, top_k), scaled.new_full(targets.shape, top_p), always=targets)

        largest = _reduce(scaled.amax(dim=-1), dist.ReduceOp.MAX, group)
        shifted = scaled - largest[:, None]
        is_here = (targets >= first) & (targets < first + columns)
        column = (targets - first).clamp(0, columns - 1).long()
        own = torch.where(is_here, shifted.gather(-1, column[:, None])[:, 0], 0.0)
        chosen = _reduce(own, dist.ReduceOp.SUM, group)
        probabilities = shifted.exp_()
        total = _reduce(probabilities.sum(dim=-1), dist.ReduceOp.SUM, group)

        ctx.save_for_backward(probabilities.div_(total[:, None]), column, is_here)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = grads
        probabilities, column, is_here = ctx.saved_tensors
        grad = grad / ctx.temperature
        toward_logits = probabilities * -grad[:, None]
        toward_logits.scatter_add_(-1, column[:, None], torch.where(is_here, grad, 0.0)[:, None])
        return toward_logits.to(ctx.dtype), None, None, None, None, None


def _reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
    return values
