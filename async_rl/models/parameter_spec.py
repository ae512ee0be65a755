"""Name, shape and dtype of a model parameter. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A full (unsharded) parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name: "float32", "bfloat16"."""
