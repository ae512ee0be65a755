"""Opens a dataset of a configuration: its files, the part of the split, and the rows that its filters keep."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.config.hub.datasets import SPLIT, DatasetConfig
from async_rl.datasets.columns import meets
from async_rl.datasets.files import files_in_folder, files_on_hub
from async_rl.datasets.rows import BadRow, JoinedRows, Row, Rows, is_saved, read_file, read_saved
from async_rl.errors import ConfigError


class DatasetRows:
    """The rows of a split that its slice and the filters leave."""

    def __init__(self, rows: Rows, numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int, /) -> Row:
        return self._rows[self._numbers[place]]

    def __iter__(self) -> Iterator[Row]:
        return (self[place] for place in range(len(self)))

    def place(self, place: int) -> str:
        return self._rows.place(self._numbers[place])

    def number(self, place: int) -> int:
        """The row's number in its split, which no slice and no filter changes."""
        return self._numbers[place]


def open_rows(dataset: DatasetConfig) -> DatasetRows:
    """Open a dataset, fetching it from the Hub if it is named there. Raises ConfigError."""
    rows = _split_rows(dataset)
    numbers = _slice(dataset.split, len(rows))
    if not numbers:
        raise ConfigError(f"dataset {dataset.path} has no rows" + (f" in {dataset.split}" if len(rows) else ""))
    return DatasetRows(rows, _kept(dataset, rows, numbers) if dataset.filters else numbers)


def split_name(split: str) -> str:
    """The split without its slice: train of train[:95%]."""
    return split.partition("[")[0]


def _split_rows(dataset: DatasetConfig) -> Rows:
    split = split_name(dataset.split)
    place = Path(dataset.place)
    if dataset.revision and not dataset.is_on_hub:
        raise ConfigError(f"revision {dataset.revision!r} belongs to a dataset on the Hub, but {dataset.path} is not one")
    if place.is_file():
        if dataset.subset:
            raise ConfigError(f"subset {dataset.subset!r} belongs to a folder or a dataset on the Hub, but {place} is a file")
        return read_file(place)
    if place.is_dir() and is_saved(place):
        return read_saved(place, split)
    if place.is_dir():
        files = files_in_folder(place, dataset.subset, split)
    elif dataset.is_on_hub:
        files = files_on_hub(dataset.path, dataset.revision, dataset.subset, split)
    else:
        raise ConfigError(f"there is no dataset {dataset.path} in {Path.cwd()}")
    return JoinedRows([read_file(file) for file in files])


def _slice(split: str, num_rows: int) -> range:
    """The rows of `train[10%:20%]`, as Python slices them; percentages are rounded to whole rows."""
    found = SPLIT.fullmatch(split)
    assert found is not None, "checked by the configuration"
    start, stop = (_row(found[border], num_rows) for border in ("start", "stop"))
    return range(num_rows)[start:stop]


def _row(border: str | None, num_rows: int) -> int | None:
    if border is None:
        return None
    return round(int(border[:-1]) / 100 * num_rows) if border.endswith("%") else int(border)


def _kept(dataset: DatasetConfig, rows: Rows, numbers: range) -> Sequence[int]:
    try:
        kept = array(
            "Q",
            (
                number
                for number, row in enumerate(rows)
                if number in numbers and all(meets(row, condition) for condition in dataset.filters)
            ),
        )
    except BadRow as error:
        raise ConfigError(str(error)) from error
    if not kept:
        columns = ", ".join(rows[numbers[0]])
        raise ConfigError(f"the filters leave none of the {len(numbers)} rows of dataset {dataset.path}, which has {columns}")
    return kept
