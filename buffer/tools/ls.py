"""`buffer ls`: the groups that have not ended, one per line."""

from __future__ import annotations

from typing import Any

from async_rl.cli.grammar import CommandLine
from buffer.inspection import BufferedGroup
from buffer.rules.ticket_record import TicketRecord
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, format_size, print_json, print_table

LIMIT = 50


async def ls(run: OpenRun, line: CommandLine) -> None:
    state, environment, worker = line.text("state"), line.text("environment"), line.text("worker")
    older_than = line.integer("older-than")

    def is_wanted(record: TicketRecord) -> bool:
        return (
            state in (None, record.state)
            and environment in (None, record.environment)
            and worker in (None, record.worker)
            and (older_than is None or oldest_version(record) < older_than)
        )

    limit = line.integer("limit")
    chosen = await run.inspection.find_groups(is_wanted, LIMIT if limit is None else max(0, limit))
    live = (await run.inspection.run_state()).live_version
    rows = [describe(entry, live) for entry in chosen.groups]
    if line.has("json"):
        print_json({"groups": rows, "others": chosen.num_omitted, "unreadable": chosen.num_unreadable})
        return
    page = console()
    if rows:
        shown = [
            {**row, "steps": ",".join(map(str, entry.record.steps)), "bytes": format_size(entry.bytes)}
            for row, entry in zip(rows, chosen.groups, strict=True)
        ]
        print_table(page, [name.replace("_", " ") for name in rows[0]], (list(row.values()) for row in shown))
    else:
        page.print("no group matches" if line.chosen else "no group is in the buffer")
    if chosen.num_omitted:
        page.print(f"and about {chosen.num_omitted} more: --limit shows them")
    if chosen.num_unreadable:
        page.print(f"{chosen.num_unreadable} records are unreadable; `buffer audit` says which tickets are not accounted for")


def oldest_version(record: TicketRecord) -> int:
    """Return the oldest version of its tokens; for a ticket in flight its own version, because no token can be older."""
    return record.oldest if record.oldest >= 0 else record.version


def age(record: TicketRecord, live_version: int) -> int:
    """Return a group's age when it was taken; for one not taken yet, its age if it were taken now."""
    version = record.taken if record.state in ("taken", "kept") else live_version
    return max(0, version - oldest_version(record))


def describe(entry: BufferedGroup, live_version: int) -> dict[str, Any]:
    record = entry.record
    return {
        "id": entry.id,
        "state": record.state,
        "environment": record.environment if record.environment else None,
        "worker": record.worker,
        "attempt": record.attempt,
        "oldest_version": oldest_version(record),
        "age": age(record, live_version),
        "tokens": record.tokens,
        "steps": record.steps,
        "bytes": entry.bytes,
    }
