"""What routers do in an update, and the losses that keep them balanced.

    E experts, of which every token uses k     p_ti  probability of expert i for token t, over all experts
    n tokens of a packed row, T of an update   c_i   tokens that chose expert i

    balancing   sum over rows and layers of n / T * E * sum_i (c_i / (k n)) * (mean_t p_ti)     Switch Transformer; 1: balanced
    z           sum over layers of the mean over tokens of logsumexp_i(logits_ti)^2             ST-MoE

Padding and rows that only fill up a schedule do not count. A row's c_i are those of all tensor and context ranks that share it.
Megatron's own losses weigh every row alike, whatever its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.config.learner import ExpertsConfig
from async_rl.megatron import host
from async_rl.megatron.parallel import all_reduced, data_group
from async_rl.models.shape import ModelShape

with host.importing():
    from megatron.core.transformer.moe.router import TopKRouter


class ObservedRouter(TopKRouter):
    """Megatron's router, observed in training passes if it has an `observer`."""

    observer: RouterObserver | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        # recomputed layers pass here twice, and the first time without gradients
        if self.observer is not None and torch.is_grad_enabled():
            counted = self._counted(padding_mask, len(chosen))
            weights = self.observer.observed(self, logits.view(-1, logits.shape[-1]), weights, chosen, counted)
        return weights, chosen

    def _counted(self, padding_mask: Tensor | None, tokens: int) -> Tensor:
        """1 for each token of this rank that counts, else 0."""
        if padding_mask is None:
            return self.weight.new_ones(tokens, dtype=torch.float32)
        is_padding = padding_mask.reshape(-1)
        if len(is_padding) != tokens:  # Megatron divides the mask among tensor ranks on the first pipeline stage only
            is_padding = is_padding.chunk(self.tp_group.size())[self.tp_group.rank()]
        return (~is_padding).float()


class RouterObserver:
    """Adds the losses of an update to the routers of this rank, and counts what they do."""

    def __init__(self, chunks: nn.Module, shape: ModelShape, losses: ExpertsConfig, *, gradient_scale: float) -> None:
        """`gradient_scale`: by what Megatron divides gradients, which are to be summed over rows and ranks."""
        assert shape.experts is not None
        self._experts, self._per_token, self._layers = shape.experts.number, shape.experts.per_token, shape.layers
        self._losses, self._gradient_scale = losses, gradient_scale
        self._has_losses = losses != ExpertsConfig()
        self._tokens = 1.0
        self._columns: Tensor | None = None
        for module in chunks.modules():
            if isinstance(module, ObservedRouter):
                module.observer = self

    def begin(self, tokens: int) -> None:
        """Begin an update with `tokens` in the rows of this rank, fillers not counted. Collective."""
        of_all = torch.tensor(float(tokens), dtype=torch.float64)
        dist.all_reduce(of_all)
        rows_are_shared_by = dist.get_world_size() // data_group().size()
        self._tokens, self._columns = max(float(of_all) / rows_are_shared_by, 1.0), None

    def observed(self, router: ObservedRouter, logits: Tensor, weights: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
        """Count, and return `weights` with the gradient of the losses attached."""
        with torch.set_grad_enabled(self._has_losses):
            logs = logits.float().log_softmax(dim=-1)
            squares = (counted * logits.float().logsumexp(dim=-1).square()).sum()
            choices, probabilities = (chosen * counted[:, None]).sum(dim=0), counted @ logs.exp()
        with torch.no_grad():
            entropies = -(counted @ (logs.exp() * logs)).sum()
            self._add(router, torch.cat([choices, probabilities, torch.stack([counted.sum(), entropies, squares])]))
        if not self._has_losses:
            return weights
        loss = self._losses.z_loss * squares
        if self._losses.balancing_loss > 0:
            of_row = all_reduced(torch.cat([choices, counted.sum()[None]]), router.tp_cp_group)
            shares = of_row[:-1] / (router.topk * of_row[-1].clamp(min=1))
            loss = loss + self._losses.balancing_loss * len(shares) * (shares * probabilities).sum()
        return _WithLoss.apply(weights, loss * (self._gradient_scale / self._tokens))  # pyright: ignore[reportReturnType]

    def _add(self, router: ObservedRouter, columns: Tensor) -> None:
        if self._columns is None:
            self._columns = columns.new_zeros(self._layers, len(columns), dtype=torch.float64)
        assert router.layer_number is not None
        self._columns[router.layer_number - 1] += columns

    def ended(self) -> RoutingTotals:
        """Return what the routers of all ranks did in the update. Collective."""
        size = 2 * self._experts + 3
        columns = self._columns.cpu() if self._columns is not None else torch.zeros(self._layers, size, dtype=torch.float64)
        dist.all_reduce(columns)
        return RoutingTotals(columns=columns, experts=self._experts, per_token=self._per_token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTotals:
    """What the routers of all ranks did."""

    columns: Tensor
    """[layers, 2 E + 3]: each expert's tokens, each expert's summed probability, tokens, summed entropy, summed squares of the
    logits' logsumexp. A layer without experts has a row of 0."""
    experts: int
    per_token: int

    @staticmethod
    def merged(several: Sequence[RoutingTotals]) -> RoutingTotals:
        """Add several updates up."""
        return replace(several[0], columns=torch.stack([each.columns for each in several]).sum(dim=0))

    @property
    def metrics(self) -> dict[str, float]:
        columns = self.columns[self.columns[:, 2 * self.experts] > 0]
        if len(columns) == 0:
            return {}
        choices, probabilities, others = columns.split([self.experts, self.experts, 3], dim=1)
        tokens, entropies, squares = others.split(1, dim=1)
        shares = choices / (self.per_token * tokens)
        imbalances = shares.max(dim=1).values * self.experts
        return {
            "experts/imbalance_max": float(imbalances.max()),
            "experts/imbalance_mean": float(imbalances.mean()),
            "experts/idle": float((choices == 0).double().mean()),
            "experts/entropy": float((entropies / tokens).mean()),
            "experts/balancing_loss": float((self.experts * shares * probabilities / tokens).sum(dim=1).mean()),
            "experts/z_loss": float((squares / tokens).mean()),
        }


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on, and in the backward pass also sends a gradient of 1 to a loss."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        ctx.device = loss.device
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), device=ctx.device)
