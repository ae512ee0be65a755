"""`async-rl checkpoints ...`: which ones a run has, whether they are whole, and away with the old ones. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from async_rl.checkpoints.manifest import MANIFEST, Damaged, Manifest, check_files, check_sizes, found_in, read_manifest, remove
from async_rl.cli.grammar import Line, Option, Tool, read
from async_rl.cli.train import load_any
from async_rl.errors import CheckpointError, ConfigError

_OPERANDS = "[FOLDER]"
LS = Tool(
    words="checkpoints ls",
    operands=_OPERANDS,
    help="The checkpoints of a run, or of a FOLDER, newest first; exits 1 if one lacks something.",
)
VERIFY = Tool(
    words="checkpoints verify",
    operands=_OPERANDS,
    help="Read them all and compare every byte with what was written; exits 1 if one is damaged.",
)
PRUNE = Tool(
    words="checkpoints prune",
    operands=_OPERANDS,
    help="Remove the old ones. What is kept was verified, so the newest whole one always stays.",
    options=(
        Option(name="keep", value="N", read=int, help="so many whole ones, and whatever is newer than they are"),
        Option(name="dry-run", help="only say what would be removed"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What can be said of a checkpoint."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


def ls(args: Sequence[str]) -> int:
    return _listed(_found(read(LS, args)), check_sizes)


def verify(args: Sequence[str]) -> int:
    return _listed(_found(read(VERIFY, args)), _check_bytes)


def prune(args: Sequence[str]) -> int:
    line = read(PRUNE, args)
    keep = line.integer("keep")
    if keep is None or keep < 1:
        raise ConfigError("checkpoints prune needs to know how many to keep, at least one: --keep N")
    found, whole = _found(line), 0
    while found and whole < keep:
        whole += not _look(found.pop(0), _check_bytes).problem
    if whole == 0:
        print("none of them is whole, so none is removed")
        return 1
    for path in found:
        print(f"{path} {'would be' if line.has('dry-run') else 'is'} removed")
    if not line.has("dry-run"):
        remove(found)
    return 0


VERBS = {LS: ls, VERIFY: verify, PRUNE: prune}


def _found(line: Line) -> list[Path]:
    """Newest first."""
    words = line.tool.words
    if not line.operands and not line.config:
        raise ConfigError(f"{words} needs a folder, or a run: async-rl {words} runs/NAME")
    folder = Path(line.operands[0]) if line.operands else load_any(line.config).run_folder
    if found := found_in(folder):
        return found
    raise ConfigError(f"there is no checkpoint in {folder}")


def _listed(found: Sequence[Path], check: Callable[[Path, Manifest], None]) -> int:
    looks = [_look(path, check) for path in found]
    rows = [("checkpoint", "written", "size", "ranks", "models", ""), *(_row(look) for look in looks)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 1 if any(look.problem for look in looks) else 0


def _row(look: Look) -> tuple[str, ...]:
    from rich.filesize import decimal

    name, state, manifest = look.path.name, look.problem if look.problem else "whole", look.manifest
    if manifest is None:
        return (name, "", "", "", "", state)
    written = datetime.fromtimestamp((look.path / MANIFEST).stat().st_mtime)
    size = sum(each.bytes for each in manifest.files.values())
    models = ", ".join(f"{name} after {facts.updates} updates" for name, facts in manifest.models.items())
    return (name, f"{written:%Y-%m-%d %H:%M:%S}", decimal(size), str(manifest.layout), models, state)


def _look(path: Path, check: Callable[[Path, Manifest], None]) -> Look:
    manifest = None
    try:
        manifest = read_manifest(path)
        check(path, manifest)
    except (Damaged, CheckpointError) as error:
        return Look(path=path, manifest=manifest, problem=str(error))
    return Look(path=path, manifest=manifest)


def _check_bytes(path: Path, manifest: Manifest) -> None:
    check_files(path, manifest, manifest.files)
