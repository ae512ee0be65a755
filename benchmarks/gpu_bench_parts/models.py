"""The dimensions of Qwen3's dense models, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_checks.report import QWEN3_600M

from async_rl.models.shape import ModelShape

QWEN3: Mapping[str, ModelShape] = {
    "0.6B": QWEN3_600M,
    "1.7B": replace(QWEN3_600M, hidden=2048, ffn=6144),
    "4B": replace(QWEN3_600M, hidden=2560, layers=36, heads=32, ffn=9728),
    "8B": replace(QWEN3_600M, hidden=4096, layers=36, heads=32, ffn=12288, tied_embeddings=False),
}
