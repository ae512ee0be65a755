"""`buffer quarantine`: lists and shows refused payloads, makes valid ones ready again, deletes the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.cli.grammar import CommandLine, nearest
from async_rl.errors import ConfigError
from buffer.tools.find_group import find, full_id
from buffer.tools.open_run import OpenRun
from buffer.tools.output import Cell, console, format_size, moment, print_json, print_table, visible
from buffer.tools.show import show_group


async def ls(run: OpenRun, line: CommandLine) -> None:
    reports = await run.buffer.quarantined()
    if line.has("json"):
        print_json({"quarantine": reports})
        return
    page = console()
    if not reports:
        page.print("nothing is in quarantine")
        return
    print_table(page, ("id", "when", "environment", "worker", "size", "reason"), map(_row, reports))


async def show(run: OpenRun, line: CommandLine) -> None:
    ticket = await _refused(run, line.operands[0])
    show_group(await find(run, ticket), run, line)


async def release(run: OpenRun, line: CommandLine) -> int:
    """Make a group ready again; exit code 1 if it stays in quarantine."""
    ticket = await _refused(run, line.operands[0])
    answer = await run.buffer.readmit(ticket)
    if line.has("json"):
        print_json({"id": ticket, "released": answer == "stored", "answer": answer})
    else:
        said = "ready again" if answer == "stored" else f"stays in quarantine: {answer}"
        console().print(visible(f"{ticket}: {said}"))
    return 0 if answer == "stored" else 1


async def forget(run: OpenRun, line: CommandLine) -> None:
    tickets = [await _refused(run, text) for text in line.operands]
    await run.buffer.forget(tickets)
    if line.has("json"):
        print_json({"forgotten": tickets})
    else:
        console().print(f"forgotten: {', '.join(tickets)}")


async def _refused(run: OpenRun, text: str) -> str:
    ticket = full_id(text)
    known = [report["ticket"] for report in await run.buffer.quarantined()]
    if ticket not in known:
        raise ConfigError(f"{ticket} is not in quarantine{nearest(ticket, known)}")
    return ticket


def _row(report: Mapping[str, Any]) -> list[Cell]:
    where = report["environment"], report["worker"]
    return [report["ticket"], moment(report["time"]), *where, format_size(report["size"]), report["reason"]]
