"""Reads headers of safetensors files, and divides tensors among files. No torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
_MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""


class InvalidSafetensors(Exception):
    """A file is missing, truncated or not a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    shape: tuple[int, ...]
    dtype: str
    """torch's name, or the file's if torch has no such dtype."""
    bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def tensors_of(path: Path) -> dict[str, TensorFacts]:
    """Read the header of a file. Raises InvalidSafetensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise InvalidSafetensors(f"{path} is not a safetensors file")
            header: dict[str, Any] = json.loads(file.read(length))
        return {name: _facts(entry) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise InvalidSafetensors(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSafetensors(f"{path} is not a safetensors file") from error


def _facts(entry: dict[str, Any]) -> TensorFacts:
    start, stop = entry["data_offsets"]
    return TensorFacts(
        shape=tuple(entry["shape"]), dtype=TORCH_NAMES.get(entry["dtype"], str(entry["dtype"])), bytes=stop - start
    )


def divide(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide tensors, in order, into files of at most `most` bytes; a larger tensor gets a file of its own."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts
