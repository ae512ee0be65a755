"""How the learner's ranks are divided. A checkpoint belongs to one layout."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Layout(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"
