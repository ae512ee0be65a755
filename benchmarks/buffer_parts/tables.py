"""Prints the figures as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Figures = Mapping[str, float | None]


def transport_table(figures: Figures, sizes: Iterable[str], others: Sequence[str]) -> str:
    """Print rollouts per second of each side, and the ratio of ours to it."""
    rows = [["rollouts/s", *(cell for size in sizes for cell in (size, "ours is"))]]
    rows.append(["ours", *(cell for size in sizes for cell in (_number(figures[f"round_trip_{size}_per_s"], 0), ""))])
    for other in others:
        row = [other]
        for size in sizes:
            ratio = figures[f"round_trip_{size}_vs_{other}"]
            row += [_number(figures[f"{other}_{size}_per_s"], 0), "-" if ratio is None else f"{ratio:.2f} x"]
        rows.append(row)
    return _aligned(rows)


def script_table(figures: Figures, names: Sequence[str]) -> str:
    rows = [["script", "mean ms", "max ms"]]
    rows += [[name, *(_number(figures[f"script_{name}_{what}_ms"], 3) for what in ("mean", "max"))] for name in names]
    return _aligned([*rows, ["slowest call", "", _number(figures["script_max_ms"], 3)]])


def plain_table(figures: Figures) -> str:
    return _aligned([[name, _number(value, 2)] for name, value in figures.items()])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{first:{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        for first, *rest in rows
    ]
    return "\n".join([*lines, ""])
