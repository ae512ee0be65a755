"""The `rewards` and `advantages` sections of an objective: reward shaping, then the estimator of advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from learner.advantages.group import Baseline, Scale
from learner.losses.choices import ObjectivePart

# -- rewards --------------------------------------------------------------------------------------------------------------


class OverlongConfig(ObjectivePart):
    """A penalty for answers close to the length limit: min(-(length - (max_length - buffer)) / buffer, 0)
    times `factor` (DAPO). An answer's length is the number of tokens sampled in its whole episode.
    """

    max_length: PositiveInt
    """Where the penalty reaches `factor`: sampling.max_tokens, where an episode is one answer."""
    buffer: PositiveInt
    """The penalty begins this many tokens before max_length."""
    factor: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _begins_after_the_first_token(self) -> OverlongConfig:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer ({self.buffer}) must not be above max_length ({self.max_length})")
        return self


class RewardConfig(ObjectivePart):
    overlong: OverlongConfig | None = None
    train_truncated: bool = True
    """false: answers cut by a length limit are left out of the loss, but still count in the baseline of their group (DAPO)."""


# -- advantages -----------------------------------------------------------------------------------------------------------


class GroupAdvantages(ObjectivePart):
    """One advantage per rollout, from the rewards of its group: (reward - baseline) / scale."""

    type: Literal["group"] = "group"
    baseline: Baseline = "group_mean"
    """Subtracted from a reward. `group_mean`: mean of the group. `leave_one_out`: mean of its other rollouts (RLOO).
    `length_weighted`: mean of the group weighted by tokens (OPO). `runner_up`: the second best reward, so that only the best
    rollout is trained (pass@k). `batch_mean`: mean over all groups. `none`: 0."""
    scale: Scale = "group_std"
    """Divides the difference: `group_std` or `batch_std`, the standard deviation in the group or the batch; `group_mean`, the
    group's mean (MaxRL; a group with a mean of 0 or below gets 0); `none`."""
    unbiased: bool = True
    """Use Bessel's correction (n - 1) in the standard deviation."""
    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""
    whiten: bool = False
    """Normalise the advantages to mean 0 and variance 1 over all trained tokens of the step."""

    @property
    def compares_siblings(self) -> bool:
        """Whether a group with equal rewards has advantages of 0."""
        return self.baseline not in ("batch_mean", "none") or self.scale == "group_std"


class ReturnAdvantages(ObjectivePart):
    """One advantage per token: the discounted sum of later rewards, without a critic (REINFORCE++)."""

    type: Literal["returns"] = "returns"
    gamma: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True
    """Normalise the advantages to mean 0 and variance 1 over all trained tokens of the step."""


class GaeAdvantages(ObjectivePart):
    """One advantage per token from a critic's values: generalised advantage estimation (PPO)."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    length_adaptive: PositiveFloat | None = None
    """alpha: advantages of a sequence with n trained tokens use lambda = 1 - 1 / (alpha n); `lam` is still used for the
    critic's returns (VAPO). Unset: `lam` for both."""
    whiten: bool = True
    """Normalise the advantages to mean 0 and variance 1 over all trained tokens of the step."""


class DistillationAdvantages(ObjectivePart):
    """One advantage per token: log-probability under a teacher minus that under the behaviour policy (on-policy
    distillation). Its mean is the negative reverse KL divergence.
    """

    type: Literal["distillation"] = "distillation"
    coefficient: PositiveFloat = 1.0
    """Factor on the distillation advantages."""
    rewards: GroupAdvantages | None = None
    """Group advantages of the rewards, added to those of the teacher. Unset: rewards are ignored."""
    whiten: bool = False
    """Normalise the advantages to mean 0 and variance 1 over all trained tokens of the step."""


class PreferenceAdvantages(ObjectivePart):
    """A preference loss between the best and the worst rollout of each group, as advantages that have its gradient; the others
    are not trained. With d = log-probability of a rollout under the policy before the step minus under the reference:
    sigmoid: -log sigmoid(beta (d_best - d_worst)), ipo: (d_best - d_worst - 1 / (2 beta))^2
    """

    type: Literal["preference"] = "preference"
    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    """Strength of the regularisation towards the reference; lower allows larger deviation."""


def _named(value: object) -> object:
    """Accept the name of an estimator for its defaults; without a `type` it is `group`."""
    if isinstance(value, str):
        return {"type": value}
    return {"type": "group"} | value if isinstance(value, dict) else value


Advantages = Annotated[
    Annotated[
        GroupAdvantages | ReturnAdvantages | GaeAdvantages | DistillationAdvantages | PreferenceAdvantages,
        Field(discriminator="type"),
    ],
    BeforeValidator(_named),
]
