"""One number per token from a model's last hidden states: a critic's values, a reward model's scores.

`scalar` puts it in the place of the logits; `both` puts it behind them, as one more column, so that whatever carries logits
carries it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import GPTModel, gather_from_sequence_parallel_region
from async_rl.megatron.parameters.table import VALUE_HEAD
from async_rl.models.shape import Head


def attach(model: GPTModel, head: Head, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """On the last pipeline stage. Its parameters are `value_head.weight` and `value_head.bias`."""
    if head == "tokens" or not model.post_process:
        return
    model.value_head = ValueHead(hidden, sharded=bool(model.config.sequence_parallel)).to(device, dtype)
    if head == "scalar":
        model.output_layer = _Instead()  # pyright: ignore[reportAttributeAccessIssue]
    model.output_layer.register_forward_hook(_Adding(model.value_head))


def split(output: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Logits and values of what a model with this head gave; the one it lacks has no columns."""
    if head == "tokens":
        return output, output[:, :0]
    return output[:, :-1], output[:, -1].float()


def without_value_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full parameters, as a model has them that gives logits only."""
    return {name: tensor for name, tensor in tensors.items() if name not in VALUE_HEAD}


class ValueHead(nn.Module):
    """The same on every tensor rank: it costs too little to be divided. In float32, where rewards are told apart."""

    def __init__(self, hidden: int, *, sharded: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1, hidden)), nn.Parameter(torch.zeros(1))
        self._sharded = sharded

    def forward(self, hidden: Tensor) -> Tensor:
        if self._sharded:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class _Adding:
    """A hook rather than a wrapper, so that the output layer's own parameter keeps its name."""

    def __init__(self, head: ValueHead) -> None:
        self._head = head

    def __call__(self, _layer: nn.Module, given: tuple[Any, ...], made: tuple[Tensor | None, Any]) -> tuple[Tensor, Any]:
        logits, bias = made
        values = self._head(given[0])
        return (values if logits is None else torch.cat([logits, values.to(logits.dtype)], dim=-1)), bias


class _Instead(nn.Module):
    """Stands where the logits would be made, and makes none."""

    def forward(self, _hidden: Tensor, **_: object) -> tuple[None, None]:
        return None, None
