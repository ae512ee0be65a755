"""The base of adapters: the weights that a run's model begins with and keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from async_rl.checkpoints.manifest import AdapterFacts
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.tensors import content_digest, load_folder
from async_rl.megatron.parameters.full_parameters import initial_value
from async_rl.megatron.parameters.table import OUTPUT, VALUE_HEAD, table
from async_rl.models.shape import ModelShape


def base_digest(folder: Path | None, shape: ModelShape, *, seed: int) -> str:
    """Digest of the base of adapters. Reads all weights of the folder. Raises ConfigError."""
    return content_digest(folder) if folder is not None else _digest_of_seed(shape, seed)


def base_weights(facts: AdapterFacts, shape: ModelShape, dtype: torch.dtype, *, folder: Path | None) -> Mapping[str, Tensor]:
    """Open the base by canonical name, in `folder` if it has moved there. Raises ConfigError if the weights are others."""
    folder = folder if folder is not None else facts.folder
    if facts.folder is None or folder is None:
        return _Random(shape, facts.seed, dtype)
    if content_digest(folder) != facts.base:
        raise ConfigError(f"model.folder: the weights in {folder} are not those that the checkpoint's adapters were trained on")
    return load_folder(folder, shape, dtype)


class _Random(Mapping[str, Tensor]):
    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype) -> None:
        self._rows = {row.name: row for row in table(shape)}
        self._seed, self._dtype = seed, dtype

    def __getitem__(self, name: str) -> Tensor:
        return initial_value(self._rows[name], self._seed).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _digest_of_seed(shape: ModelShape, seed: int) -> str:
    """Random weights follow from the seed and the table; another head is no other base."""
    rows = [(row.name, row.shape, row.initial) for row in table(shape) if row.name not in (OUTPUT, *VALUE_HEAD)]
    return xxhash.xxh3_64(repr((seed, rows)).encode()).hexdigest()
