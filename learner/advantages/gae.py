"""Per-token advantages from a critic's values or a teacher's log-probabilities. Packed rows of [T] tokens in [S] sequences.

Tokens that are not trained (prompts, observations) are skipped: an answer's last token is followed by the first token of the
next answer in the same sequence. Their advantage is 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from learner.losses.ratios import clamped
from learner.losses.segments import Segments


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of every token; `lam` may be a tensor with one value per sequence.

    delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        return_t = A_t + V_t
    After a sequence's last trained token V and A are 0, also if a length limit cut it.
    """
    segments = Segments.of(mask, cu_seqlens)
    trained, sequence = segments.trained, segments.sequence[segments.trained]
    goes_on = pad(sequence[1:] == sequence[:-1], (0, min(len(sequence), 1))).to(values.dtype)
    value = values[trained]
    delta = token_rewards[trained] + gamma * goes_on * _later(value, 1) - value
    decay = gamma * goes_on * (lam.to(values)[sequence] if isinstance(lam, Tensor) else lam)

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[trained] = _summed_up(delta, decay)
    returns[trained] = advantages[trained] + value
    return advantages, returns


def distillation_advantages(*, teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Return log teacher - log student of the sampled tokens, [T]. The student is the behaviour policy, or the proximal one.

    The mean over the student's samples is -KL(student || teacher), so a policy loss decreases the divergence.
    """
    return torch.where(mask != 0, clamped(teacher - student), 0.0).detach()


@torch.no_grad()
def whiten(advantages: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None, eps: float = 1e-8) -> Tensor:
    """Normalise to mean 0 and variance 1 over the trained tokens, of all ranks of `group` if given. Other tokens get 0."""
    trained = mask != 0
    # in float64, so that equal advantages become exactly 0
    chosen = advantages[trained].double()
    count, total = _over(group, chosen.new_tensor(len(chosen)), chosen.sum())
    mean = total / count.clamp(min=1)
    (squares,) = _over(group, (chosen - mean).square().sum())
    whitened = torch.zeros_like(advantages)
    whitened[trained] = ((chosen - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + eps)).to(advantages.dtype)
    return whitened


def _over(group: dist.ProcessGroup | None, *numbers: Tensor) -> Tensor:
    stacked = torch.stack(numbers)
    if group is not None:
        dist.all_reduce(stacked, group=group)
    return stacked


def _summed_up(terms: Tensor, decay: Tensor) -> Tensor:
    """Compute x_t = term_t + decay_t x_t+1 for all t in log2(T) rounds; each round doubles the reach."""
    reach = 1
    while reach < len(terms):
        terms = terms + decay * _later(terms, reach)
        decay = decay * _later(decay, reach)
        reach *= 2
    return terms


def _later(tensor: Tensor, by: int) -> Tensor:
    """Shift left by `by` places, filling with 0."""
    return pad(tensor[by:], (0, min(by, len(tensor))))
