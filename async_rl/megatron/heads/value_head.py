"""The value head of critics and reward models: one number per token from the last hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import GPTModel, gather_from_sequence_parallel_region
from async_rl.models.shape import Head


def attach(model: GPTModel, head: Head, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Add the head to the last pipeline stage, with parameters `value_head.weight` and `value_head.bias`."""
    if head != "tokens" and model.post_process:
        model.value_head = ValueHead(hidden, sharded=bool(model.config.sequence_parallel)).to(device, dtype)


def of(model: GPTModel) -> ValueHead | None:
    """The value head of a model on the last pipeline stage, or None."""
    return getattr(model, "value_head", None)


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
