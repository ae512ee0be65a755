"""A table of examples in training order. The position is a number, so a resumed run continues with the right row."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The longest examples that can be trained."""

    row: int
    """Tokens of a packed row, which holds all texts of an example."""
    context: int
    """The model's context, for each text."""

    def holds(self, example: Example) -> bool:
        return len(example) <= self.row and max(map(len, example.texts)) <= self.context


class Table:
    def __init__(self, rows: Rows, read: ExampleReader, *, order: Epochs, limits: TokenLimits, drops: bool) -> None:
        self._rows, self._read, self._order = rows, read, order
        self._limits, self._drops = limits, drops

    @staticmethod
    def to_train(data: DataConfig, read: ExampleReader, limits: TokenLimits, *, seed: int) -> Table:
        rows = open_rows(data)
        order = Epochs(len(rows), seed=str(seed), is_shuffled=data.shuffle)
        return Table(rows, read, order=order, limits=limits, drops=data.too_long == "drop")

    @staticmethod
    def held_out(data: DataConfig, read: ExampleReader, limits: TokenLimits) -> Table | None:
        if data.held_out is None:
            return None
        rows = open_rows(data.held_out)
        order = Epochs(len(rows), seed="", is_shuffled=False)
        return Table(rows, read, order=order, limits=limits, drops=data.too_long == "drop")

    def __len__(self) -> int:
        return len(self._rows)

    def slice_at(self, start: int, count: int) -> TableSlice:
        """Read `count` rows from a position on, across epochs. Raises ConfigError for an invalid row."""
        found = [self._example(self._order.row(place)) for place in range(start, start + count)]
        kept = tuple(example for example in found if example is not None)
        return TableSlice(examples=kept, dropped=count - len(kept), end=start + count)

    def _example(self, number: int) -> Example | None:
        try:
            row = self._rows[number]
        except BadRow as error:
            raise ConfigError(str(error)) from error
        try:
            example = self._read(row)
        except ValueError as error:
            raise ConfigError(f"{self._rows.place(number)}: {error}") from error
        if self._limits.holds(example):
            return example
        if self._drops:
            return None
        raise ConfigError(
            f"{self._rows.place(number)} has {' + '.join(str(len(text)) for text in example.texts)} tokens, which is too long: "
            f"batch.bin_tokens is {self._limits.row}, and model.max_sequence or else the model's positions "
            f"{self._limits.context}; raise the one that it exceeds, or set data.too_long to drop"
        )
