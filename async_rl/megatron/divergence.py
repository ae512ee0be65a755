"""KL divergence between two distributions over the vocabulary, whose logits may be split among tensor ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.parallel import all_reduced, tensor_group

Direction = Literal["forward", "reverse", "mixed"]
REVERSE_SHARE: dict[Direction, float] = {"forward": 0.0, "reverse": 1.0, "mixed": 0.5}


def divergence(student: Tensor, teacher: Tensor, *, vocab_size: int, direction: Direction, temperature: float = 1.0) -> Tensor:
    """[tokens, vocabulary part] twice -> [tokens]. Differentiable in the student's logits.

    forward: KL(teacher || student); reverse: KL(student || teacher); mixed: their mean.
    """
    group = tensor_group()
    columns = student.shape[-1]
    padding = torch.arange(group.rank() * columns, (group.rank() + 1) * columns, device=student.device) >= vocab_size
    scale = 1 / temperature
    return _Divergence.apply(student, teacher.detach(), padding, scale, REVERSE_SHARE[direction], group)  # pyright: ignore[reportReturnType]


class _Divergence(torch.autograd.Function):
    """With p the student's probabilities, q the teacher's and D = log p - log q, the gradients are local to a rank:

    d KL(q || p) / d z_j = p_j - q_j          d KL(p || q) / d z_j = p_j (D_j - KL(p || q))
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, padding: Tensor, scale: float, reverse: float, group: dist.ProcessGroup
    ) -> Tensor:
        log_p, log_q = (_log_softmax(logits * scale, padding, group) for logits in (student, teacher))
        p, q = log_p.exp(), log_q.exp()
        apart = (log_p - log_q).masked_fill_(padding, 0.0)
        backwards = all_reduced((p * apart).sum(dim=-1), group)
        forwards = all_reduced((q * -apart).sum(dim=-1), group)
        slope = (1 - reverse) * (p - q) + reverse * p * (apart - backwards[:, None])
        ctx.save_for_backward(slope.mul_(scale).to(student.dtype))
        return (1 - reverse) * forwards + reverse * backwards

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0][:, None].to(slope.dtype), None, None, None, None, None


def _log_softmax(logits: Tensor, padding: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Log-softmax over all ranks, at least in float32; padding has probability 0."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(padding, -torch.inf)
    largest = all_reduced(wide.amax(dim=-1), group, dist.ReduceOp.MAX)
    shifted = wide - largest[:, None]
    return shifted - all_reduced(shifted.exp().sum(dim=-1), group).log()[:, None]
