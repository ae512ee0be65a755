"""What may stand in each place of a policy loss. What is not listed here is refused by name.

Every variant is an object with a `type`; the bare name of a variant stands for it with its defaults. In the formulas r is
the ratio against the anchor, rho the one against the policy that sampled, w = exp(p - b) what lies between these two, A the
advantage, c the log-probability, sg() what passes no gradient (see functions.py).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


class ObjectivePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# -- surrogates ---------------------------------------------------------------------------------------------------------


class PpoClip(ObjectivePart):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)"""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: NonNegativeFloat = 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the loss of a token is at most this many times -A."""


class Gspo(ObjectivePart):
    """PPO's clip on one ratio for the whole sequence: the geometric mean of those of its trained tokens."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    clip_high: NonNegativeFloat = 4e-4


class Cispo(ObjectivePart):
    """-sg(clip(r, floor, cap)) A c: every token keeps its gradient, none counts for more than `cap`."""

    type: Literal["cispo"] = "cispo"
    cap: PositiveFloat = 5.0
    """Absolute, not 1 + epsilon."""
    floor: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> Cispo:
        if self.floor >= self.cap:
            raise ValueError(f"floor ({self.floor}) must be below cap ({self.cap})")
        return self


class Dppo(ObjectivePart):
    """-r A on tokens within a trust region around the policy that sampled, nothing outside; no other bound."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Of the two-way choice between this token and any other: the difference in probability, or KL(behaviour || current)."""
    high: PositiveFloat = 0.2
    """Where the advantage is positive and the token became more likely."""
    low: PositiveFloat = 0.2
    """Where the advantage is not positive and the token became less likely."""


class Sapo(ObjectivePart):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft clip. Its slope is that of r A where r = 1 and fades on both sides."""

    type: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """Where the advantage is not positive: what is pushed down fades a little faster."""


class Topr(ObjectivePart):
    """-A c where the advantage is positive, else -sg(min(r, cap)) A c: good samples count in full, however unlikely now."""

    type: Literal["topr"] = "topr"
    cap: PositiveFloat = 1.0


class Reinforce(ObjectivePart):
    """-A c"""

    type: Literal["reinforce"] = "reinforce"


class Importance(ObjectivePart):
    """-r A, without any bound."""

    type: Literal["importance"] = "importance"


# -- corrections: from the policy that sampled to the proximal one ------------------------------------------------------


class _Interval(ObjectivePart):
    low: NonNegativeFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class NoCorrection(ObjectivePart):
    """1: whatever lies between the two policies is ignored."""

    type: Literal["none"] = "none"


class Truncate(_Interval):
    """clip(w, low, high)"""

    type: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product of the w of its trained tokens is clipped, and weighs each of them."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0


class Mask(_Interval):
    """w where low <= w <= high, else 0 (IcePop)."""

    type: Literal["mask"] = "mask"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0


class SequenceMask(_Interval):
    """A sequence stays where low <= statistic <= high; the bounds have no defaults, because they depend on the statistic."""

    type: Literal["sequence_mask"] = "sequence_mask"
    statistic: Literal["geometric", "product"] = "geometric"
    """Mean of the w of the sequence's trained tokens (bounds near 1: 0.99 and 1.01), or their product."""
    weight: Literal["raw", "statistic", "one"] = "raw"
    """Of the tokens that stay: their own w, the statistic of their sequence, or 1."""


# -- what removes tokens that are too far from the policy that sampled --------------------------------------------------


class TotalVariationMask(ObjectivePart):
    """Drops tokens whose probability already moved this far from the behaviour policy, in the advantage's direction."""

    type: Literal["tv"] = "tv"
    high: PositiveFloat = 0.2
    low: PositiveFloat = 0.2


class OffPolicySequenceMask(ObjectivePart):
    """Drops the tokens with a negative advantage of sequences that became unlikely: mean of b - c beyond `delta`."""

    type: Literal["off_policy_sequence_mask"] = "off_policy_sequence_mask"
    delta: PositiveFloat


class Veto(ObjectivePart):
    """One token whose probability fell below `min_ratio` times the behaviour policy's removes its whole sequence."""

    min_ratio: float = Field(default=1e-4, gt=0, lt=1)


# -- aggregations -------------------------------------------------------------------------------------------------------


class TokenMean(ObjectivePart):
    type: Literal["token_mean"] = "token_mean"


class SequenceMeanTokenMean(ObjectivePart):
    type: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class SequenceMeanTokenSum(ObjectivePart):
    type: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"


class SequenceSumNorm(ObjectivePart):
    """Sum of tokens, divided by the number of sequences times a constant (Dr. GRPO)."""

    type: Literal["sequence_sum_norm"] = "sequence_sum_norm"
    length: PositiveInt


class PromptMean(ObjectivePart):
    """Mean over the groups of the mean over a group's tokens."""

    type: Literal["prompt_mean"] = "prompt_mean"


# -- in their places ----------------------------------------------------------------------------------------------------


def _named(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


_ByType, _ByName = Field(discriminator="type"), BeforeValidator(_named)
Surrogate = Annotated[
    Annotated[PpoClip | Gspo | Cispo | Dppo | Sapo | Topr | Reinforce | Importance, _ByType],
    _ByName,
]
Correction = Annotated[Annotated[NoCorrection | Truncate | Mask | SequenceMask, _ByType], _ByName]
TrustMask = Annotated[Annotated[TotalVariationMask | OffPolicySequenceMask, _ByType], _ByName]
Aggregation = Annotated[
    Annotated[TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | SequenceSumNorm | PromptMean, _ByType],
    _ByName,
]
