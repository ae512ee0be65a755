"""What one model parameter looks like to somebody who only moves its bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter at full size, whatever the layout of the ranks that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "float32", "bfloat16"."""
