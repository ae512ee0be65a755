"""The cost of training a sequence: linear in its tokens, plus quadratic for attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_rl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """linear x tokens + quadratic x tokens²; only their ratio matters. The defaults are those of a dense model with hidden
    size 2048: above 24576 tokens attention costs more than everything else.
    """

    linear: float = 24576.0
    quadratic: float = 1.0

    def of(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        tokens = sizes.astype(np.float64)
        return self.linear * tokens + self.quadratic * np.square(tokens)


TYPICAL = Cost()


def cost_of(shape: ModelShape) -> Cost:
    """Return the cost of a model, in multiplications of a forward pass; a backward pass has twice as many of each kind."""
    heads_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.layers * shape.hidden * (2 * heads_width + 2 * kv_width)
    with_experts = 0
    if shape.experts is not None:
        with_experts = len(shape.experts.layers)
        weights += with_experts * 3 * shape.hidden * (shape.experts.per_token * shape.experts.ffn + shape.shared_ffn)
    weights += (shape.layers - with_experts) * 3 * shape.hidden * shape.ffn
    weights += shape.hidden * shape.vocab_size if shape.head != "scalar" else 0
    # scores and weighted sums, each over half of the positions (causal)
    pairs = shape.layers * 2 * heads_width / 2
    return Cost(linear=weights / pairs, quadratic=1.0)
