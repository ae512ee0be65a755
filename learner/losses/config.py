"""The `policy_loss` and `value_loss` sections of an objective. The variants of each part: choices.py."""

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
    """KL penalty towards the reference policy, over every trained token, including those removed by a mask or veto."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With D = c - q: D, D^2 / 2, exp(-D) + D - 1. On-policy, only k2 has the gradient of the divergence without `unbiased`."""
    coefficient: NonNegativeFloat = 0.0
    unbiased: bool = False
    """Multiply by exp(c - sg(c)): same value, with the gradient of the expectation under the current policy."""


def _listed(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _usual_aggregation(chosen: dict[str, Any]) -> Aggregation:
    return SequenceMeanTokenMean() if isinstance(chosen.get("surrogate"), Gspo) else TokenMean()


class PolicyLossConfig(ObjectivePart):
    surrogate: Surrogate = Cispo()
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the ratio: the behaviour policy (which sampled the token), or that before this step's first update."""
    proximal_source: Literal["recompute", "loglinear"] = "recompute"
    """With `anchor: proximal`: `recompute` runs one more forward pass; `loglinear` interpolates between the behaviour and the
    current log-probability, at (a - 1) / a for a token of age a, which assumes an even change per version.
    """
    correction: Correction = NoCorrection()
    """Importance weight from the behaviour to the proximal policy. Needs anchor: proximal."""
    aggregation: Aggregation = Field(default_factory=_usual_aggregation)
    """How token losses are averaged. Default: token_mean; sequence_mean_token_mean with gspo."""
    trust_mask: Annotated[tuple[TrustMask, ...], BeforeValidator(_listed)] = ()
    """One mask or a list; a token is trained only if every mask keeps it."""
    veto: Veto | None = None
    """Remove sequences with a token that became very unlikely. Unset: off."""
    kl: Kl = Kl()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Subtract this many times the mean entropy from the loss. 0: off."""

    @model_validator(mode="after")
    def _what_belongs_to_the_proximal_policy(self) -> PolicyLossConfig:
        if self.anchor == "behaviour" and not isinstance(self.correction, NoCorrection):
            raise ValueError(
                "correction weighs the proximal against the behaviour policy, which with anchor: behaviour the ratio already "
                "does; set anchor: proximal or correction: none"
            )
        if self.anchor == "behaviour" and self.proximal_source == "loglinear":
            raise ValueError("proximal_source: loglinear is for a proximal policy; set anchor: proximal")
        return self


class ValueLossConfig(ObjectivePart):
    """max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2) / 2, mean over the trained tokens"""

    clip: PositiveFloat | None = 0.2
    """Clip range of the change of a value within a step. `null`: no clipping."""
