"""RMSNorm of the local layers."""

from __future__ import annotations

from torch import nn

from async_rl.megatron.compat import TransformerConfig


class Norm(nn.RMSNorm):
    """torch's RMSNorm, marked for sequence parallelism so that Megatron sums its gradients over tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
