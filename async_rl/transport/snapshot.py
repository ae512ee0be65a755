"""Snapshots: versions as files, for workers that start while no learner runs.

    SNAPSHOTS/version-00000012/parcel-00000.safetensors ... manifest.json

Each learner rank writes its own parcel, byte for byte as it is sent, so the same chunk digests apply. The folder is written
under a temporary name and renamed once everything is on the disk, so a folder with its final name is complete. Readers verify
every chunk nevertheless, because disks fail too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from async_rl.durable.whole_file import sync_folder, write_all, write_whole
from async_rl.errors import WireError
from async_rl.transport.digest import chunks_of
from async_rl.transport.gpu_stream import on_host, transport_stream
from async_rl.transport.plan import CHUNK_BYTES, WIRE_DTYPES, Parcel, Slice, WireLayout
from async_rl.types import VersionRecord

NUM_KEPT = 2
"""Snapshots kept: of the live version, and of the one before it, which workers may still be reading."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"\.?version-(\d{8,})(?:\.partial)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    record: VersionRecord
    layout: WireLayout
    chunks: tuple[tuple[str, ...], ...]
    """For each parcel the digests of its chunks."""


_MANIFESTS = TypeAdapter(SnapshotManifest)


def folder_of(root: Path, version: int) -> Path:
    return root / f"version-{version:08d}"


def draft_of(root: Path, version: int) -> Path:
    """The version's folder while it is being written."""
    return root / f".version-{version:08d}.partial"


def file_of(folder: Path, parcel: int) -> Path:
    return folder / f"parcel-{parcel:05d}.safetensors"


# -- writing -----------------------------------------------------------------------------------------------------------------


@contextmanager
def drafting(root: Path, version: int) -> Generator[Path]:
    """A folder for the parcels' files, removed on exit unless it was committed.

    Removes drafts of earlier interrupted attempts, except those of newer versions: a newer learner may be writing them.
    """
    for path, other in _find(root, ".version-*.partial"):
        if other <= version:
            shutil.rmtree(path, ignore_errors=True)
    draft = draft_of(root, version)
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # a disk that was full needs the room


def write_parcel(draft: Path, number: int, layout: WireLayout, data: torch.Tensor) -> None:
    """Write one parcel; it is durable when this returns."""
    with file_of(draft, number).open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(_header(layout, layout.parcels[number])))
        with transport_stream(data.device):
            for part in on_host(chunks_of(data)):
                write_all(file.fileno(), part.numpy().data)
        os.fsync(file.fileno())


def commit(draft: Path, manifest: SnapshotManifest) -> None:
    """Complete a snapshot whose parcels are all written, then remove all but the newest `NUM_KEPT` snapshots."""
    root = draft.parent
    write_whole(draft / _MANIFEST, _MANIFESTS.dump_json(manifest))
    final = folder_of(root, manifest.record.version)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    sync_folder(root)
    for path, _ in sorted(_find(root, "version-*"), key=lambda found: -found[1])[NUM_KEPT:]:
        (path / _MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed snapshot is not read
        shutil.rmtree(path, ignore_errors=True)


# -- reading -----------------------------------------------------------------------------------------------------------------


def read_manifest(root: Path, version: int) -> SnapshotManifest | None:
    """None without a snapshot of the version. Raises WireError when it cannot be read."""
    path = folder_of(root, version) / _MANIFEST
    try:
        return _MANIFESTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise WireError(f"the snapshot {path.parent} cannot be read: {str(error).partition(chr(10))[0]}") from error


def read_parcel(
    root: Path, manifest: SnapshotManifest, number: int, data: torch.Tensor, on_received: Callable[[int], None]
) -> None:
    """Read a parcel into `data`. `on_received` is called with the bytes read so far. Raises WireError."""
    path = file_of(folder_of(root, manifest.record.version), number)
    try:
        with path.open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            for start in range(0, len(data), CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
                if file.readinto(host.numpy().data) != len(part):
                    raise WireError(f"{path} is too short")
                if host is not part:
                    part.copy_(host)
                on_received(start + len(part))
    except OSError as error:
        raise WireError(f"{path} cannot be read: {error.strerror}") from error


# -- files -------------------------------------------------------------------------------------------------------------------


def _header(layout: WireLayout, parcel: Parcel) -> bytes:
    """A safetensors header. The format wants every byte to belong to a tensor, so gaps between slices are listed too."""
    described: dict[str, object] = {}
    end = 0
    for each in parcel.slices:
        spec = layout.spec_of[each.box.name]
        described |= _gap(end, each.offset)
        end = each.offset + each.num_bytes
        place = {"dtype": WIRE_DTYPES[spec.dtype].in_files, "shape": list(each.box.shape), "data_offsets": [each.offset, end]}
        described[_name_of(each, spec.shape)] = place
    text = json.dumps(described | _gap(end, parcel.num_bytes)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _gap(start: int, stop: int) -> dict[str, object]:
    return {f"gap at {start}": {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}} if stop > start else {}


def _name_of(each: Slice, shape: tuple[int, ...]) -> str:
    if each.box.shape == shape:
        return each.box.name
    ranges = (f"{first}:{first + size}" for first, size in zip(each.box.start, each.box.shape, strict=True))
    return f"{each.box.name}[{', '.join(ranges)}]"


def _find(root: Path, pattern: str) -> Iterator[tuple[Path, int]]:
    for path in list(root.glob(pattern)):
        if (named := _NAME.fullmatch(path.name)) is not None:
            yield path, int(named[1])
