"""Evaluators' results on the board, for the learner, which alone writes the run's metrics."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter

from async_rl.types import VersionRecord

EVALUATIONS = "evaluations"
"""The board's topic."""


class EvaluationDone(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    record: VersionRecord
    """The weights that were evaluated."""
    metrics: dict[str, float]
    """eval/{environment}/{measure}"""


EVALUATION_MESSAGES: TypeAdapter[EvaluationDone] = TypeAdapter(EvaluationDone)
