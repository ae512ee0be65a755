"""The trained model, and the reference or teacher of its method."""

from __future__ import annotations

import torch

from async_rl.config.training import Distillation, DistillSection, DpoSection, DpoTraining, TrainingConfig
from async_rl.megatron.parameters.adapters import check_lora
from async_rl.models.shape import ModelShape
from async_rl.supervision import working
from learner.model import TrainingModel, check_router_losses
from learner.model_builder import InitialWeights, ModelBuilder
from learner.training.methods import Distill, Dpo, Method, RewardModel, Supervised


def check(config: TrainingConfig, shape: ModelShape) -> None:
    """Raise ConfigError if the model cannot be trained so, or reference or teacher has another vocabulary. Builds nothing."""
    check_lora(config.learner.lora, shape, config.model.layer_spec)
    check_router_losses(config.learner.experts, shape)
    if (frozen := frozen_weights(config)) is not None:
        frozen.check_vocabulary(shape)


def frozen_weights(config: TrainingConfig) -> InitialWeights | None:
    """The weights of the reference or the teacher, or None."""
    match config:
        case DpoTraining(dpo=dpo):
            return _reference(dpo)
        case Distillation(distill=distill):
            return _teacher(distill)
        case _:
            return None


@working("the construction of the models")
def build_models(
    config: TrainingConfig, shape: ModelShape, device: torch.device, *, total_updates: int
) -> tuple[TrainingModel, Method]:
    """Build the trained model, and the method with its reference or teacher."""
    builder = ModelBuilder(config, device)
    learner = config.learner
    model = builder.trained(
        builder.own, shape.with_head(config.head), learner.optimizer, total_updates=total_updates, lora=learner.lora
    )
    match config:
        case DpoTraining(dpo=dpo):
            method = Dpo(config=dpo, reference=builder.reference(_reference(dpo), shape, model))
        case Distillation(distill=distill):
            method = Distill(config=distill, teacher=builder.frozen(_teacher(distill), shape))
        case _:
            method = RewardModel() if config.head == "scalar" else Supervised()
    return model, method


def _reference(dpo: DpoSection) -> InitialWeights:
    return InitialWeights(key="dpo.reference", folder=dpo.reference.place if dpo.reference is not None else None)


def _teacher(distill: DistillSection) -> InitialWeights:
    return InitialWeights(key="distill.teacher", folder=distill.teacher.place)
