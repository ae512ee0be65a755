"""Reads Megatron-LM's checkpoints of format torch_dist: torch's distributed checkpoints with Megatron-LM's arguments."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from async_rl.errors import ConfigError
from async_rl.megatron import host
from async_rl.megatron.parameters.table import EMBEDDING, OUTPUT, Parameter, table
from async_rl.megatron.torch_dist.keys import Place, places
from async_rl.models.shape import ModelShape

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""The tracker's word for a checkpoint without optimizer state."""
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
"""Contents of metadata.json."""
_COMMON = "common_state/shard_0_1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpoint:
    folder: Path
    arguments: Mapping[str, Any]
    """Megatron-LM's arguments; empty if it has none."""
    iteration: int | None
    sizes: Mapping[str, tuple[int, ...]]
    """Shapes of its tensors by key, with optimizer state."""
    dtypes: Mapping[str, torch.dtype]

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, with padding."""
        return self._embedding()[0]

    @property
    def dtype(self) -> torch.dtype:
        self._embedding()
        return self.dtypes[EMBEDDING]

    def _embedding(self) -> tuple[int, ...]:
        if (sizes := self.sizes.get(EMBEDDING)) is None:
            raise ConfigError(f"{self.folder} has no {EMBEDDING}: it is no checkpoint of a GPT model of Megatron-LM")
        return sizes


def open_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Open a checkpoint, by its own folder or the one that has its tracker file. Raises ConfigError.

    Such checkpoints are pickles: those of strangers can run code.
    """
    folder = _newest(folder)
    _check_format(folder)
    try:
        with host.quiet():
            known = FileSystemReader(folder).read_metadata().state_dict_metadata
        common = _common(folder, known)
    except CheckpointException as error:
        raise ConfigError(f"{folder} cannot be read: {first_failure(error)}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes mean
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    facts = {key: each for key, each in known.items() if isinstance(each, TensorStorageMetadata)}
    arguments, iteration = common.get("args"), common.get("iteration")
    return MegatronCheckpoint(
        folder=folder,
        arguments=vars(arguments) if isinstance(arguments, argparse.Namespace | SimpleNamespace) else {},
        iteration=iteration if isinstance(iteration, int) else None,
        sizes={key: tuple(each.size) for key, each in facts.items()},
        dtypes={key: each.properties.dtype for key, each in facts.items()},
    )


def _newest(folder: Path) -> Path:
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    word = tracker.read_text().strip()
    if word != RELEASE and not word.isdigit():
        raise ConfigError(f"{tracker} names no checkpoint: {word!r} is neither a number nor `{RELEASE}`")
    found = folder / (RELEASE if word == RELEASE else f"iter_{int(word):07d}")
    if not found.is_dir():
        raise ConfigError(f"{tracker} names {found.name}, which is not there; name another checkpoint by its own folder")
    return found


def _check_format(folder: Path) -> None:
    if any(folder.glob("mp_rank_0*")):
        raise ConfigError(
            f"{folder} is a checkpoint of Megatron-LM's format `torch` (mp_rank_00); write it as torch_dist with Megatron-LM's "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    try:
        found = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except OSError as error:
        what = (
            "is a checkpoint of torch, but not of Megatron-LM's format torch_dist (no metadata.json)"
            if (folder / ".metadata").is_file()
            else f"has no checkpoint of Megatron-LM: neither {TRACKER} nor metadata.json"
        )
        raise ConfigError(f"{folder} {what}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'metadata.json'} does not say the format of the checkpoint") from error
    if found != FORMAT["sharded_backend"]:
        raise ConfigError(f"{folder} is a checkpoint of format {found!r}; only torch_dist is read")


# -- arguments --------------------------------------------------------------------------------------------------------------


class _Unknown(dict[Any, Any]):
    """Stands in for an object of Megatron-LM, whose code is not needed to read the rest."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def append(self, _: object) -> None: ...

    def extend(self, _: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _KNOWN.get((module_name, global_name), _Unknown)


_KNOWN = {("argparse", "Namespace"): argparse.Namespace, ("types", "SimpleNamespace"): SimpleNamespace}


def _unpickled(file: Path | io.BytesIO) -> Any:
    reader: Any = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)


class _CommonPlanner(DefaultLoadPlanner):
    """Reads objects with the unpickler of this module."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.found: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found = _unpickled(value)


def _common(folder: Path, known: Mapping[str, object]) -> Mapping[str, Any]:
    """What is not sharded: in common.pt, or, as newer versions of megatron-core do it, beside the tensors."""
    if (folder / "common.pt").is_file():
        found = _unpickled(folder / "common.pt")
    elif _COMMON in known:
        planner = _CommonPlanner()
        with host.quiet():  # torch warns that it works in one process, even if it was asked to
            load({_COMMON: None}, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
        found = planner.found[0] if isinstance(planner.found, list) and planner.found else None
    else:
        found = None
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


# -- weights ----------------------------------------------------------------------------------------------------------------


def read_weights(checkpoint: MegatronCheckpoint, shape: ModelShape) -> dict[str, Tensor]:
    """The full parameters by canonical name, as they are stored. Raises ConfigError naming what is missing or does not fit."""
    found = _places(checkpoint, shape)
    keys = dict.fromkeys(place.key for place in found.values())
    tensors = {key: torch.empty(checkpoint.sizes[key], dtype=checkpoint.dtypes[key]) for key in keys}
    try:
        with host.quiet():
            load(tensors, storage_reader=FileSystemReader(checkpoint.folder), no_dist=True)
    except CheckpointException as error:
        raise ConfigError(f"{checkpoint.folder} cannot be read: {first_failure(error)}") from error
    return {row.name: tensors[(place := found[row.name]).key][place.index][: row.shape[0]] for row in table(shape)}


def first_failure(error: CheckpointException) -> BaseException:
    """What a rank failed with; the exception's own text is a traceback."""
    return next((cause for cause, _ in error.failures.values()), error)


def _places(checkpoint: MegatronCheckpoint, shape: ModelShape) -> dict[str, Place]:
    found: dict[str, Place] = {}
    missing: dict[str, None] = {}
    for row in table(shape):
        options = places(row, shape)
        place = next((option for option in options if option.key in checkpoint.sizes), None)
        if place is None:
            missing[options[0].key] = None
            continue
        _check_size(checkpoint, row, place)
        found[row.name] = place
    if missing:
        raise ConfigError(f"{checkpoint.folder} lacks {len(missing)} tensors of the model, the first is {next(iter(missing))}")
    used = {place.key for place in found.values()}
    if unused := sorted(key for key in checkpoint.sizes if key.startswith(_OF_MODELS) and key not in used):
        raise ConfigError(f"{checkpoint.folder} has {len(unused)} tensors that the model lacks, the first is {unused[0]}")
    return found


_OF_MODELS = ("embedding.", "decoder.", "output_layer.", "mtp.")


def _check_size(checkpoint: MegatronCheckpoint, row: Parameter, place: Place) -> None:
    size, wanted = checkpoint.sizes[place.key], (*place.of, *row.shape)
    is_vocabulary = row.name in (EMBEDDING, OUTPUT)
    if size == wanted or (is_vocabulary and size[1:] == wanted[1:] and size[0] > wanted[0]):
        return
    least = " or more" if is_vocabulary else ""
    raise ConfigError(f"{checkpoint.folder}: {place.key} has shape {size}, and the model's is {wanted}{least}")
