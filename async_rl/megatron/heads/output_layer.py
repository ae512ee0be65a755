"""The output layer: logits in float32 for an engine; for the learner, which reads hidden states, what computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import (
    GPTModel,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from async_rl.megatron.heads.chunked_logits import HeadGradients, LogitChunks
from async_rl.megatron.parallel import tensor_group
from async_rl.models.shape import ModelShape


class OutputLayer(nn.Module):
    """Replaces Megatron's, which rounds logits to the model's dtype. Its parameter keeps its name."""

    def __init__(self, weight: nn.Parameter | None, *, vocab_size: int, bytes_at_once: int, sequence_parallel: bool) -> None:
        """`weight`: None where the embedding's is used. `vocab_size` 0: the model has no logits. `bytes_at_once`: memory for a
        chunk of logits in float32.
        """
        super().__init__()
        self.weight = weight
        self.vocab_size, self.bytes_at_once = vocab_size, bytes_at_once
        self.sequence_parallel = sequence_parallel
        """Whether tensor ranks have parts of the tokens. Megatron sets it to false where it has gathered them."""
        self._is_skipped = False

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return logits as a pair, as Megatron's layer does: this tensor rank's, or all with `runtime_gather_output`."""
        if self._is_skipped:
            return hidden, None
        weight = weight if weight is not None else self.weight
        entered = self.entered(hidden)
        made: Tensor = _Logits.apply(entered.flatten(0, -2), weight)  # pyright: ignore[reportAssignmentType]
        logits = made.view(*entered.shape[:-1], -1)
        return gather_from_tensor_model_parallel_region(logits) if runtime_gather_output else logits, None

    def entered(self, hidden: Tensor) -> Tensor:
        """Return hidden states that are whole on all tensor ranks, whose gradients are summed."""
        if tensor_group().size() == 1:
            return hidden
        return (
            gather_from_sequence_parallel_region(hidden)
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region(hidden)
        )

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """While inside, the model returns hidden states instead of logits."""
        self._is_skipped = True
        try:
            yield
        finally:
            self._is_skipped = False


def attach(model: GPTModel, shape: ModelShape, *, bytes_at_once: int) -> None:
    """Replace the output layer of a model on the last pipeline stage."""
    if not model.post_process:
        return
    has_logits = shape.head != "scalar"
    model.output_layer = OutputLayer(  # pyright: ignore[reportAttributeAccessIssue]
        model.output_layer.weight if has_logits else None,
        vocab_size=shape.vocab_size if has_logits else 0,
        bytes_at_once=bytes_at_once,
        sequence_parallel=bool(model.config.sequence_parallel),
    )


def weight_of(model: GPTModel) -> Tensor | None:
    """The weight of the output layer of a model on the last pipeline stage; None: it has no logits."""
    layer: Any = model.output_layer
    if layer.vocab_size == 0 or layer.weight is not None:
        return layer.weight
    return model.embedding.word_embeddings.weight


class _Logits(torch.autograd.Function):
    """Logits of all tokens and of padding."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _single_chunk(hidden, weight).logits(slice(0, len(hidden)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        gradients = HeadGradients(_single_chunk(hidden, weight), hidden, weight, ctx.needs_input_grad, is_fused=False)
        gradients.add(slice(0, len(hidden)), grads[0])
        return gradients.results()


def _single_chunk(hidden: Tensor, weight: Tensor) -> LogitChunks:
    everything = len(weight) * tensor_group().size()
    return LogitChunks(hidden, weight, vocab_size=everything, bytes_at_once=0)
