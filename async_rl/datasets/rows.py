"""Opens datasets: JSON lines, Parquet, or anything that the library `datasets` opens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from async_rl.errors import ConfigError

Row = Mapping[str, Any]


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row:
        """Read a row. Raises BadRow."""
        ...

    def place(self, number: int) -> str:
        """Location of a row, for error messages."""
        ...


class BadRow(ValueError):
    """A row is invalid. The message names its location."""


def open_rows(path: str, split: str) -> Rows:
    """Open a .jsonl or .parquet file, a folder written by `save_to_disk`, or a dataset of the Hugging Face hub. Raises
    ConfigError."""
    file = Path(path)
    if file.suffix in (".jsonl", ".parquet") and not file.is_file():
        raise ConfigError(f"there is no dataset {path} in {Path.cwd()}")
    rows = _open(file, path, split)
    if not len(rows):
        raise ConfigError(f"dataset {path} has no rows")
    return rows


def _open(file: Path, path: str, split: str) -> Rows:
    if file.suffix == ".jsonl":
        return JsonLines(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    return _hugging_face(path, split)


class JsonLines:
    """JSON lines, read on access: stores only the offset of each line (8 bytes) and keeps no file open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._starts = array("Q")
        position = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    self._starts.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int, /) -> Row:
        with self._file.open("rb") as lines:
            lines.seek(self._starts[number])
            line = lines.readline()
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadRow(f"{self.place(number)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"{self.place(number)} is not a JSON object")
        return cast("Row", row)

    def place(self, number: int) -> str:
        with self._file.open("rb") as lines:
            before = lines.read(self._starts[number]).count(b"\n")
        return f"{self._file}:{before + 1}"


class LibraryRows:
    """Rows that a library reads, which has no line numbers."""

    def __init__(self, num_rows: int, read: Callable[[int], Row], path: str | Path) -> None:
        self._num_rows, self._read, self._path = num_rows, read, path

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int, /) -> Row:
        return self._read(number)

    def place(self, number: int) -> str:
        return f"row {number} of {self._path}"


def _parquet(file: Path) -> Rows:
    """Open a Parquet file, which is memory-mapped."""
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"reading {file} needs the package pyarrow: pip install 'async-rl[datasets]'") from error
    try:
        table: Any = parquet.read_table(file, memory_map=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {file} cannot be read: {error}") from error
    return LibraryRows(table.num_rows, lambda number: table.slice(number, 1).to_pylist()[0], file)


def _hugging_face(path: str, split: str) -> Rows:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"dataset {path!r} is not a .jsonl or .parquet file, so it needs the package datasets: "
            "pip install 'async-rl[datasets]'"
        ) from error
    saved = Path(path)
    try:
        if any((saved / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(path)
            dataset: Any = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            dataset = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"dataset {path!r} has no split {split!r} that can be opened: {error}") from error
    return LibraryRows(len(dataset), dataset.__getitem__, path)
