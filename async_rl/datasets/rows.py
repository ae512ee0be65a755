"""Readers of one file or saved folder: JSON lines, JSON, Parquet, and what the library `datasets` saved."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol, cast

from async_rl.errors import ConfigError

Row = Mapping[str, Any]


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row:
        """Read a row. Raises BadRow."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """Read all rows in order. Raises BadRow."""
        ...

    def place(self, number: int, /) -> str:
        """Location of a row, for error messages."""
        ...


class BadRow(ValueError):
    """A row is invalid. The message names its location."""


def read_file(file: Path) -> Rows:
    """Open a .jsonl, .json or .parquet file. Raises ConfigError."""
    if file.suffix == ".parquet":
        return _parquet(file)
    with file.open("rb") as text:
        is_list = text.read(4096).lstrip()[:1] == b"["
    return _json_list(file) if is_list and file.suffix == ".json" else JsonLines(file)


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
            return self._row(number, lines.readline())

    def __iter__(self) -> Iterator[Row]:
        with self._file.open("rb") as lines:
            for number, line in enumerate(line for line in lines if line.strip()):
                yield self._row(number, line)

    def place(self, number: int) -> str:
        with self._file.open("rb") as lines:
            before = lines.read(self._starts[number]).count(b"\n")
        return f"{self._file}:{before + 1}"

    def _row(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadRow(f"{self.place(number)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRow(f"{self.place(number)} is not a JSON object")
        return cast("Row", row)


class LibraryRows:
    """Rows that a library reads, which has no line numbers."""

    def __init__(
        self, num_rows: int, read: Callable[[int], Row], path: str | Path, *, read_all: Callable[[], Iterable[Row]]
    ) -> None:
        self._num_rows, self._read, self._path, self._read_all = num_rows, read, path, read_all

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int, /) -> Row:
        return self._read(number)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._read_all())

    def place(self, number: int) -> str:
        return f"row {number} of {self._path}"


class JoinedRows:
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, number: int, /) -> Row:
        part, inside = self._find(number)
        return part[inside]

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts)

    def place(self, number: int) -> str:
        part, inside = self._find(number)
        return part.place(inside)

    def _find(self, number: int) -> tuple[Rows, int]:
        chosen = bisect_right(self._begins, number) - 1
        return self._parts[chosen], number - self._begins[chosen]


def read_saved(folder: Path, split: str) -> Rows:
    """Open a folder written by `save_to_disk` of the library `datasets`. Raises ConfigError."""
    datasets = _library("datasets", folder)
    try:
        found: Any = datasets.load_from_disk(str(folder))
        dataset: Any = found[split] if isinstance(found, datasets.DatasetDict) else found
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"dataset {str(folder)!r} has no split {split!r} that can be opened: {error}") from error
    return LibraryRows(len(dataset), dataset.__getitem__, folder, read_all=lambda: dataset)


def is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _json_list(file: Path) -> Rows:
    try:
        rows: Any = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"dataset {file} is not JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"row {number} of {file} is not a JSON object")
    return LibraryRows(len(rows), rows.__getitem__, file, read_all=lambda: rows)


def _parquet(file: Path) -> Rows:
    """Open a Parquet file, which is memory-mapped."""
    parquet = _library("pyarrow.parquet", file)
    try:
        table: Any = parquet.read_table(file, memory_map=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {file} cannot be read: {error}") from error

    def read_all() -> Iterator[Row]:
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    return LibraryRows(table.num_rows, lambda number: table.slice(number, 1).to_pylist()[0], file, read_all=read_all)


def _library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"reading {path} needs the package {package}: pip install 'async-rl[datasets]'") from error
