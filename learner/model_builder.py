"""Build the models of a run with initial weights: of a Hugging Face folder named by a setting, or random from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_rl.checkpoints.manifest import AdapterFacts
from async_rl.config.learner import LoraConfig, OptimizerConfig
from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError, naming_setting
from async_rl.megatron import parallel
from async_rl.megatron.base_weights import base_digest
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import ModelShape
from learner.collectives import broadcast_bytes
from learner.model import FrozenBase, FrozenModel, Reference, TrainingModel, compute_options


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    key: str
    """The setting that names the folder, for error messages."""
    folder: Path | None
    """None: random weights from the seed."""

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


class ModelBuilder:
    """Builds models. `async_rl.megatron.parallel.initialize` must have run on the thread that uses them."""

    def __init__(self, run: AnyRun, device: torch.device) -> None:
        self.own = InitialWeights(key="model.folder", folder=run.model.folder)
        self._router_losses = run.learner.experts
        self._dtype = parallel.resolve_dtype(device, run.learner.precision)
        self._how: dict[str, Any] = {
            "device": device,
            "dtype": self._dtype,
            "seed": run.run.seed,
            "layer_spec": run.model.layer_spec,
            "compute": compute_options(run.learner, device, run.model.layer_spec),
        }

    def trained(
        self,
        initial: InitialWeights,
        shape: ModelShape,
        optimizer: OptimizerConfig,
        *,
        total_updates: int,
        lora: LoraConfig | None = None,
    ) -> TrainingModel:
        adapters = self._adapters(lora, initial, shape) if lora is not None else None
        model = TrainingModel(
            shape,
            optimizer,
            total_updates=total_updates,
            adapters=adapters,
            router_losses=self._router_losses,
            draws_weights=initial.folder is None,
            **self._how,
        )
        self._load(model, initial)
        return model

    def reference(self, initial: InitialWeights, shape: ModelShape, trained: TrainingModel) -> Reference:
        """Build a reference; without a folder of its own it is the base of the trained model's adapters, if there is one."""
        if initial.folder is None and trained.adapters is not None and trained.shape.head == "tokens":
            return FrozenBase(trained)
        return self.frozen(initial, shape)

    def frozen(self, initial: InitialWeights, shape: ModelShape) -> FrozenModel:
        """Build a frozen model; without a folder of its own, from the initial weights of the run's model."""
        initial = initial.or_else(self.own)
        how = self._how if initial.folder is None else {**self._how, "seed": None}
        model = FrozenModel(initial.shape(shape), **how)
        self._load(model, initial)
        return model

    def _adapters(self, lora: LoraConfig, initial: InitialWeights, shape: ModelShape) -> AdapterFacts:
        """Describe adapters for checkpoints. Collective: rank 0 reads the weights of their base."""
        folder, seed = initial.folder, self._how["seed"]
        if folder is not None:
            with naming_setting(initial.key):  # every rank finds what is wrong, before the others wait for rank 0
                load_folder(folder, shape, self._dtype)
        base = broadcast_bytes(base_digest(folder, shape, seed=seed).encode() if dist.get_rank() == 0 else None).decode()
        return AdapterFacts(lora=lora, base=base, folder=folder.absolute() if folder is not None else None, seed=seed)

    def _load(self, model: TrainingModel | FrozenModel, initial: InitialWeights) -> None:
        if initial.folder is not None:
            with naming_setting(initial.key):
                model.load(load_folder(initial.folder, model.shape, self._dtype))
