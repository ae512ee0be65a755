"""The choices a policy loss is made of. What is not listed here is refused by name.

Every variant is an object with a `type`; the bare name of a variant stands for it with its defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

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


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PpoClip(_Choice):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)"""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: NonNegativeFloat = 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the loss of a token is at most this many times -A."""


class Cispo(_Choice):
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


class Reinforce(_Choice):
    """-A c"""

    type: Literal["reinforce"] = "reinforce"


class Importance(_Choice):
    """-r A, without any bound."""

    type: Literal["importance"] = "importance"


class TokenMean(_Choice):
    type: Literal["token_mean"] = "token_mean"


class SequenceMeanTokenMean(_Choice):
    type: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class SequenceMeanTokenSum(_Choice):
    type: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"


class SequenceSumNorm(_Choice):
    """Sum of tokens, divided by the number of sequences times a constant (Dr. GRPO)."""

    type: Literal["sequence_sum_norm"] = "sequence_sum_norm"
    length: PositiveInt


class PromptMean(_Choice):
    """Mean over the groups of the mean over a group's tokens."""

    type: Literal["prompt_mean"] = "prompt_mean"


class TotalVariationMask(_Choice):
    """Drops tokens whose probability already moved this far from the behaviour policy, in the advantage's direction."""

    type: Literal["tv"] = "tv"
    high: PositiveFloat = 0.2
    low: PositiveFloat = 0.2


class Veto(_Choice):
    """One token whose probability fell below `min_ratio` times the behaviour policy's removes its whole sequence."""

    min_ratio: PositiveFloat = 1e-4


class Kl(_Choice):
    """A penalty towards the reference policy, over every trained token, also those that a mask or veto removed."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    coefficient: NonNegativeFloat = 0.0
    unbiased: bool = False
    """Multiply by exp(c - sg(c)): the same value, and the gradient of the expectation over the current policy."""


def _named(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Surrogate = Annotated[Annotated[PpoClip | Cispo | Reinforce | Importance, Field(discriminator="type")], BeforeValidator(_named)]
Aggregation = Annotated[
    Annotated[
        TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | SequenceSumNorm | PromptMean, Field(discriminator="type")
    ],
    BeforeValidator(_named),
]
TrustMask = Annotated[TotalVariationMask, BeforeValidator(_named)]


class PolicyLossConfig(_Choice):
    surrogate: Surrogate = Cispo()
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """Whose probability the ratio divides by: the policy that sampled the token, or the one before this optimizer step."""
    aggregation: Aggregation = TokenMean()
    trust_mask: TrustMask | None = None
    veto: Veto | None = None
    kl: Kl = Kl()
    entropy_coefficient: NonNegativeFloat = 0.0
