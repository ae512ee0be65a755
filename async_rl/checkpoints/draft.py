"""Writes a checkpoint folder atomically.

It is written under a temporary name, every file and the folder are fsynced, and the rename comes last, so a folder with the
final name is complete. Readers still check files against the manifest, because disks fail.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from async_rl.checkpoints.manifest import MANIFEST, FileFacts, Manifest, file_of, folder_of, life_of_draft
from async_rl.durable.failpoints import define, failpoint
from async_rl.durable.whole_file import sync_folder, write_all, write_whole

define("checkpoint.opened", "checkpoint.writing", "checkpoint.written", "checkpoint.complete", "checkpoint.renamed")

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    final: Path

    @property
    def folder(self) -> Path:
        return self.final.with_name(f".{self.final.name}.partial")

    @staticmethod
    def of(root: Path, step: int, life: int = 0) -> Draft:
        return Draft(final=root / folder_of(step, life))

    def open(self) -> None:
        """Create the folder and remove remains of interrupted attempts. Called by one writer, before the others begin."""
        own = life_of_draft(self.folder)
        for leftover in self.final.parent.glob(".step-*.partial"):
            if life_of_draft(leftover) <= own:  # a later learner may be writing
                shutil.rmtree(leftover)
        self.folder.mkdir(parents=True)
        failpoint("checkpoint.opened")

    def write(self, rank: int, tensors: Mapping[str, Tensor]) -> FileFacts:
        facts = write_tensors(self.folder / file_of(rank), tensors)
        failpoint("checkpoint.written")
        return facts

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and rename the folder; then the checkpoint is durable. Called by the writer that opened it, after
        all have written."""
        write_whole(self.folder / MANIFEST, manifest.model_dump_json(indent=2))
        failpoint("checkpoint.complete")
        if self.final.exists():
            # a step is written twice only after a resume from before it, because this checkpoint was damaged
            shutil.rmtree(self.final)
        self.folder.rename(self.final)
        failpoint("checkpoint.renamed")
        sync_folder(self.final.parent)

    def discard(self) -> None:
        """Delete an unfinished draft to free its disk space. Does nothing after `commit`."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write a safetensors file and digest it on the way, without copies and without holding the GIL for long."""
    # widest types first, so that every tensor is aligned
    ordered = sorted(tensors.items(), key=lambda named: -named[1].element_size())
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb", buffering=0) as file:
        digest, size = xxhash.xxh3_64(), 0
        for part in (len(described).to_bytes(8, "little"), described, *(_bytes_of(tensor) for _, tensor in ordered)):
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                digest.update(chunk)
                size += write_all(file.fileno(), chunk)
            failpoint("checkpoint.writing")
        os.fsync(file.fileno())
    return FileFacts(bytes=size, xxh3=digest.hexdigest())


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
