"""Checkpoints: one folder per step, one safetensors file per rank, and a manifest that makes it valid.

    checkpoints/step-00000010-by-1763722547/rank-00000.safetensors ... manifest.json

The second number is the fence of the learner that wrote it. A learner that slept while another took over may still finish
the checkpoint it was writing: that counts less than any of its successor's, and removes none of them.

The folder is written under another name, every file and the folder itself are flushed, and the rename comes last: what
bears the final name is complete. A reader still checks every file against the manifest, because disks fail too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.layout import Layout

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 24


class FileFacts(BaseModel):
    """Enough to tell that a file is whole and unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    xxh3: str


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    step: int
    layout: Layout
    files: dict[str, FileFacts]
    extra: dict[str, JsonValue]
    """The loop's part: version, timeline, the buffer's position."""


class Damaged(Exception):
    """One checkpoint cannot be used; an older one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint being written, beside the name that it will get."""

    final: Path

    @property
    def folder(self) -> Path:
        return self.final.with_name(f".{self.final.name}.partial")

    def open(self) -> None:
        """Rank 0, before anybody writes. What interrupted attempts left is removed."""
        for leftover in self.final.parent.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        self.folder.mkdir(parents=True)

    def write(self, rank: int, tensors: Mapping[str, Tensor]) -> FileFacts:
        path = self.folder / file_of(rank)
        try:
            save_file(dict(tensors), path)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        _flush(path)
        return facts_of(path)

    def commit(self, manifest: Manifest) -> None:
        """Rank 0, after everybody wrote. When it returns, the checkpoint is durable."""
        path = self.folder / MANIFEST
        path.write_text(manifest.model_dump_json(indent=2))
        _flush(path)
        _flush(self.folder)
        if self.final.exists():
            # a step is saved a second time only after a resume from before it, because this one was damaged
            shutil.rmtree(self.final)
        self.folder.rename(self.final)
        _flush(self.final.parent)


def draft(root: Path, step: int, life: int = 0) -> Draft:
    return Draft(final=root / (f"step-{step:08d}-by-{life}" if life else f"step-{step:08d}"))


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def candidates(root: Path) -> list[Path]:
    """Every complete checkpoint, newest first: of the latest learner, then of those before it."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=_place_of, reverse=True)


_NAME = re.compile(r"step-(\d{8,})(?:-by-(\d+))?")


def _place_of(checkpoint: Path) -> tuple[int, int]:
    """The learner's life, and the step."""
    named = _NAME.fullmatch(checkpoint.name)
    assert named is not None
    return int(named[2] or 0), int(named[1])


def read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error
    if isinstance(content, dict) and content.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise Damaged(f"{path} is not of format {FORMAT}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise Damaged(f"{path} is not a manifest ({error.error_count()} problems)") from error


def read_rank(checkpoint: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """One rank's tensors, after comparing its file with what the manifest says of it."""
    path = checkpoint / file_of(rank)
    try:
        if facts_of(path) != manifest.files.get(path.name):
            raise Damaged(f"{path} is not what {MANIFEST} says it is")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error


def prune(root: Path, keep: int, *, newest: int, life: int = 0) -> None:
    """Remove all but the newest `keep`, and what this life has above `newest`: that was given up, because it was damaged.

    The manifest goes first, so that a half-removed one is not taken for whole.
    """
    found = candidates(root)
    above = [checkpoint for checkpoint in found if _place_of(checkpoint) > (life, newest) and _place_of(checkpoint)[0] == life]
    for checkpoint in [*above, *[checkpoint for checkpoint in found if checkpoint not in above][keep:]]:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def facts_of(path: Path) -> FileFacts:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(bytes=size, xxh3=digest.hexdigest())


def _flush(path: Path) -> None:
    """Of a folder too: a new name is durable only once the folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
