"""The models of a step: the policy, and those that its objective needs.

policy       trained and pushed to workers; with a shared critic its last layer also gives values
critic       trained beside the policy, if it is a separate model
reference    frozen: the initial policy (with learner.lora the policy without its adapters), or learner.reference.folder
teacher      frozen: the model that the policy is distilled from
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from async_rl.config import Config
from async_rl.config.learner import LearnerConfig, OwnCritic, SharedCritic
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.parameters.adapters import check_lora
from async_rl.models.shape import ModelShape
from learner.model import FrozenModel, Reference, TrainingModel, check_offload, check_router_losses
from learner.model_builder import InitialWeights, ModelBuilder
from learner.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSet:
    policy: TrainingModel
    critic: TrainingModel | None = None
    reference: Reference | None = None
    teacher: FrozenModel | None = None
    cold_updates: int = 0
    """Number of first updates in which only a separate critic is trained (learner.critic.warmup_steps)."""

    @property
    def trained(self) -> dict[str, TrainingModel]:
        """The trained models by the names they have in checkpoints."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})


def check_model_set(config: Config, objective: Objective, shape: ModelShape) -> None:
    """Raise ConfigError if the objective and the `learner` section disagree about which models exist. Builds no model."""
    learner, name = config.learner, config.learner.objective
    check_lora(learner.lora, shape, config.model.layer_spec)
    check_router_losses(learner.experts, shape)
    for is_needed, is_there, key, example in (
        (objective.needs_values, learner.critic is not None, "critic", "{type: own} or {type: shared}"),
        (objective.needs_teacher, learner.teacher is not None, "teacher", "{folder: PATH}"),
        (objective.needs_reference, learner.reference.folder is not None, "reference", None),  # else the initial weights
    ):
        if is_needed and not is_there and example is not None:
            raise ConfigError(f"learner.objective: {name} needs a {key}; describe it as learner.{key}: {example}")
        if is_there and not is_needed:
            raise ConfigError(f"learner.{key}: objective {name} does not use a {key}; remove the section")
    for initial in initial_weights(learner).values():
        initial.check_vocabulary(shape)
    if config.batch.group_size == 1 and objective.needs_siblings:
        raise ConfigError(
            f"batch.group_size: objective {name} compares siblings, so that with groups of 1 all advantages are 0; raise it, "
            "or choose an objective without siblings (ppo, reinforce_pp)"
        )
    if objective.learns_from_equal_rewards and config.batch.drop_no_signal and config.batch.group_size > 1:
        raise ConfigError(
            f"batch.drop_no_signal: objective {name} learns from siblings with equal rewards too; set it to false"
        )


def build_model_set(config: Config, objective: Objective, shape: ModelShape) -> ModelSet:
    """Build all models and load their initial weights. `parallel.initialize` must have run on the same thread."""
    check_model_set(config, objective, shape)
    learner, device = config.learner, parallel.resolve_device(config.device)
    builder = ModelBuilder(config, device)
    per_step = config.batch.minibatches * config.batch.epochs
    updates = learner.steps * per_step
    cold_updates = learner.critic.warmup_steps * per_step if isinstance(learner.critic, OwnCritic) else 0
    if isinstance(learner.critic, OwnCritic):
        check_offload("learner.critic.optimizer", learner.critic.optimizer, device)
    trained = replace(shape, head="both") if isinstance(learner.critic, SharedCritic) else shape
    policy = builder.trained(builder.own, trained, learner.optimizer, total_updates=updates - cold_updates, lora=learner.lora)
    initial = initial_weights(learner)
    critic = reference = teacher = None
    if isinstance(learner.critic, OwnCritic):
        own = initial["critic"].or_else(builder.own)
        critic = builder.trained(own, own.shape(shape).with_head("scalar"), learner.critic.optimizer, total_updates=updates)
    if objective.needs_reference:
        reference = builder.reference(initial["reference"], shape, policy)
    if learner.teacher is not None:
        teacher = builder.frozen(initial["teacher"], shape)
    return ModelSet(policy=policy, critic=critic, reference=reference, teacher=teacher, cold_updates=cold_updates)


def initial_weights(learner: LearnerConfig) -> dict[str, InitialWeights]:
    """Where the models beside the policy begin."""
    critic, teacher = learner.critic, learner.teacher
    folders = {
        "critic": critic.folder if isinstance(critic, OwnCritic) else None,
        "reference": learner.reference.folder,
        "teacher": teacher.folder if teacher is not None else None,
    }
    return {name: InitialWeights(key=f"learner.{name}.folder", folder=folder) for name, folder in folders.items()}
