"""Converts tensors between Hugging Face folders and full parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.names import Merge, names
from async_rl.megatron.parameters.full_parameters import initial_value
from async_rl.megatron.parameters.table import table
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import ModelShape
from async_rl.models.stored_weights import StoredWeights


def from_canonical(ours: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    return dict(huggingface_tensors(ours, shape))


def huggingface_tensors(ours: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder with their names, one of `ours` after the other."""
    for name in names(shape):
        yield from zip(name.theirs, _divide(ours[name.ours], name.merge, shape), strict=True)


def load_folder(folder: Path, shape: ModelShape, dtype: torch.dtype) -> StoredWeights:
    """Open the weights of a folder by canonical name. Raises ConfigError naming what is missing or does not fit.

    A value head gets initial weights.
    """
    return _Folder(folder, shape, dtype)


def content_digest(folder: Path) -> str:
    """Digest of the weights in a folder, however they are divided into files. Reads all of them. Raises ConfigError."""
    names = sorted(sizes_of(read_shape(folder)))
    files, digest = _open(folder, {*names}), xxhash.xxh3_64()
    for name in names:
        tensor: Tensor = files[name].get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _Folder(StoredWeights):
    def __init__(self, folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._rows = {row.name: row for row in table(shape)}
        self._names = {name.ours: name for name in names(shape)}
        sizes = sizes_of(shape)
        self._files = _open(folder, set(sizes))
        for part, wanted in sizes.items():
            if (found := tuple(self._files[part].get_slice(part).get_shape())) != wanted:
                raise ConfigError(
                    f"the weights in {folder} contradict its config.json: {part} has shape {found} instead of {wanted}"
                )

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: row.shape for name, row in self._rows.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            return initial_value(self._rows[name], seed=0).to(self._dtype)
        own = self._names[name]
        return _merge([self._files[part].get_tensor(part).to(self._dtype) for part in own.theirs], own.merge, self._shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def sizes_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes of a folder's tensors by name."""
    ours = {row.name: torch.empty(row.shape, device="meta") for row in table(shape)}
    return {part: tuple(tensor.shape) for part, tensor in from_canonical(ours, shape).items()}


def _open(folder: Path, missing: set[str]) -> dict[str, Any]:
    """The open file of each tensor. Raises ConfigError."""
    found: dict[str, Any] = {}
    for path in _files(folder):
        try:
            opened: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        found |= dict.fromkeys(missing & set(opened.keys()), opened)
    if missing := missing - found.keys():
        raise ConfigError(f"{folder} lacks {len(missing)} tensors, the first is {min(missing)}")
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} does not say which file has which tensor: {error}") from error


def _merge(parts: list[Tensor], merge: Merge, shape: ModelShape) -> Tensor:
    if merge is Merge.SAME:
        return parts[0]
    if merge is Merge.STACKED:
        return torch.cat(parts)
    by_group = [part.view(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _divide(whole: Tensor, merge: Merge, shape: ModelShape) -> list[Tensor]:
    if merge is Merge.SAME:
        return [whole]
    if merge is Merge.STACKED:
        return list(whole.chunk(2))
    by_group = whole.view(shape.kv_heads, -1, *whole.shape[1:])
    queries = shape.heads // shape.kv_heads * shape.head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, shape.head_dim, shape.head_dim], dim=1)]
