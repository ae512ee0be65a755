"""The reward model: packed texts in, the score at the last token of each out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from async_rl.checkpoints.manifest import found_in, read_asked
from async_rl.config.training import TrainingConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.shape import ModelShape
from async_rl.supervision import working
from async_rl.tokenization.rendering import RenderedText


class Scorer:
    """Use it only on the thread that made it."""

    @working("the construction of the model")
    def __init__(self, config: TrainingConfig, shape: ModelShape, checkpoint: Path) -> None:
        device = parallel.resolve_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        parallel.initialize(device=device)
        dtype, scoring = parallel.resolve_dtype(device, config.learner.precision), shape.with_head(config.head)
        weights = load_checkpoint(checkpoint, read_asked(checkpoint), scoring, dtype, base=config.model.folder)
        self._model = build_model(scoring, device=device, dtype=dtype, seed=None, layer_spec=config.model.layer_spec)
        load_full(self._model, scoring, weights)
        self._model.requires_grad_(False).eval()
        self._device = device

    @working("scores")
    def scores(self, texts: Sequence[RenderedText]) -> list[float]:
        token_ids, positions, packing = pack([torch.tensor(text.token_ids, device=self._device) for text in texts])
        with torch.no_grad():
            found = forward_packed(self._model, token_ids, positions, packing).values()
        return found[packing.cu_seqlens_q[1:].long() - 1].tolist()

    def close(self) -> None:
        parallel.shutdown()


def checkpoint_of(config: TrainingConfig, named: str | None) -> Path:
    """Find the named checkpoint, or the newest of the run. Raises ConfigError."""
    folder = Path(named) if named is not None else config.run_folder
    found = found_in(folder)
    if not found:
        raise ConfigError(f"there is no checkpoint in {folder}")
    return found[0]
