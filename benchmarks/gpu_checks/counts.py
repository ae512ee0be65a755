"""Counts what a model must compute and move: the numerators of every fraction that is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from async_rl.megatron.parameters.full_parameters import table
from async_rl.models.shape import ModelShape

DENSE_BF16_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Peak FLOP/s by a part of the GPU's name, from the data sheets (SXM, without sparsity)."""


def weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of all weights that a token is multiplied with: all but an embedding that is only looked up."""
    return dtype.itemsize * _multiplied(shape)


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize


def training_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward: 6 per weight and token; causal attention: 6 x width x length per layer and token."""
    tokens = np.asarray(lengths, dtype=np.float64)
    attention = 6 * shape.layers * shape.heads * shape.head_dim * float((tokens**2).sum())
    return 6 * _multiplied(shape) * float(tokens.sum()) + attention


def data_sheet_flops(device: torch.device) -> float | None:
    """Peak bfloat16 FLOP/s of the GPU's data sheet; None if it is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in DENSE_BF16_FLOPS.items() if part in name), None)


def _multiplied(shape: ModelShape) -> int:
    matrices = sum(math.prod(row.shape) for row in table(shape) if len(row.shape) == 2)
    return matrices if shape.tied_embeddings else matrices - shape.vocab_size * shape.hidden
