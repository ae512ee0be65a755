"""How a layer computes attention scores: scale and window."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.megatron.compat import TransformerConfig, is_layer_window_attention


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer computes the attention scores of a token."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(dimension of a head)."""
    window: int | None = None
    """The last tokens that a token attends to, itself included; None: all."""

    @classmethod
    def of_layer(cls, config: TransformerConfig, layer_number: int, scale: float | None = None) -> Scores:
        window, skipped = config.window_size, config.window_attn_skip_freq
        is_windowed = is_layer_window_attention(window, skipped, layer_number)  # pyright: ignore[reportArgumentType]
        return cls(scale, window[0] + 1 if is_windowed and window is not None else None)

    @property
    def window_size(self) -> tuple[int, int]:
        """The window as torch's and FlashAttention's kernels take it."""
        return (-1 if self.window is None else self.window - 1), 0
