"""A table in the order in which it is learned. The position in it is a number, so a resumed run goes on with the right row."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config.training import DataConfig
from async_rl.datasets.order import Epochs
from async_rl.datasets.rows import BadRow, Rows, open_rows
from async_rl.errors import ConfigError
from learner.training.examples import Example, ExampleReader


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSlice:
    """Of a table: what one step learns from."""

    examples: tuple[Example, ...]
    dropped: int
    """Rows in it that were too long."""
    end: int
    """The position behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """For tokens."""

    row: int
    """Of a packed row, which holds all texts of an example."""
    context: int
    """Of the model, for each of them."""

    def holds(self, example: Example) -> bool:
        return len(example) <= self.row and max(map(len, example.texts)) <= self.context


class Table:
    def __init__(self, rows: Rows, read: ExampleReader, *, order: Epochs, room: TokenLimits, drops: bool) -> None:
        self._rows, self._read, self._order = rows, read, order
        self._room, self._drops = room, drops

    @staticmethod
    def to_train(data: DataConfig, read: ExampleReader, room: TokenLimits, *, seed: int) -> Table:
        rows = open_rows(data.place, data.split)
        order = Epochs(len(rows), seed=str(seed), is_shuffled=data.shuffle)
        return Table(rows, read, order=order, room=room, drops=data.too_long == "drop")

    @staticmethod
    def held_out(data: DataConfig, read: ExampleReader, room: TokenLimits) -> Table | None:
        if data.held_out is None:
            return None
        rows = open_rows(data.held_out.place, data.held_out.split)
        order = Epochs(len(rows), seed="", is_shuffled=False)
        return Table(rows, read, order=order, room=room, drops=data.too_long == "drop")

    def __len__(self) -> int:
        return len(self._rows)

    def portion(self, start: int, count: int) -> TableSlice:
        """From a position on; epochs follow each other. Raises ConfigError for rows that cannot be learned from."""
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
        if self._room.holds(example):
            return example
        if self._drops:
            return None
        raise ConfigError(
            f"{self._rows.place(number)} has {' + '.join(str(len(text)) for text in example.texts)} tokens, which is too long: "
            f"batch.bin_tokens is {self._room.row}, and the model's context {self._room.context}; raise the one that is too "
            "small, or set data.too_long to drop"
        )
