"""What a checkpoint folder says of itself: its name, its manifest, the digests of its files. No torch: anybody may look.

    checkpoints/step-00000010-by-1763722547/rank-00000.safetensors ... manifest.json

The second number is the fence of the learner that wrote it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 24


class Layout(BaseModel):
    """How the learner's ranks are divided. A checkpoint belongs to one layout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"


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


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def candidates(root: Path) -> list[Path]:
    """Every complete checkpoint, newest first: of the latest learner, then of those before it."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=place_of, reverse=True)


_NAME = re.compile(r"step-(\d{8,})(?:-by-(\d+))?")


def place_of(checkpoint: Path) -> tuple[int, int]:
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


def check_file(path: Path, manifest: Manifest) -> None:
    """Raises Damaged unless the file is what the manifest says of it."""
    try:
        found = facts_of(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error})") from error
    if found != manifest.files.get(path.name):
        raise Damaged(f"{path} is not what {MANIFEST} says it is")


def facts_of(path: Path) -> FileFacts:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(bytes=size, xxh3=digest.hexdigest())
