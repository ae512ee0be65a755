"""The trained model, and the reference or teacher of its method."""

from __future__ import annotations

import torch

from async_rl.config.training import Distillation, DpoTraining, TrainingConfig
from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from learner.checkpoints.initial_weights import InitialWeights
from learner.model import FrozenModel, TrainingModel, compute_options
from learner.training.methods import Distill, Dpo, Method, RewardModel, Supervised


def check(config: TrainingConfig, shape: ModelShape) -> None:
    """Raise ConfigError if the reference or teacher has another vocabulary. Builds no model."""
    if (other := _other_model(config)) is not None:
        other.check_vocabulary(shape)


def _other_model(config: TrainingConfig) -> InitialWeights | None:
    """The reference or teacher of the method, if it has one."""
    match config:
        case DpoTraining(dpo=dpo):
            return InitialWeights(key="dpo.reference", folder=dpo.reference)
        case Distillation(distill=distill):
            return InitialWeights(key="distill.teacher", folder=distill.teacher)
        case _:
            return None


class ModelBuilder:
    """Builds the models. `async_rl.megatron.parallel.initialize` must have run on the thread that uses them."""

    def __init__(self, config: TrainingConfig, shape: ModelShape, device: torch.device) -> None:
        self._config, self._shape, self._device = config, shape, device
        self._dtype = parallel.resolve_dtype(device, config.learner.precision)
        self._compute = compute_options(config.learner, device, config.model.layer_spec)
        self._own = InitialWeights(key="model.folder", folder=config.model.folder)

    def build_model(self, total_updates: int) -> TrainingModel:
        config = self._config
        model = TrainingModel(
            self._shape.with_head(config.head),
            config.learner.optimizer,
            device=self._device,
            dtype=self._dtype,
            seed=config.run.seed,
            total_updates=total_updates,
            layer_spec=config.model.layer_spec,
            compute=self._compute,
        )
        self._own.load_into(model, self._dtype)
        return model

    def build_method(self) -> Method:
        match self._config:
            case DpoTraining(dpo=dpo):
                return Dpo(config=dpo, reference=self._build_frozen())
            case Distillation(distill=distill):
                return Distill(config=distill, teacher=self._build_frozen())
            case _:
                return RewardModel() if self._config.head == "scalar" else Supervised(vocab_size=self._shape.vocab_size)

    def _build_frozen(self) -> FrozenModel:
        """Build the reference or teacher; without a folder of its own, from the trained model's initial weights."""
        other = _other_model(self._config)
        initial = other.or_else(self._own) if other is not None else self._own
        model = FrozenModel(
            initial.shape(self._shape),
            device=self._device,
            dtype=self._dtype,
            seed=self._config.run.seed,
            layer_spec=self._config.model.layer_spec,
            compute=self._compute,
        )
        initial.load_into(model, self._dtype)
        return model
