"""A table of examples in training order. The position is a number, so a resumed run continues with the right row.

Several datasets are dealt as a run deals tasks to environments: by weight, evenly spread, each in epochs of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_rl.board.environment_mix import PERIOD, apportion, interleave
from async_rl.config.training import DataConfig
from async_rl.datasets.opening import open_rows
from async_rl.datasets.order import Epochs
from async_rl.datasets.rows import BadRow, Rows
from async_rl.errors import ConfigError
from learner.training.examples import Example, ExampleReader


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSlice:
    examples: tuple[Example, ...]
    dropped: int
    """Rows left out because they were too long."""
    end: int
    """The position after it."""
    by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples of each dataset, if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The longest examples that can be trained."""

    row: int
    """Tokens of a packed row, which holds all texts of an example."""
    context: int
    """The model's context, for each text."""

    def holds(self, example: Example) -> bool:
        return len(example) <= self.row and max(map(len, example.texts)) <= self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """A dataset of a table."""

    name: str
    rows: Rows
    read: ExampleReader
    order: Epochs
    weight: float = 1.0


class Table:
    def __init__(self, parts: Sequence[TablePart], *, limits: TokenLimits, drops: bool) -> None:
        self._parts, self._limits, self._drops = parts, limits, drops
        self._shares = apportion([part.weight for part in parts], PERIOD)
        self._round = interleave(self._shares)

    @staticmethod
    def to_train(data: DataConfig, read: ExampleReader, limits: TokenLimits, *, seed: int) -> Table:
        """Open the datasets; `read` reads rows of `data` if it is only one. Raises ConfigError."""
        parts: list[TablePart] = []
        for dataset in data.datasets:
            rows = open_rows(dataset)
            order = Epochs(len(rows), seed=f"{seed}/{dataset.label}", is_shuffled=data.shuffle)
            reader = read.for_dataset(dataset)
            parts.append(TablePart(name=dataset.label, rows=rows, read=reader, order=order, weight=dataset.weight))
        if not parts:
            rows = open_rows(data)
            parts = [
                TablePart(name="", rows=rows, read=read, order=Epochs(len(rows), seed=str(seed), is_shuffled=data.shuffle))
            ]
        return Table(parts, limits=limits, drops=data.too_long == "drop")

    @staticmethod
    def held_out(data: DataConfig, read: ExampleReader, limits: TokenLimits) -> Table | None:
        if data.held_out is None:
            return None
        rows = open_rows(data.held_out)
        part = TablePart(
            name="", rows=rows, read=read.for_dataset(data.held_out), order=Epochs(len(rows), seed="", is_shuffled=False)
        )
        return Table([part], limits=limits, drops=data.too_long == "drop")

    def __len__(self) -> int:
        """Rows of all datasets."""
        return sum(len(part.rows) for part in self._parts)

    def slice_at(self, start: int, count: int) -> TableSlice:
        """Read `count` rows from a position on, across epochs. Raises ConfigError for an invalid row."""
        dealt = [self._dealt(place) for place in range(start, start + count)]
        found = [(part.name, example) for part, row in dealt if (example := self._example(part, row)) is not None]
        counts = Counter(name for name, _ in found)
        return TableSlice(
            examples=tuple(example for _, example in found),
            dropped=count - len(found),
            end=start + count,
            by_dataset={part.name: counts[part.name] for part in self._parts} if len(self._parts) > 1 else {},
        )

    def _dealt(self, place: int) -> tuple[TablePart, int]:
        """The dataset at a place, and its row."""
        rounds, inside = divmod(place, PERIOD)
        chosen, earlier = self._round[inside]
        part = self._parts[chosen]
        return part, part.order.row(rounds * self._shares[chosen] + earlier)

    def _example(self, part: TablePart, number: int) -> Example | None:
        try:
            row = part.rows[number]
        except BadRow as error:
            raise ConfigError(str(error)) from error
        try:
            example = part.read(row)
        except ValueError as error:
            raise ConfigError(f"{part.rows.place(number)}: {error}") from error
        if self._limits.holds(example):
            return example
        if self._drops:
            return None
        raise ConfigError(
            f"{part.rows.place(number)} has {' + '.join(str(len(text)) for text in example.texts)} tokens, which is too long: "
            f"batch.bin_tokens is {self._limits.row}, and model.max_sequence or else the model's positions "
            f"{self._limits.context}; raise the one that it exceeds, or set data.too_long to drop"
        )
