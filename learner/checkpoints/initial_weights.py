"""The initial weights of a model: a Hugging Face folder named by a setting, or random weights from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from async_rl.errors import ConfigError, naming_setting
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import ModelShape
from learner.model import FrozenModel, TrainingModel


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    key: str
    """The setting that names the folder, for error messages."""
    folder: Path | None

    def or_else(self, other: InitialWeights) -> InitialWeights:
        return self if self.folder is not None else other

    def shape(self, otherwise: ModelShape) -> ModelShape:
        if self.folder is None:
            return otherwise
        with naming_setting(self.key):
            return read_shape(self.folder)

    def check_vocabulary(self, of_policy: ModelShape) -> None:
        """Raise ConfigError if the vocabulary differs from the policy's. Builds no model."""
        if (found := self.shape(of_policy).vocab_size) != of_policy.vocab_size:
            raise ConfigError(
                f"{self.key}: the vocabulary of {self.folder} has {found} tokens and that of the model "
                f"{of_policy.vocab_size}; they must have the same vocabulary"
            )

    def load_into(self, model: TrainingModel | FrozenModel, dtype: torch.dtype) -> None:
        if self.folder is not None:
            with naming_setting(self.key):
                model.load(load_folder(self.folder, model.shape, dtype))
