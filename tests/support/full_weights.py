"""The full weights of a learner's models, for tests that compare them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint
from async_rl.megatron.parameters.table import VALUE_HEAD
from learner.model import TrainingModel
from learner.ranks.rank_group import RankGroup
from tests.support.full_parameters import gather_full


def weights_of(rank_group: RankGroup) -> dict[str, Tensor]:
    """The policy's weights, without a value head, by way of a checkpoint that all ranks write."""
    with TemporaryDirectory() as folder:
        rank_group.save(Path(folder) / "checkpoints", step=0, extra={}, keep=1).result()
        (checkpoint,) = candidates(Path(folder) / "checkpoints")
        model = rank_group.model
        weights = load_checkpoint(checkpoint, read_manifest(checkpoint), model.shape, model.dtype)
        return {name: tensor for name, tensor in weights.items() if name not in VALUE_HEAD}


def weights_of_model(model: TrainingModel) -> dict[str, Tensor]:
    """All weights of a model, on rank 0; empty on others. Collective."""
    return gather_full(model.chunks, model.shape) or {}
