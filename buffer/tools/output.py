"""Prints tables for people and JSON for programs.

Names, reasons and conversations come from workers and models, so control characters are shown as pictures and never sent to the
terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from async_rl.payloads.as_json import dump_json
from async_rl.run_folders.visible_text import visible as visible

Cell = str | int | float | None

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """Return a console; into a pipe it writes no colours and breaks no line."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def one_line(text: str, width: int) -> str:
    """Return the beginning of a text as one line."""
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def format_size(count: float) -> str:
    for unit in _SIZES:
        if count < 1024 or unit == _SIZES[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def moment(seconds: float) -> str:
    """Return a time since 1970 as local date and time."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def print_json(document: object) -> None:
    print(dump_json(document), flush=True)


def print_table(page: Console, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print aligned columns, numbers to the right; the last column is not cut."""
    cells = [list(row) for row in rows]
    shown = [[_text(cell) for cell in row] for row in cells]
    at_right = [any(isinstance(row[column], int | float) for row in cells) for column in range(len(head))]
    widths = [max(cell_len(row[column]) for row in (list(head), *shown)) for column in range(len(head))]
    page.print(Text(_line(head, widths, at_right), "bold"))
    for row in shown:
        page.print(Text(_line(row, widths, at_right)))


def _line(cells: Sequence[str], widths: Sequence[int], at_right: Sequence[bool]) -> str:
    padded: list[str] = []
    for text, width, right in zip(cells, widths, at_right, strict=True):
        space = " " * (width - cell_len(text))
        padded.append(space + text if right else text + space)
    return "  ".join(padded).rstrip()


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else visible(str(cell))
