"""The arguments of a rank process, as JSON."""

from __future__ import annotations

from pathlib import Path

import torch

from async_rl.config import TokenizerConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.config.section import Section
from async_rl.megatron.model import LayerSpec
from async_rl.models.shape import ModelShape


class RankSetup(Section):
    """What one rank process needs to build its part of an engine."""

    shape: ModelShape
    tokenizer: TokenizerConfig
    worker: WorkerConfig
    layer_spec: LayerSpec
    seed: int
    rank: int
    device: str
    dtype: str
    store: Path
    """File of the store over which the ranks find each other."""
    work_limit_s: float
    """As supervision.work_limit_s."""
    num_parcels: int
    """Parcels of a version that the engines' GPUs receive; 0: host memory receives them."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)
