"""`buffer stats`: counts, rates, and what the learner waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from async_rl.cli.grammar import CommandLine
from async_rl.replay_protocol import BufferStats
from buffer.inspection import RunState, Tally
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, format_size, print_json, print_table, visible

WATCH_S = 1.0
DROPPED = "dropped:"
RARE = ("again", "kept", "expired", "owed", "starving", "lost_to_rollback")
"""Omitted from the table while they are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReading:
    moment: float
    stats: BufferStats
    tally: Tally
    run_state: RunState


async def stats(run: OpenRun, line: CommandLine) -> None:
    over = line.number("over")
    before = await _read(run) if over is not None else None
    await asyncio.sleep(over if over is not None else 0)
    now = await _read(run)
    _show(now, before, line, console())
    while line.has("watch"):
        await asyncio.sleep(WATCH_S)  # a clock: there is nothing else to wait for
        before, now = now, await _read(run)
        page = console()
        page.clear()
        _show(now, before, line, page)


def waits_for(run_state: RunState, held: BufferStats) -> str:
    ready = held.ready + held.again
    if not run_state.learner:
        return "no learner holds the run"
    if held.starving:
        return f"{run_state.learner}: commits wait for memory that only its next checkpoint can free"
    if run_state.wanted == 0:
        return f"{run_state.learner}: waits for nothing"
    if ready < run_state.wanted:
        return f"{run_state.learner}: waits for {run_state.wanted} groups, {ready} are ready, {held.reserved} in flight"
    if "samples_per_insert" in run_state.fields:
        return f"{run_state.learner}: waits for fresh groups, to keep to samples_per_insert"
    return (
        f"{run_state.learner}: waits for stragglers; {ready} groups are ready and it wants {run_state.wanted}, but some of the "
        f"{held.reserved} in flight would become too old if they were overtaken"
    )


async def _read(run: OpenRun) -> StatsReading:
    held = await run.buffer.stats()
    tally, run_state = await run.inspection.tally(), await run.inspection.run_state()
    return StatsReading(moment=time.monotonic(), stats=held, tally=tally, run_state=run_state)


def _show(now: StatsReading, before: StatsReading | None, line: CommandLine, page: Console) -> None:
    held, rates = now.stats, _rates(now, before)
    if line.has("json"):
        print_json(_as_document(now, rates))
        return
    print_stats(page, held, ages=_ages(held))
    page.print(f"{'learner':<12} {visible(waits_for(now.run_state, held))}")
    if before is not None:
        page.print(f"{'per second':<12} {', '.join(f'{what} {rate:.4g}' for what, rate in rates.items())}")
    for kind, table in (("environment", now.tally.environments), ("worker", now.tally.workers)):
        if table:
            page.print()
            _print_counts(page, kind, table)


def _ages(held: BufferStats) -> dict[int, int]:
    """Return age -> number of ready groups, as if they were trained now."""
    by_version = sorted(held.ready_by_version.items(), reverse=True)
    return {max(0, held.version - version): count for version, count in by_version}


def _rates(now: StatsReading, before: StatsReading | None) -> dict[str, float | None]:
    """Return counts per second since an earlier reading; None without one."""
    return {
        what: None if before is None else (now.tally.total(what) - before.tally.total(what)) / (now.moment - before.moment)
        for what in ("stored", "spent", "tokens", "bytes")
    }


def print_stats(page: Console, held: BufferStats, *, ages: Mapping[int, int]) -> None:
    notes = {
        "ready": ", ".join(f"age {age}: {count}" for age, count in ages.items()),
        "dropped": ", ".join(f"{visible(reason)}: {count}" for reason, count in sorted(held.dropped.items())),
        "slots": f"{held.slots_used} used",
    }
    for name, value in _numbers(held).items():
        if value or name not in RARE:
            shown = format_size(value) if name == "bytes" else f"{value:g}" if isinstance(value, float) else str(value)
            page.print(f"{name:<12} {shown:>10}  {notes.get(name, '')}".rstrip())


def _numbers(held: BufferStats) -> dict[str, int | float]:
    """Return the counters by name; a counter of several kinds is summed."""
    fields: dict[str, int | float | Mapping[str, int]] = asdict(held)
    shown = {name: value for name, value in fields.items() if name not in ("ready_by_version", "slots_used")}
    return {name: sum(value.values()) if isinstance(value, Mapping) else value for name, value in shown.items()}


def _print_counts(page: Console, kind: str, table: Mapping[str, Mapping[str, int]]) -> None:
    drops = sorted({what for counts in table.values() for what in counts if what.startswith(DROPPED)})
    head = [kind, "stored", "tokens", "size", "spent", "quarantined", *(what.removeprefix(DROPPED) for what in drops)]
    print_table(
        page,
        head,
        (
            [
                name if name else "(unknown)",
                counts.get("stored", 0),
                counts.get("tokens", 0),
                format_size(counts.get("bytes", 0)),
                *(counts.get(what, 0) for what in ("spent", "quarantined", *drops)),
            ]
            for name, counts in sorted(table.items())
        ),
    )


def _as_document(now: StatsReading, rates: Mapping[str, float | None]) -> dict[str, Any]:
    return {
        **asdict(now.stats),
        "ages": _ages(now.stats),
        "learner": now.run_state.learner,
        "wanted": now.run_state.wanted,
        "waits_for": waits_for(now.run_state, now.stats),
        "environments": now.tally.environments,
        "workers": now.tally.workers,
        "per_second": rates,
    }
