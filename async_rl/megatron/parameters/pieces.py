"""The contents of checkpoint files: flat pieces of parameters and of optimizer moments.

    policy/exp_avg/decoder.layers.0.mlp.linear_fc1.weight/1of2/4096-8192

contains elements 4096 to 8191 of the first moment's slice on the second of two tensor ranks. Readers with another layout
assemble what they need from the pieces.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from async_rl.checkpoints.manifest import WEIGHT, AdapterFacts, DamagedCheckpoint, Manifest, ModelFacts
from async_rl.errors import CheckpointError
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.full_parameters import difference_of, join, slice_for
from async_rl.megatron.parameters.table import VALUE_HEAD, Parameter
from async_rl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Elements [start, stop) of the flattened slice of a parameter on tensor rank `rank` of `ranks`."""

    row: Parameter
    rank: int
    ranks: int
    start: int
    stop: int

    @staticmethod
    def whole(row: Parameter, rank: int, ranks: int) -> Stretch:
        return Stretch(row=row, rank=rank, ranks=ranks, start=0, stop=math.prod(slice_shape(row, ranks)))

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def share(self, index: int, count: int) -> Stretch:
        """The share of one of `count` ranks that hold the same elements."""
        size = self.stop - self.start
        return self.part(size * index // count, size * (index + 1) // count)

    def part(self, start: int, stop: int) -> Stretch:
        return replace(self, start=self.start + start, stop=self.start + stop)

    def key(self, model: str, kind: str) -> str:
        return f"{model}/{kind}/{self.row.name}/{self.rank}of{self.ranks}/{self.start}-{self.stop}"


_KEY = re.compile(r"(?P<model>\w+)/(?P<kind>\w+)/(?P<name>[^/]+)/(?P<rank>\d+)of(?P<ranks>\d+)/(?P<start>\d+)-(?P<stop>\d+)")


def slice_shape(row: Parameter, ranks: int) -> tuple[int, ...]:
    return tuple(slice_for(torch.empty(row.shape, device="meta"), row.split, 0, ranks).shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stored:
    key: str
    file: Any
    rank: int
    ranks: int
    start: int
    stop: int


class Pieces:
    """An open checkpoint whose files have been verified; tensors are read on access."""

    def __init__(self, checkpoint: Path, files: Iterable[Any]):
        self._checkpoint = checkpoint
        self._of_parameters: dict[tuple[str, str, str], list[_Stored]] = defaultdict(list)
        self._others: dict[str, Any] = {}
        for file in files:
            for key in file.keys():  # noqa: SIM118
                self._register(key, file)

    def _register(self, key: str, file: Any) -> None:
        named = _KEY.fullmatch(key)
        if named is None:
            self._others[key] = file
            return
        rank, ranks, start, stop = (int(named[part]) for part in ("rank", "ranks", "start", "stop"))
        stored = _Stored(key=key, file=file, rank=rank, ranks=ranks, start=start, stop=stop)
        self._of_parameters[named["model"], named["kind"], named["name"]].append(stored)

    def kinds(self, model: str) -> set[str]:
        return {kind for each, kind, _ in self._of_parameters if each == model}

    def get(self, key: str) -> Tensor | None:
        """A tensor that is not a piece of a parameter."""
        return self._others[key].get_tensor(key) if key in self._others else None

    def read(self, model: str, kind: str, wanted: Stretch) -> Tensor:
        """Read the wanted elements, flat, from pieces of any layout. Raises CheckpointError."""
        row, stored = wanted.row, self._of_parameters.get((model, kind, wanted.row.name), [])
        if not stored:
            raise self._lacks(row)
        ranks = stored[0].ranks
        if ranks == wanted.ranks:
            return self._stretch(stored, wanted)
        slices = [self._stretch(stored, Stretch.whole(row, rank, ranks)).view(slice_shape(row, ranks)) for rank in range(ranks)]
        own = slice_for(join(slices, row.split, row.shape), row.split, wanted.rank, wanted.ranks)
        return own.flatten()[wanted.start : wanted.stop]

    def full(self, model: str, row: Parameter) -> Tensor:
        """The full weight of a parameter."""
        return self.read(model, WEIGHT, Stretch.whole(row, 0, 1)).view(row.shape)

    def _stretch(self, stored: list[_Stored], wanted: Stretch) -> Tensor:
        """Concatenate pieces. They do not overlap, so the right number of elements means that none is missing."""
        parts: list[Tensor] = []
        for piece in sorted(stored, key=lambda each: each.start):
            start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
            if piece.rank == wanted.rank and start < stop:
                parts.append(piece.file.get_slice(piece.key)[start - piece.start : stop - piece.start])
        if sum(len(part) for part in parts) != wanted.stop - wanted.start:
            raise self._lacks(wanted.row)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _lacks(self, row: Parameter) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._checkpoint} lacks a part of {row.name}; use the one before it")


@contextmanager
def open_pieces(checkpoint: Path, manifest: Manifest) -> Iterator[Pieces]:
    with ExitStack() as opened:
        files: list[Any] = []
        for name in manifest.files:
            try:
                files.append(opened.enter_context(safe_open(checkpoint / name, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise DamagedCheckpoint(f"{checkpoint / name} cannot be read ({error})") from error
        yield Pieces(checkpoint, files)


def check_model(
    checkpoint: Path,
    manifest: Manifest,
    model: str,
    shape: ModelShape,
    *,
    adapters: AdapterFacts | None = None,
    head_may_lack: bool = False,
) -> None:
    """Check that the checkpoint has a model of this shape with these adapters. Raises CheckpointError."""
    if model not in manifest.models:
        raise CheckpointError(f"checkpoint {checkpoint} has no {model}, only {' and '.join(manifest.models)}")
    _check_adapters(checkpoint, manifest.models[model].adapters, adapters)
    rows = trained_rows(shape, adapters.lora if adapters is not None else None)
    wanted, found = parameters_of(rows), dict(manifest.models[model].parameters)
    for name in VALUE_HEAD:  # a reader without value head may skip that of a shared critic
        if name not in wanted:
            found.pop(name, None)
        elif name not in found and head_may_lack:
            del wanted[name]
    if difference := difference_of(wanted, found):
        raise CheckpointError(
            f"checkpoint {checkpoint} belongs to another model: {difference}; use its `model` section, or another run.name"
        )


def _check_adapters(checkpoint: Path, found: AdapterFacts | None, wanted: AdapterFacts | None) -> None:
    if found is None and wanted is None:
        return
    if wanted is None:
        raise CheckpointError(
            f"checkpoint {checkpoint} has adapters alone: set learner.lora as it was, or choose another run.name"
        )
    if found is None:
        raise CheckpointError(f"checkpoint {checkpoint} has no adapters: remove learner.lora, or choose another run.name")
    for key, value in wanted.lora:
        if (saved := getattr(found.lora, key)) != value:
            raise CheckpointError(
                f"checkpoint {checkpoint} was trained with learner.lora.{key} {_text(saved)}, not {_text(value)}: set it back, "
                "or choose another run.name"
            )
    if found.base != wanted.base:
        raise CheckpointError(
            f"checkpoint {checkpoint} has adapters of other weights: those of {found.place}; give the same as `model`, or "
            "choose another run.name"
        )


def _text(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def lacks_head(found: ModelFacts, shape: ModelShape) -> bool:
    return shape.head != "tokens" and not found.parameters.keys() & {*VALUE_HEAD}


def parameters_of(rows: Iterable[Parameter]) -> dict[str, tuple[int, ...]]:
    """Full shapes by name, as in a manifest."""
    return {row.name: row.shape for row in rows}
