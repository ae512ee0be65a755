"""The value head of critics and reward models: one number per token from the last hidden states.

Head `scalar` replaces the logits by it; `both` appends it to them as one more column, so that it takes the same path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import GPTModel, gather_from_sequence_parallel_region
from async_rl.models.shape import Head


def attach(model: GPTModel, head: Head, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Add the head to the last pipeline stage, with parameters `value_head.weight` and `value_head.bias`."""
    if head == "tokens" or not model.post_process:
        return
    model.value_head = ValueHead(hidden, sharded=bool(model.config.sequence_parallel)).to(device, dtype)
    if head == "scalar":
        model.output_layer = _NoLogits()  # pyright: ignore[reportAttributeAccessIssue]
    model.output_layer.register_forward_hook(_Adding(model.value_head))


def split(output: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Split a model's output into logits and values."""
    if head == "tokens":
        return output, output[:, :0]
    return output[:, :-1], output[:, -1].float()


class ValueHead(nn.Module):
    """A linear layer in float32, replicated on all tensor ranks because it is small."""

    def __init__(self, hidden: int, *, sharded: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1, hidden)), nn.Parameter(torch.zeros(1))
        self._sharded = sharded

    def forward(self, hidden: Tensor) -> Tensor:
        if self._sharded:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class _Adding:
    """A forward hook that appends values; a wrapper would rename the output layer's parameter."""

    def __init__(self, head: ValueHead) -> None:
        self._head = head

    def __call__(self, _layer: nn.Module, given: tuple[Any, ...], made: tuple[Tensor | None, Any]) -> tuple[Tensor, Any]:
        logits, bias = made
        values = self._head(given[0])
        return (values if logits is None else torch.cat([logits, values.to(logits.dtype)], dim=-1)), bias


class _NoLogits(nn.Module):
    """Replaces the output layer of a model without logits."""

    def forward(self, _hidden: Tensor, **_: object) -> tuple[None, None]:
        return None, None
