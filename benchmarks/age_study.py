"""Measure what age costs: samples to a reward, final reward and collapses of objectives at fixed ages.

Every cell of the table is one `async-rl run` (task, objective, max_age, optimizer, seed) with `staleness.pace: full` and a
buffer that is kept full, so that groups are as old as max_age says. A finished cell is one line of docs/studies/age.jsonl;
cells that are there are not run again, and an interrupted one leaves nothing.

    python benchmarks/age_study.py --minutes 60                       # the next cells, in order of value
    python benchmarks/age_study.py --only 'even_digits/*/age8'        # some of them
    python benchmarks/age_study.py --report                           # the tables and plots of docs/studies/age.md
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import end_to_end
from age_parts.cells import CELLS, Cell
from age_parts.page import Line, read, report
from age_parts.runs import run

STUDIES = end_to_end.REPOSITORY / "docs" / "studies"
DATA, PAGE = STUDIES / "age.jsonl", STUDIES / "age.md"


def selected(patterns: Sequence[str]) -> list[Cell]:
    """Return the cells that match one of the patterns, which may leave out their last parts.

    Raises ValueError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(matches(cell, pattern) for cell in CELLS):
            raise ValueError(f"no cell matches {pattern!r}; cells are named as in {CELLS[0].name}")
    return [cell for cell in CELLS if not patterns or any(matches(cell, pattern) for pattern in patterns)]


def matches(cell: Cell, pattern: str) -> bool:
    return fnmatch(cell.name, pattern) or fnmatch(cell.name, pattern + "/*")


def collect(cells: Sequence[Cell], data: Path, *, minutes: float, run: Callable[[Cell], Line] = run) -> None:
    """Run the cells that `data` does not hold and append a line for each; start none after `minutes`."""
    begun = time.monotonic()
    missing = [cell for cell in cells if cell.name not in read(data)]
    for done, cell in enumerate(missing, start=1):
        if time.monotonic() - begun > 60 * minutes:
            print(f"{len(missing) - done + 1} cells are left for another call", file=sys.stderr)
            return
        line = run(cell)
        with data.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        print({name: value for name, value in line.items() if name != "curve"}, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CELL", help="TASK/OBJECTIVE/ageN/lrX/seedN, or its beginning; * is any"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no cell after this many minutes (default: go on)"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="the file with a line per finished cell")
    parser.add_argument("--report", action="store_true", help="run nothing: write the tables into the page, draw the plots")
    parser.add_argument("--list", action="store_true", help="run nothing: print the cells that are missing")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    end_to_end.exit_on_sigterm()
    try:
        cells = selected(args.only)
        if args.report:
            report(args.data, PAGE)
        elif args.list:
            print(*(cell.name for cell in cells if cell.name not in read(args.data)), sep="\n")
        else:
            collect(cells, args.data, minutes=args.minutes)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"age_study: {error}")


if __name__ == "__main__":
    main()
