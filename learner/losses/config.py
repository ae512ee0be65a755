"""What a loss is made of, as people write it. The variants that may stand in each place: choices.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from learner.losses.choices import (
    Aggregation,
    Cispo,
    Correction,
    Gspo,
    NoCorrection,
    ObjectivePart,
    SequenceMeanTokenMean,
    Surrogate,
    TokenMean,
    TrustMask,
    Veto,
)


class Kl(ObjectivePart):
    """A penalty towards the reference policy, over every trained token, also those that a mask or veto removed."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With D = c - q: D, D^2 / 2, exp(-D) + D - 1. On-policy, only the slope of k2 is that of the divergence by itself."""
    coefficient: NonNegativeFloat = 0.0
    unbiased: bool = False
    """Multiply by exp(c - sg(c)): the same value, and the gradient of the expectation over the current policy."""


def _listed(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _usual_aggregation(chosen: dict[str, Any]) -> Aggregation:
    return SequenceMeanTokenMean() if isinstance(chosen.get("surrogate"), Gspo) else TokenMean()


class PolicyLossConfig(ObjectivePart):
    surrogate: Surrogate = Cispo()
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """Whose probability the ratio divides by: the policy that sampled the token, or the one before this optimizer step."""
    proximal_source: Literal["recompute", "loglinear"] = "recompute"
    """With `anchor: proximal`: one more forward pass, or none and a point between the sampling and the current
    log-probability, as if the policy had moved evenly from version to version: at age a, (a - 1) / a of the way.
    """
    correction: Correction = NoCorrection()
    """The weight that leads from the sampling to the proximal policy."""
    aggregation: Aggregation = Field(default_factory=_usual_aggregation)
    """A mean over tokens; `sequence_mean_token_mean` with `gspo`."""
    trust_mask: Annotated[tuple[TrustMask, ...], BeforeValidator(_listed)] = ()
    """One, or a list: a token stays if all of them keep it."""
    veto: Veto | None = None
    kl: Kl = Kl()
    entropy_coefficient: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _what_belongs_to_the_proximal_policy(self) -> PolicyLossConfig:
        if self.anchor == "behaviour" and not isinstance(self.correction, NoCorrection):
            raise ValueError(
                "correction leads from the sampling to the proximal policy, and with anchor: behaviour the ratio does so "
                "already; set anchor: proximal or correction: none"
            )
        if self.anchor == "behaviour" and self.proximal_source == "loglinear":
            raise ValueError("proximal_source: loglinear says where the proximal policy comes from; set anchor: proximal")
        return self


class ValueLossConfig(ObjectivePart):
    """max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2) / 2, mean over the trained tokens"""

    clip: PositiveFloat | None = 0.2
    """How far a value may move in a step and still follow its gradient; `null`: as far as it likes."""
