"""Checkpoints: one folder per step, one safetensors file per rank, and a manifest that makes it valid.

    checkpoints/step-00000010-by-1763722547/rank-00000.safetensors ... manifest.json

A learner that slept while another took over may still finish the checkpoint it was writing: that counts less than any of
its successor's, and removes none of them. `async_rl/checkpoint_files.py` says what a folder is called and how it is read.

The folder is written under another name, every file and the folder itself are flushed, and the rename comes last: what
bears the final name is complete. A reader still checks every file against the manifest, because disks fail too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rl.checkpoint_files import (
    MANIFEST,
    Damaged,
    FileFacts,
    Manifest,
    candidates,
    check_file,
    facts_of,
    file_of,
    place_of,
)


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


def read_rank(checkpoint: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """One rank's tensors, after comparing its file with what the manifest says of it."""
    path = checkpoint / file_of(rank)
    check_file(path, manifest)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error


def prune(root: Path, keep: int, *, newest: int, life: int = 0) -> None:
    """Remove all but the newest `keep`, and what this life has above `newest`: that was given up, because it was damaged.

    The manifest goes first, so that a half-removed one is not taken for whole.
    """
    found = candidates(root)
    above = [checkpoint for checkpoint in found if place_of(checkpoint) > (life, newest) and place_of(checkpoint)[0] == life]
    for checkpoint in [*above, *[checkpoint for checkpoint in found if checkpoint not in above][keep:]]:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def _flush(path: Path) -> None:
    """Of a folder too: a new name is durable only once the folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
