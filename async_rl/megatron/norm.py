"""The norm of the local layers: torch's, which learns from parts of a row too."""

from __future__ import annotations

from torch import nn

from async_rl.megatron.compat import TransformerConfig


class Norm(nn.RMSNorm):
    """Under sequence parallelism each tensor rank normalises other tokens: Megatron adds up the gradients of what is marked."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
