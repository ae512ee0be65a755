"""How rewards become advantages: first they are shaped, then somebody says how much better than expected they are."""

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
    """A penalty for answers that come near the limit, before they are cut: min(-(length - (max_length - buffer)) / buffer, 0)
    times `factor` (DAPO). An answer's length is the number of tokens sampled in its whole episode.
    """

    max_length: PositiveInt
    """Where the penalty reaches `factor`: sampling.max_tokens, where an episode is one answer."""
    buffer: PositiveInt
    """The penalty begins so many tokens before."""
    factor: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _begins_after_the_first_token(self) -> OverlongConfig:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer ({self.buffer}) must not be above max_length ({self.max_length})")
        return self


class RewardConfig(ObjectivePart):
    overlong: OverlongConfig | None = None
    train_truncated: bool = True
    """False keeps answers that a length limit cut out of the loss; their siblings are still compared with them (DAPO)."""


# -- advantages -----------------------------------------------------------------------------------------------------------


class GroupAdvantages(ObjectivePart):
    """One advantage per rollout, out of the rewards of its siblings: (reward - baseline) / scale."""

    type: Literal["group"] = "group"
    baseline: Baseline = "group_mean"
    """What a reward is compared with. `leave_one_out`: the mean of the siblings without the rollout itself (RLOO).
    `length_weighted`: their mean, each counting as many times as it has tokens (OPO). `runner_up`: the second best of the
    group, from which only the best one learns (pass@k). `batch_mean`: of all groups together."""
    scale: Scale = "group_std"
    """What the difference is divided by: the deviation of the rewards inside the group or over the batch, the group's mean
    (MaxRL; a group whose mean is not above 0 gets 0), or nothing."""
    unbiased: bool = True
    """Bessel's correction in the deviation."""
    eps: NonNegativeFloat = 1e-6
    """Added to the deviation."""
    whiten: bool = False
    """Bring what comes out to mean 0 and variance 1 over all trained tokens of the step."""

    @property
    def compares_siblings(self) -> bool:
        """Then a group without spread has advantages of 0."""
        return self.baseline not in ("batch_mean", "none") or self.scale == "group_std"


class ReturnAdvantages(ObjectivePart):
    """One advantage per token: the rewards that are still to come, without a critic (REINFORCE++)."""

    type: Literal["returns"] = "returns"
    gamma: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True
    """As above."""


class GaeAdvantages(ObjectivePart):
    """One advantage per token, out of a critic's values: generalised advantage estimation (PPO)."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    length_adaptive: PositiveFloat | None = None
    """alpha: the advantages of a sequence with n trained tokens use 1 - 1 / (alpha n) in place of `lam`, which stays that of
    the critic's returns (VAPO)."""
    whiten: bool = True
    """As above."""


class DistillationAdvantages(ObjectivePart):
    """One advantage per token: how much likelier it is to a teacher than to the policy that sampled it (on-policy
    distillation). On average that is the reverse KL divergence, with its sign turned.
    """

    type: Literal["distillation"] = "distillation"
    coefficient: PositiveFloat = 1.0
    rewards: GroupAdvantages | None = None
    """Added to it: what siblings make of the rewards. Unset, rewards count for nothing."""
    whiten: bool = False
    """As above."""


def _named(value: object) -> object:
    """The bare name of an estimator stands for it with its defaults; where none is named it is `group`."""
    if isinstance(value, str):
        return {"type": value}
    return {"type": "group"} | value if isinstance(value, dict) else value


Advantages = Annotated[
    Annotated[GroupAdvantages | ReturnAdvantages | GaeAdvantages | DistillationAdvantages, Field(discriminator="type")],
    BeforeValidator(_named),
]
