"""Packed outputs without a model, and log-probabilities of a completion as the learner computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.megatron.heads.logprobs import token_logprobs
from async_rl.megatron.heads.output_layer import OutputLayer
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.model import forward_packed, pack


def packed_output(hidden: Tensor, weight: Tensor, *, vocab_size: int | None = None, bytes_at_once: int = 2**20) -> PackedOutput:
    """The output of a model with these last hidden states and this part of the output layer."""
    layer = OutputLayer(
        None,
        vocab_size=vocab_size if vocab_size is not None else len(weight),
        bytes_at_once=bytes_at_once,
        sequence_parallel=False,
    )
    return PackedOutput(hidden=hidden, tokens=len(hidden), output_layer=layer, weight=weight)


def with_logits(logits: Tensor, *, vocab_size: int | None = None) -> PackedOutput:
    """The output of a model with these logits."""
    return packed_output(logits, torch.eye(logits.shape[1], dtype=logits.dtype), vocab_size=vocab_size)


def completion_logprobs(
    model: nn.Module,
    prompt: Sequence[int],
    completion: Sequence[int] | np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Log-probabilities of the completion's tokens, as the learner computes them from the row."""
    row = torch.tensor([*prompt, *map(int, completion)])
    with torch.no_grad():
        output = forward_packed(model, *pack([row]))
        found = token_logprobs(output, row.roll(-1), temperature=temperature, top_k=top_k, top_p=top_p)
    return found[len(prompt) - 1 : -1].numpy()
