"""Finds the files of a subset and a split: in a local folder, or in a dataset on the Hugging Face Hub, which is fetched.

The card (README.md) of a dataset may list its subsets with the files of each split. Without it, folders and names of files say
which split they belong to: data/train-00000-of-00001.parquet, main/test/0000.parquet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import yaml

from async_rl.config.hub.datasets import README, SUFFIXES
from async_rl.config.hub.snapshot import hub_snapshot
from async_rl.errors import ConfigError

KNOWN_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")

Splits = Mapping[str, tuple[str, ...]]
"""Patterns of files by the name of a split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFiles:
    """What to look for. All three are given, `subset` may be empty."""

    dataset: str
    """Its name, for messages."""
    subset: str
    split: str


def files_on_hub(name: str, revision: str, subset: str, split: str) -> list[Path]:
    """Fetch the files of a split of a dataset on the Hub, unless they are in its cache. Raises ConfigError."""
    asked = SplitFiles(dataset=name, subset=subset, split=split)
    folder = hub_snapshot("dataset", name, revision, (README,))
    card = _card_splits(folder, asked)
    inside = f"{subset}/" if subset else ""
    patterns = _widened(_patterns(card, asked)) if card is not None else [f"{inside}*{suffix}" for suffix in SUFFIXES]
    return _in_folder(hub_snapshot("dataset", name, folder.name, tuple(patterns)), card, asked)


def files_in_folder(folder: Path, subset: str, split: str) -> list[Path]:
    """The files of a split in a local folder. Raises ConfigError."""
    asked = SplitFiles(dataset=str(folder), subset=subset, split=split)
    return _in_folder(folder, _card_splits(folder, asked), asked)


def _in_folder(folder: Path, card: Splits | None, asked: SplitFiles) -> list[Path]:
    paths = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    if card is not None:
        patterns = _widened(_patterns(card, asked))
        chosen = [path for path in visible if any(fnmatchcase(path.as_posix(), pattern) for pattern in patterns)]
    else:
        chosen = _by_name([path for path in visible if path.suffix in SUFFIXES], asked)
    files = [folder / path for path in chosen if path.suffix in SUFFIXES]
    if not files:
        found = sorted({path.suffix for path in (chosen if chosen else visible) if path.suffix and path.name != README})
        raise ConfigError(
            f"dataset {asked.dataset} has no {', '.join(SUFFIXES)} files in split {asked.split!r}"
            + (f", only {', '.join(found)}" if found else "")
            + "; for most datasets the Hub keeps Parquet files at revision: refs/convert/parquet"
        )
    return files


def _by_name(paths: Sequence[Path], asked: SplitFiles) -> list[Path]:
    inside = [path for path in paths if path.parts[0] == asked.subset] if asked.subset else list(paths)
    if asked.subset and not inside:
        folders = sorted({path.parts[0] for path in paths if len(path.parts) > 1})
        has = f"; it has the folders {', '.join(folders)}" if folders else ""
        raise ConfigError(f"dataset {asked.dataset} has no subset {asked.subset!r}{has}")
    named = {split for split in KNOWN_SPLITS if any(_is_of(path, split) for path in inside)}
    chosen = [path for path in inside if _is_of(path, asked.split)]
    if not chosen and (named or asked.split != "train"):
        has = f"; its files are named after {', '.join(sorted(named))}" if named else ", only train"
        raise ConfigError(f"dataset {asked.dataset} has no split {asked.split!r}{has}")
    chosen = chosen if chosen else inside
    subsets = {path.parts[0] for path in chosen if len(path.parts) > 1 and not _is_of(Path(path.parts[0]), asked.split)}
    if not asked.subset and len(subsets) > 1:
        raise ConfigError(f"dataset {asked.dataset} has several subsets: set subset to one of {', '.join(sorted(subsets))}")
    return chosen


def _is_of(path: Path, split: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(split.lower())}(?![a-z0-9])", path.as_posix().lower()) is not None


def _card_splits(folder: Path, asked: SplitFiles) -> Splits | None:
    """The patterns of the subset's splits; None if the card lists no files. Raises ConfigError for an unknown subset."""
    subsets = dict(_card_subsets(folder))
    if not subsets:
        return None
    names = ", ".join(subsets)
    if asked.subset:
        if asked.subset not in subsets:
            raise ConfigError(f"dataset {asked.dataset} has no subset {asked.subset!r}; it has {names}")
        return subsets[asked.subset]
    if len(subsets) > 1 and "default" not in subsets:
        raise ConfigError(f"dataset {asked.dataset} has several subsets: set subset to one of {names}")
    return subsets["default"] if "default" in subsets else next(iter(subsets.values()))


def _card_subsets(folder: Path) -> Iterator[tuple[str, Splits]]:
    """The subsets in the header of the card that name files. The one marked as default is also called `default`."""
    card = folder / README
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        said: Any = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:
        return
    configs: Any = cast("Any", said).get("configs") if isinstance(said, dict) else None
    for config in cast("list[Any]", configs) if isinstance(configs, list) else []:
        described = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
        splits = _splits(described.get("data_files"))
        if splits:
            yield str(described.get("config_name", "default")), splits
            if described.get("default"):
                yield "default", splits


def _splits(data_files: Any) -> Splits:
    """The three forms of `data_files`: patterns of train, patterns by split, or a list of {split, path}."""
    if isinstance(data_files, dict):
        return {str(split): _texts(paths) for split, paths in cast("dict[Any, Any]", data_files).items()}
    entries = cast("list[Any]", data_files) if isinstance(data_files, list) else [data_files]
    splits: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        described = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"path": entry}
        split = str(described.get("split", "train"))
        if paths := _texts(described.get("path")):
            splits[split] = splits.get(split, ()) + paths
    return splits


def _texts(paths: Any) -> tuple[str, ...]:
    listed = cast("list[Any]", paths) if isinstance(paths, list) else [paths]
    return tuple(path for path in listed if isinstance(path, str))


def _patterns(card: Splits, asked: SplitFiles) -> tuple[str, ...]:
    if asked.split not in card:
        of = f" in subset {asked.subset}" if asked.subset else ""
        raise ConfigError(f"dataset {asked.dataset} has no split {asked.split!r}{of}; it has {', '.join(card)}")
    return card[asked.split]


def _widened(patterns: Iterable[str]) -> list[str]:
    """The patterns for fnmatch, whose `*` also matches slashes: `**/` may be empty, and a folder stands for its files."""
    plain = [pattern.removeprefix("./").rstrip("/") for pattern in patterns]
    return [each for pattern in plain for each in (pattern, pattern.replace("**/", ""), f"{pattern}/*")]
