"""Scaled rotary position embeddings in Megatron's layers: inverse frequencies, and YaRN's factor on sine and cosine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.compat import GPTModel, TransformerConfig
from async_rl.models.rope import RopeScaling


def scale_rope(model: GPTModel, scaling: RopeScaling, base: float) -> None:
    """Replace the inverse frequencies of a new model."""
    embedding: Any = model.rotary_pos_emb
    embedding.inv_freq = scaled(embedding.inv_freq, scaling, base)


def scaled(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Return the inverse frequencies under a scaling, as transformers computes them."""
    slow = frequencies / scaling.factor
    match scaling.kind:
        case "linear":
            return slow
        case "llama3":
            turns = scaling.original_positions / (2 * math.pi / frequencies)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        case "yarn":
            first, last = (
                _dimension(turns, scaling, base, len(frequencies)) for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
            places = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
            kept = 1 - (places - first) / (last - first if last != first else 0.001)
    kept = kept.clamp(0, 1)
    return slow * (1 - kept) + frequencies * kept


def _dimension(turns: float, scaling: RopeScaling, base: float, pairs: int) -> float:
    """The (fractional) index of the pair of dimensions that turns this often in the original positions."""
    return pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(base)


def set_attention_factor(config: TransformerConfig, scaling: RopeScaling) -> None:
    """Megatron multiplies sine and cosine by 0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1 if these are set."""
    found: Any = config
    found.yarn_rotary_scaling_factor, found.yarn_mscale, found.yarn_mscale_all_dim = (
        math.e, 10 * (scaling.attention_factor - 1), 0.0,
    )  # fmt: skip


def attention_factor(config: TransformerConfig) -> float:
    """The factor on sine and cosine that the configuration has."""
    return 0.1 * getattr(config, "yarn_mscale", 0.0) + 1.0
