"""The name, manifest and file digests of a checkpoint folder. No torch.

    checkpoints/step-00000010-by-3/rank-00000.safetensors ... manifest.json

The second number is the fence of the learner that wrote it. File contents: `async_rl/megatron/parameters/pieces.py`.
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

from async_rl.config.learner import LoraConfig
from async_rl.errors import CheckpointError, FenceLost

FORMAT = 2
MANIFEST = "manifest.json"
POLICY = "policy"
"""Key of the trained model; a checkpoint can contain further ones, such as a critic."""
WEIGHT = "weight"
"""Key of a parameter's value in the learner's highest precision. Its other keys are the optimizer's moments."""
_CHUNK = 1 << 24


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(_Record):
    """The parallel layout of the ranks that wrote a checkpoint. Other layouts can read it too."""

    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1

    def __str__(self) -> str:
        """Only sizes above 1."""
        divided = {name: size for name, size in self.model_dump().items() if size > 1}
        return " x ".join(f"{name} {size}" for name, size in divided.items()) if divided else "a single rank"


class FileFacts(_Record):
    """Size and digest of a file."""

    bytes: int
    xxh3: str


class AdapterFacts(_Record):
    """The adapters of a model, and the base that they belong to."""

    lora: LoraConfig
    base: str
    """Digest of the base's weights."""
    folder: Path | None
    """Hugging Face folder of the base; None: random weights."""
    seed: int
    """Seed of random weights."""

    @property
    def place(self) -> str:
        return str(self.folder) if self.folder is not None else f"a new model with run.seed {self.seed}"


class ModelFacts(_Record):
    """One model of a checkpoint."""

    updates: int
    """Optimizer updates so far, which position the learning rate schedule."""
    parameters: dict[str, tuple[int, ...]]
    """Full shapes by canonical name: of all parameters, or of the adapters and a value head."""
    adapters: AdapterFacts | None = None
    """None: all weights were trained."""


class Manifest(_Record):
    format: int
    step: int
    layout: Layout
    models: dict[str, ModelFacts]
    files: dict[str, FileFacts]
    extra: dict[str, JsonValue]
    """State of the learner loop: version, timeline, position of the buffer. Empty for an imported model."""

    @field_validator("files")
    @classmethod
    def _files_lie_beside_it(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        for name in files:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
        return files


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be used; an older one may be."""


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def folder_of(step: int, life: int) -> str:
    return f"step-{step:08d}-by-{life}" if life else f"step-{step:08d}"


def candidates(root: Path) -> list[Path]:
    """All complete checkpoints, newest first: those of the latest learner, then those of earlier ones."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=place_of, reverse=True)


def found_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. It may be a checkpoint, a run's folder, or a folder of checkpoints."""
    if (folder / MANIFEST).is_file():
        return [folder]
    inside = folder / "checkpoints"
    return candidates(inside if inside.is_dir() else folder)


_NAME = re.compile(r"step-(\d{8,})(?:-by-(\d+))?")
_SET_ASIDE = ".damaged"
"""Suffix of checkpoints that a resume has passed over."""


def place_of(checkpoint: Path) -> tuple[int, int]:
    """The learner's fence and the step, from the folder's name."""
    named = _NAME.fullmatch(checkpoint.name)
    assert named is not None
    return int(named[2] or 0), int(named[1])


def life_of_draft(draft: Path) -> int:
    """Fence of the learner that writes a draft; 0 if the name is not a draft's."""
    named = _NAME.fullmatch(draft.name.removeprefix(".").removesuffix(".partial"))
    return int(named[2] or 0) if named is not None else 0


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a manifest. Raises DamagedCheckpoint; CheckpointError if it has the format of another release, in which case an
    older checkpoint would not help."""
    path = checkpoint / MANIFEST
    try:
        content: Any = json.loads(path.read_text())
        found = int(content["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of format {found}, and this release reads format {FORMAT}: continue with the "
            "release that wrote it, or move the folder away to start over"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise DamagedCheckpoint(f"{path} is not a manifest ({error.error_count()} problems)") from error
    for name in manifest.files:
        if (checkpoint / name).is_symlink():
            raise DamagedCheckpoint(f"{checkpoint / name} is a link; a checkpoint's files lie in its folder")
    return manifest


def read_asked(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint that the user named. Raises CheckpointError."""
    try:
        return read_manifest(checkpoint)
    except DamagedCheckpoint as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}") from error


def check_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with their digests in the manifest. Raises DamagedCheckpoint."""
    for name in names:
        path = checkpoint / name
        try:
            found = facts_of(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error})") from error
        if found != manifest.files.get(name):
            raise DamagedCheckpoint(f"{path} does not match {MANIFEST}")


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Check that all files exist with their sizes, without reading them. Raises DamagedCheckpoint."""
    for name, facts in manifest.files.items():
        file = checkpoint / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        if file.stat().st_size != facts.bytes:
            raise DamagedCheckpoint(f"{file} has {file.stat().st_size} bytes, not {facts.bytes}")


def facts_of(path: Path) -> FileFacts:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(bytes=size, xxh3=digest.hexdigest())


def remove_superseded(root: Path, keep: int, *, newest: int, life: int = 0, spared: str = "") -> None:
    """Remove all but `keep` checkpoints: that of step `newest`, which this learner (`life`) just wrote, and the newest others.

    `spared` is kept in addition. Checkpoints that were set aside are removed once `keep` undamaged ones exist.
    """
    found = [checkpoint for checkpoint in candidates(root) if checkpoint.name not in (spared, folder_of(newest, life))]
    remove(found[keep - 1 :])
    if len(found) >= keep - 1:
        remove(root.glob(f"step-*{_SET_ASIDE}"))


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint that a resume passes over.

    Otherwise it would count among those that are kept, and one that can be read again later would bring back steps whose groups
    have been rolled out a second time.
    """
    target = checkpoint.with_name(checkpoint.name + _SET_ASIDE)
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def check_is_latest(root: Path, life: int) -> None:
    """Raise FenceLost if a later learner has written a checkpoint, from which a resume would start instead of from ours."""
    found = candidates(root)
    if found and place_of(found[0])[0] > life:
        raise FenceLost(
            f"{found[0]} was written by a later learner than this one, whose fence is {life}, so a resume would ignore what "
            "this one writes; restart it to continue from there, or move that folder away first"
        )


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints, the manifest first, so that a partly deleted one is not taken for complete."""
    for checkpoint in checkpoints:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
