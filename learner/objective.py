"""The objective of a run: how rewards become advantages, and the loss they enter. A preset, a YAML file, or Python code."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, InstanceOf, NonNegativeFloat, model_validator

from async_rl.config.loading import load_file, shipped_configs
from async_rl.errors import ConfigError
from async_rl.imports.references import load_reference
from learner.advantages.config import (
    Advantages,
    DistillationAdvantages,
    GaeAdvantages,
    GroupAdvantages,
    PreferenceAdvantages,
    ReturnAdvantages,
    RewardConfig,
)
from learner.losses.choices import ObjectivePart
from learner.losses.config import PolicyLossConfig, ValueLossConfig
from learner.losses.custom import OwnLoss
from learner.losses.functions import Loss, policy_loss


def _own_loss(given: object) -> OwnLoss:
    try:
        return OwnLoss.of(given)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class Objective(ObjectivePart):
    rewards: RewardConfig = RewardConfig()
    advantages: Advantages = GroupAdvantages()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    own_loss: Annotated[InstanceOf[OwnLoss], BeforeValidator(_own_loss)] | None = None
    """A loss function used instead of policy_loss, `package.module:function` or `path/to/file.py:function`."""
    value_loss: ValueLossConfig | None = None
    """The critic's loss. Required with advantages of type `gae`, refused with others."""
    kl_in_reward: NonNegativeFloat = 0.0
    """beta: subtract beta (b - q) from each trained token's reward, where b and q are its log-probabilities under the behaviour
    policy and under the reference. Needs advantages of type returns or gae; with others set policy_loss.kl. 0: off."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Objective:
        if self.own_loss is not None and "policy_loss" in self.model_fields_set:
            raise ValueError("own_loss replaces policy_loss; remove one of them")
        if self.needs_values and self.value_loss is None:
            raise ValueError("advantages of type gae need a critic, which is trained with value_loss; add `value_loss: {}`")
        if self.value_loss is not None and not self.needs_values:
            raise ValueError("value_loss trains a critic, and only advantages of type gae have one; remove it")
        if self.kl_in_reward > 0 and not isinstance(self.advantages, ReturnAdvantages | GaeAdvantages):
            raise ValueError(
                "kl_in_reward needs advantages of type returns or gae; with others, set policy_loss.kl.coefficient"
            )
        return self

    # -- what the learner must provide --------------------------------------------------------------------------------------

    @property
    def learns_from_equal_rewards(self) -> bool:
        """A group with equal rewards has advantages that are not 0."""
        return not isinstance(self.advantages, GroupAdvantages | PreferenceAdvantages)

    @property
    def has_rollout_advantages(self) -> bool:
        """All tokens of a rollout have the same advantage."""
        return isinstance(self.advantages, GroupAdvantages)

    @property
    def compares_pairs(self) -> bool:
        """The best and the worst rollout of a group are compared by their log-probabilities before the step."""
        return isinstance(self.advantages, PreferenceAdvantages)

    @property
    def of_siblings(self) -> GroupAdvantages | None:
        """The config of the advantages that compare the rewards of a group, or None."""
        match self.advantages:
            case GroupAdvantages() as of_siblings:
                return of_siblings
            case DistillationAdvantages(rewards=of_siblings):
                return of_siblings
            case _:
                return None

    @property
    def needs_siblings(self) -> bool:
        """A group of one rollout would have nothing to train on: its advantage is 0, and the loss uses advantages."""
        config, uses_advantages = self.advantages, self.own_loss is None or self._own_loss_takes("advantages")
        return self.compares_pairs or (isinstance(config, GroupAdvantages) and config.compares_siblings and uses_advantages)

    @property
    def needs_teacher(self) -> bool:
        return isinstance(self.advantages, DistillationAdvantages)

    @property
    def needs_values(self) -> bool:
        return isinstance(self.advantages, GaeAdvantages)

    @property
    def needs_reference(self) -> bool:
        has_penalty = self.policy_loss.kl.coefficient > 0 or self.kl_in_reward > 0
        return has_penalty or self.compares_pairs or self._own_loss_takes("reference")

    @property
    def needs_proximal(self) -> bool:
        """Whether log-probabilities under the policy before the step's first update are computed."""
        recomputed = self.policy_loss.anchor == "proximal" and self.policy_loss.proximal_source == "recompute"
        return recomputed or self.compares_pairs or self._own_loss_takes("proximal")

    @property
    def needs_entropy(self) -> bool:
        return self.policy_loss.entropy_coefficient > 0 or self._own_loss_takes("entropy")

    @property
    def loss(self) -> Callable[..., Loss]:
        """The loss function of one packed row, called with the arguments of custom.ARGUMENTS; those not needed are None."""
        return self.own_loss if self.own_loss is not None else partial(policy_loss, self.policy_loss)

    def _own_loss_takes(self, argument: str) -> bool:
        return self.own_loss is not None and argument in self.own_loss.takes


def load_objective(name: str) -> Objective:
    """Load `learner.objective`: the name of a preset, the path of a .yaml file, or `module:name` of an Objective or a loss.

    Raises ConfigError.
    """
    try:
        return _read(name)
    except ConfigError as error:
        raise ConfigError(f"learner.objective: {error}") from error


def _read(name: str) -> Objective:
    if name.endswith((".yaml", ".yml")):
        return load_file(Objective, Path(name))
    if name.endswith(".py"):
        raise ConfigError(f"{name} holds code; name the object in it: {name}:NAME")
    if ":" not in name:
        return load_file(Objective, _preset(name))
    found = load_reference(name)
    return found if isinstance(found, Objective) else Objective(own_loss=OwnLoss.of(name))


def presets_folder() -> Path:
    return shipped_configs() / "objectives"


def preset_names() -> list[str]:
    return sorted(path.stem for path in presets_folder().glob("*.yaml"))


def _preset(name: str) -> Path:
    known = preset_names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"no preset {name!r}; {hint} (your own: FILE.yaml, package.module:NAME or path/to/file.py:NAME)")
    return presets_folder() / f"{name}.yaml"
