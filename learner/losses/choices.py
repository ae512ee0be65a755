"""The variants of each part of a policy loss.

Every variant is an object with a `type`; the bare name of a variant selects it with its defaults. In the formulas r is the
ratio against the anchor, rho the ratio against the behaviour policy, w = exp(p - b) the ratio between these two, A the
advantage, c the current log-probability, sg() stop-gradient (see functions.py).
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
    """Base class of all sections of an objective."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# -- surrogates ---------------------------------------------------------------------------------------------------------


class PpoClip(ObjectivePart):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)"""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: NonNegativeFloat = 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages, bound a token's loss by this many times -A. null: no bound."""


class Gspo(ObjectivePart):
    """PPO's clip on one ratio per sequence: the geometric mean over its trained tokens."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    clip_high: NonNegativeFloat = 4e-4


class Cispo(ObjectivePart):
    """-sg(clip(r, floor, cap)) A c: every token keeps its gradient, with a weight of at most `cap`."""

    type: Literal["cispo"] = "cispo"
    cap: PositiveFloat = 5.0
    """Upper bound of the ratio itself, not 1 + epsilon."""
    floor: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> Cispo:
        if self.floor >= self.cap:
            raise ValueError(f"floor ({self.floor}) must be below cap ({self.cap})")
        return self


class Dppo(ObjectivePart):
    """-r A for tokens inside a trust region around the behaviour policy, 0 outside."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Measured between this token and all others: difference in probability, or binary KL(behaviour || current)."""
    high: PositiveFloat = 0.2
    """Bound for tokens with a positive advantage that became more likely."""
    low: PositiveFloat = 0.2
    """Bound for the other tokens that became less likely."""


class Sapo(ObjectivePart):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft clip. The slope equals that of r A at r = 1 and fades on both sides."""

    type: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """tau for advantages that are not positive."""


class Topr(ObjectivePart):
    """-A c for positive advantages, else -sg(min(r, cap)) A c: good samples have full weight, however unlikely they became."""

    type: Literal["topr"] = "topr"
    cap: PositiveFloat = 1.0


class Reinforce(ObjectivePart):
    """-A c"""

    type: Literal["reinforce"] = "reinforce"


class Importance(ObjectivePart):
    """-r A, unbounded."""

    type: Literal["importance"] = "importance"


# -- corrections: from the behaviour policy to the proximal one ------------------------------------------------------


class _Interval(ObjectivePart):
    low: NonNegativeFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class NoCorrection(ObjectivePart):
    """Weight 1: the difference between the two policies is ignored."""

    type: Literal["none"] = "none"


class Truncate(_Interval):
    """clip(w, low, high)"""

    type: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    """`token`: clip each w. `sequence`: clip the product over the sequence's trained tokens and apply it to each of them."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0


class Mask(_Interval):
    """w if low <= w <= high, else 0 (IcePop)."""

    type: Literal["mask"] = "mask"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0


class SequenceMask(_Interval):
    """Keep sequences with low <= statistic <= high. The bounds have no defaults because they depend on the statistic."""

    type: Literal["sequence_mask"] = "sequence_mask"
    statistic: Literal["geometric", "product"] = "geometric"
    """Geometric mean of w over the sequence's trained tokens (bounds near 1, such as 0.99 and 1.01), or their product."""
    weight: Literal["raw", "statistic", "one"] = "raw"
    """Weight of the kept tokens: their own w, the statistic of the sequence, or 1."""


# -- what removes tokens that are too far from the policy that sampled --------------------------------------------------


class TotalVariationMask(ObjectivePart):
    """Remove tokens whose probability already moved this far from the behaviour policy in the advantage's direction."""

    type: Literal["tv"] = "tv"
    high: PositiveFloat = 0.2
    low: PositiveFloat = 0.2


class OffPolicySequenceMask(ObjectivePart):
    """Remove tokens with a negative advantage in sequences whose mean of b - c is above `delta`."""

    type: Literal["off_policy_sequence_mask"] = "off_policy_sequence_mask"
    delta: PositiveFloat


class Veto(ObjectivePart):
    """Remove a whole sequence if one token's rho is below `min_ratio`."""

    min_ratio: float = Field(default=1e-4, gt=0, lt=1)


# -- aggregations -------------------------------------------------------------------------------------------------------


class TokenMean(ObjectivePart):
    """Mean over all trained tokens."""

    type: Literal["token_mean"] = "token_mean"


class SequenceMeanTokenMean(ObjectivePart):
    """Mean over sequences of the mean over their tokens."""

    type: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class SequenceMeanTokenSum(ObjectivePart):
    """Mean over sequences of the sum over their tokens."""

    type: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"


class SequenceSumNorm(ObjectivePart):
    """Sum of tokens, divided by the number of sequences times a constant (Dr. GRPO)."""

    type: Literal["sequence_sum_norm"] = "sequence_sum_norm"
    length: PositiveInt


class PromptMean(ObjectivePart):
    """Mean over the groups of the mean over a group's tokens."""

    type: Literal["prompt_mean"] = "prompt_mean"


# -- unions ----------------------------------------------------------------------------------------------------


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
