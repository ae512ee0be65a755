"""`async-rl checkpoints ls | verify | prune`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from async_rl.checkpoints.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    check_files,
    check_sizes,
    found_in,
    read_manifest,
    remove,
)
from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.train import resolve_any
from async_rl.config.loading import check_named
from async_rl.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCheckpoint:
    """A checkpoint with its manifest, and the problem if it is damaged."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


def ls(line: CommandLine) -> int:
    return _listed(_found(line), check_sizes)


def verify(line: CommandLine) -> int:
    return _listed(_found(line), _check_bytes)


def prune(line: CommandLine) -> int:
    keep = line.integer("keep")
    if keep is None or keep < 1:
        raise ConfigError("checkpoints prune needs the number to keep, at least 1: --keep N")
    found, whole = _found(line), 0
    while found and whole < keep:
        whole += not _checked(found.pop(0), _check_bytes).problem
    if whole == 0:
        print("no checkpoint is whole, so none is removed")
        return 1
    for path in found:
        print(f"{path} {'would be' if line.has('dry-run') else 'is'} removed")
    if not line.has("dry-run"):
        remove(found)
    return 0


def _found(line: CommandLine) -> list[Path]:
    """Newest first."""
    words = line.verb.words
    if not line.operands and not line.config:
        raise ConfigError(f"{words} needs a folder, or a run: async-rl {words} runs/NAME")
    folder = Path(line.operands[0]) if line.operands else _run_folder(line)
    if found := found_in(folder):
        return found
    raise ConfigError(f"there is no checkpoint in {folder}")


def _run_folder(line: CommandLine) -> Path:
    config = resolve_any(line.config).config
    check_named(config.run.name)
    return config.run_folder


def _listed(found: Sequence[Path], check: Callable[[Path, Manifest], None]) -> int:
    checked = [_checked(path, check) for path in found]
    rows = [("checkpoint", "written", "size", "ranks", "models", ""), *(_row(each) for each in checked)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 1 if any(each.problem for each in checked) else 0


def _row(each: CheckedCheckpoint) -> tuple[str, ...]:
    from rich.filesize import decimal

    name, state, manifest = each.path.name, each.problem if each.problem else "whole", each.manifest
    if manifest is None:
        return (name, "", "", "", "", state)
    written = datetime.fromtimestamp((each.path / MANIFEST).stat().st_mtime)
    size = sum(each.bytes for each in manifest.files.values())
    models = ", ".join(f"{name} after {facts.updates} updates" for name, facts in manifest.models.items())
    return (name, f"{written:%Y-%m-%d %H:%M:%S}", decimal(size), str(manifest.layout), models, state)


def _checked(path: Path, check: Callable[[Path, Manifest], None]) -> CheckedCheckpoint:
    manifest, problem = None, ""
    try:
        manifest = read_manifest(path)
        check(path, manifest)
    except (DamagedCheckpoint, CheckpointError) as error:
        problem = str(error)
    return CheckedCheckpoint(path=path, manifest=manifest, problem=problem)


def _check_bytes(path: Path, manifest: Manifest) -> None:
    check_files(path, manifest, manifest.files)


_OPERANDS = "[FOLDER]"
VERBS = (
    Verb(
        words="checkpoints ls",
        operands=_OPERANDS,
        help="List the checkpoints of a run or folder, newest first; exits 1 if one is incomplete.",
        run=ls,
    ),
    Verb(
        words="checkpoints verify",
        operands=_OPERANDS,
        help="Compare every byte of all checkpoints with their digests; exits 1 if one is damaged.",
        run=verify,
    ),
    Verb(
        words="checkpoints prune",
        operands=_OPERANDS,
        help="Remove old checkpoints. Those that are kept are verified first, so that the newest whole one always stays.",
        run=prune,
        options=(
            Option(name="keep", value="N", read=int, help="number of whole checkpoints to keep; newer damaged ones stay too"),
            Option(name="dry-run", help="only print what would be removed"),
        ),
    ),
)
