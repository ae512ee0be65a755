"""KL divergence between the distributions of two models over the vocabulary, which may be split among tensor ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from async_rl.megatron.heads.chunked_logits import HeadGradients, LogitChunks, log_share
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.parallel import all_reduced, tensor_group

Direction = Literal["forward", "reverse", "mixed"]
REVERSE_SHARE: dict[Direction, float] = {"forward": 0.0, "reverse": 1.0, "mixed": 0.5}


def divergence(student: PackedOutput, teacher: PackedOutput, *, direction: Direction, temperature: float = 1.0) -> Tensor:
    """The divergences at the tokens of a packed row, [tokens]. Differentiable in the student's hidden states and weights.

    forward: KL(teacher || student); reverse: KL(student || teacher); mixed: their mean.
    """
    of_teacher = [each.detach() for each in teacher.for_vocabulary()]
    how = {"vocab_size": student.vocab_size, "bytes_at_once": student.bytes_at_once, "temperature": temperature}
    found: Tensor = _Divergence.apply(*student.for_vocabulary(), *of_teacher, REVERSE_SHARE[direction], how)  # pyright: ignore[reportAssignmentType]
    return student.of_row(found)


class _Divergence(torch.autograd.Function):
    """With p the student's probabilities, q the teacher's and D = log p - log q, the gradients are local to a rank:

    d KL(q || p) / d z_j = p_j - q_j          d KL(p || q) / d z_j = p_j (D_j - KL(p || q))
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, of_teacher: Tensor, its_weight: Tensor, reverse: float, how: dict[str, Any]
    ) -> Tensor:
        pair = LogitChunks(hidden, weight, **how), LogitChunks(of_teacher, its_weight, **how)
        parts = [_divergences(*(each.log_softmax(tokens) for each in pair)) for tokens in pair[0]]
        found = [torch.cat(each) for each in zip(*parts, strict=True)]
        forwards, backwards, *shares = found if len(found) == 2 else _over_tensor_ranks(*found)
        ctx.save_for_backward(hidden, weight, of_teacher, its_weight, backwards, *shares)
        ctx.reverse, ctx.how = reverse, how
        return (1 - reverse) * forwards + reverse * backwards

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, of_teacher, its_weight, backwards, *shares = ctx.saved_tensors
        student, teacher = LogitChunks(hidden, weight, **ctx.how), LogitChunks(of_teacher, its_weight, **ctx.how)
        gradients = HeadGradients(student, hidden, weight, ctx.needs_input_grad[:2])

        def slope(tokens: slice) -> Tensor:
            log_p, log_q = (each.log_softmax(tokens)[0] for each in (student, teacher))
            for log, share in zip((log_p, log_q), shares, strict=False):
                log += share[tokens, None]
            apart = (log_p - log_q).sub_(backwards[tokens, None])
            p, q = log_p.exp_(), log_q.exp_()
            return apart.mul_(p).mul_(ctx.reverse).add_(p.sub_(q), alpha=1 - ctx.reverse).mul_(grads[0][tokens, None])

        for tokens in student:
            gradients.add(tokens, student.over_temperature_(slope(tokens)))
        return *gradients.results(), None, None, None, None


def _divergences(of_student: tuple[Tensor, Tensor | None], of_teacher: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return KL(q || p), KL(p || q) of this rank's distributions, and their log-sum-exps if there are any."""
    (log_p, of_p), (log_q, of_q) = of_student, of_teacher
    apart = log_p - log_q
    backwards, forwards = (log.exp_().mul_(apart).sum(dim=-1) for log in (log_p, log_q))
    found = [forwards.neg_(), backwards]
    return found if of_p is None or of_q is None else [*found, of_p, of_q]


def _over_tensor_ranks(forwards: Tensor, backwards: Tensor, of_p: Tensor, of_q: Tensor) -> list[Tensor]:
    """Return the divergences of the whole distributions from the ranks', and the log of this rank's share of p and of q."""
    p, q = log_share(of_p), log_share(of_q)
    parts = torch.stack([q.exp() * (forwards + q - p), p.exp() * (backwards + p - q)])
    return [*all_reduced(parts, tensor_group()).unbind(), p, q]
