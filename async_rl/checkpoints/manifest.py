"""What a checkpoint folder says of itself: its name, its manifest, the digests of its files. No torch: anybody may look.

    checkpoints/step-00000010-by-3/rank-00000.safetensors ... manifest.json

The second number is the fence of the learner that wrote it. What stands in the files: `async_rl/megatron/parameters/pieces.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, field_validator

from async_rl.errors import CheckpointError, FenceLost

FORMAT = 2
MANIFEST = "manifest.json"
POLICY = "policy"
"""The model that a checkpoint is of; it can hold others beside it."""
WEIGHT = "weight"
"""Of a parameter, in the highest precision that the learner keeps. What else there is of it are the optimizer's moments."""
_CHUNK = 1 << 24


class Layout(BaseModel):
    """How the ranks that wrote a checkpoint were divided. Ranks that are divided otherwise can read it too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1

    def __str__(self) -> str:
        """Without what is not divided."""
        divided = {name: size for name, size in self.model_dump().items() if size > 1}
        return " x ".join(f"{name} {size}" for name, size in divided.items()) if divided else "a single rank"


class FileFacts(BaseModel):
    """Enough to tell that a file is whole and unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    xxh3: str


class ModelFacts(BaseModel):
    """Of one of the models in a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int
    """Optimizer updates made: the position in the schedule, and the optimizer's own count."""
    parameters: dict[str, tuple[int, ...]]
    """Canonical name and full shape."""


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    step: int
    layout: Layout
    models: dict[str, ModelFacts]
    files: dict[str, FileFacts]
    extra: dict[str, JsonValue]
    """The loop's part: version, timeline, the buffer's position. A model that was imported has none."""

    @field_validator("files")
    @classmethod
    def _files_lie_beside_it(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        for name in files:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
        return files


class Damaged(Exception):
    """One checkpoint cannot be used; an older one may."""


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def folder_of(step: int, life: int) -> str:
    return f"step-{step:08d}-by-{life}" if life else f"step-{step:08d}"


def candidates(root: Path) -> list[Path]:
    """Every complete checkpoint, newest first: of the latest learner, then of those before it."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=place_of, reverse=True)


def found_in(folder: Path) -> list[Path]:
    """What people mean by a folder, newest first: a checkpoint, a run, or a folder of checkpoints."""
    if (folder / MANIFEST).is_file():
        return [folder]
    inside = folder / "checkpoints"
    return candidates(inside if inside.is_dir() else folder)


_NAME = re.compile(r"step-(\d{8,})(?:-by-(\d+))?")


def place_of(checkpoint: Path) -> tuple[int, int]:
    """The learner's life, and the step."""
    named = _NAME.fullmatch(checkpoint.name)
    assert named is not None
    return int(named[2] or 0), int(named[1])


def life_of_draft(draft: Path) -> int:
    """Of the learner that writes it. What is no checkpoint's draft belongs to nobody."""
    named = _NAME.fullmatch(draft.name.removeprefix(".").removesuffix(".partial"))
    return int(named[2] or 0) if named is not None else 0


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises Damaged; but CheckpointError where the manifest is whole and of another release: an older one is no way out."""
    path = checkpoint / MANIFEST
    try:
        content: Any = json.loads(path.read_text())
        found = int(content["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of format {found}, and this release reads format {FORMAT}: go on with the release "
            "that wrote it, or move the folder away to begin anew"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise Damaged(f"{path} is not a manifest ({error.error_count()} problems)") from error
    for name in manifest.files:
        if (checkpoint / name).is_symlink():
            raise Damaged(f"{checkpoint / name} is a link; a checkpoint's files lie in its folder")
    return manifest


def read_asked(checkpoint: Path) -> Manifest:
    """Where no other checkpoint will do: raises CheckpointError."""
    try:
        return read_manifest(checkpoint)
    except Damaged as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}") from error


def check_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises Damaged unless each of these files is what the manifest says of it."""
    for name in names:
        path = checkpoint / name
        try:
            found = facts_of(path)
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error})") from error
        if found != manifest.files.get(name):
            raise Damaged(f"{path} is not what {MANIFEST} says it is")


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raises Damaged unless every file is there with its size. Quick, where `check_files` reads every byte."""
    for name, facts in manifest.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise Damaged(f"{file} is missing")
        if file.stat().st_size != facts.bytes:
            raise Damaged(f"{file} has {file.stat().st_size} bytes, not {facts.bytes}")


def facts_of(path: Path) -> FileFacts:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(bytes=size, xxh3=digest.hexdigest())


def remove_superseded(root: Path, keep: int, *, newest: int, life: int = 0, spared: str = "") -> None:
    """Remove all but `keep` checkpoints: that of step `newest`, which this life has just written, and the newest others.

    What this life has above `newest` goes too: it was given up, because it was damaged. `spared` is still needed.
    """
    found = [checkpoint for checkpoint in candidates(root) if checkpoint.name not in (spared, folder_of(newest, life))]
    above = [checkpoint for checkpoint in found if place_of(checkpoint) > (life, newest) and place_of(checkpoint)[0] == life]
    remove([*above, *[checkpoint for checkpoint in found if checkpoint not in above][keep - 1 :]])


def check_is_latest(root: Path, life: int) -> None:
    """Raises FenceLost where a later learner has written a checkpoint: a resume would begin from that, not from ours."""
    found = candidates(root)
    if found and place_of(found[0])[0] > life:
        raise FenceLost(
            f"{found[0]} was written by a later learner than this one, whose fence is {life}, so a resume would pass over what "
            "this one writes; start it again to go on from there, or move that folder away first"
        )


def remove(checkpoints: Iterable[Path]) -> None:
    """The manifest goes first, so that a half-removed one is not taken for whole."""
    for checkpoint in checkpoints:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
