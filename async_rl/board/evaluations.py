"""Evaluators' results on the board, for the learner, which alone writes the run's metrics."""

from __future__ import annotations

from async_rl.board.inbox import BoardMessage
from async_rl.types import VersionRecord

EVALUATIONS = "evaluations"
"""The board's topic."""


class EvaluationDone(BoardMessage):
    record: VersionRecord
    """The weights that were evaluated."""
    metrics: dict[str, float]
    """eval/{environment}/{measure}"""
