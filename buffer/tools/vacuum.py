"""`buffer vacuum`: frees memory and disk that no ticket needs any more.

It refuses to run if the audit finds a problem, because the leftovers are then evidence.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.cli.grammar import CommandLine
from async_rl.errors import AsyncRLError
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, format_size, print_json, print_table

REWRITE_S = 600.0
"""Longest wait for a rewrite of the append-only file."""

_LEFTOVER = re.compile(r"temp-.*?(\d+)\.(?:aof|rdb)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedSpace:
    """Space that was freed, or with --dry-run would be."""

    what: str
    count: int = 0
    bytes: int = 0
    note: str = ""


async def vacuum(run: OpenRun, line: CommandLine) -> int:
    found = await run.buffer.audit()
    if not found.is_clean:
        console().print(f"nothing was freed, because the audit finds {len(found.problems)} problems; see `buffer audit`")
        return 1
    only_say = line.has("dry-run")
    freed = [
        await _kept(run, only_say=only_say),
        await _quarantined(run, wanted=line.has("quarantine"), only_say=only_say),
        await _remembered(run, only_say=only_say),
    ]
    if not run.config.redis.url:  # only an embedded server's files are ours
        freed += [_leftovers(run.config.redis_folder, only_say=only_say), await _append_only_file(run, only_say=only_say)]
    if line.has("json"):
        print_json({"dry_run": only_say, "freed": [asdict(part) for part in freed]})
    else:
        head = ("what", "count", "would free" if only_say else "freed", "")
        print_table(console(), head, ((part.what, part.count, format_size(part.bytes), part.note) for part in freed))
    return 0


async def _kept(run: OpenRun, *, only_say: bool) -> FreedSpace:
    """Delete spent groups that are kept for longer than `retention.keep_steps`; not those that wait for the archive."""
    what = "spent groups kept too long"
    if run.config.retention.archive:
        return FreedSpace(what=what, note="the learner deletes them when they are archived")
    run_state = await run.inspection.run_state()
    last = int(run_state.fields.get("saved", -1)) - int(run_state.fields.get("keep_steps", 0))
    found = await run.redis.run_command("zrangebyscore", run.redis.key("kept"), "-inf", last)
    tickets = [ticket.decode() for ticket in found]
    total = sum([len(payload) for ticket in tickets if (payload := await run.buffer.payload(ticket)) is not None])
    if tickets and not only_say:
        await run.buffer.discard(await run.buffer.fence(), tickets)
    return FreedSpace(what=what, count=len(tickets), bytes=total)


async def _quarantined(run: OpenRun, *, wanted: bool, only_say: bool) -> FreedSpace:
    """Delete quarantined payloads, only with --quarantine: they are evidence."""
    what, tickets = "refused payloads", [report["ticket"] for report in await run.buffer.quarantined()]
    payload_of = run.buffer.quarantined_payload
    total = sum([len(payload) for ticket in tickets if (payload := await payload_of(ticket)) is not None])
    if tickets and not wanted:
        return FreedSpace(what=what, note=f"--quarantine frees {format_size(total)} of {len(tickets)} payloads")
    if tickets and not only_say:
        await run.buffer.forget(tickets)
    return FreedSpace(what=what, count=len(tickets), bytes=total)


async def _remembered(run: OpenRun, *, only_say: bool) -> FreedSpace:
    """Delete the results of ended tickets, which only a worker that repeats a commit reads, so only if no worker is running."""
    what, name = "remembered endings", run.redis.key("ended")
    if not run.was_asleep:
        return FreedSpace(what=what, note="kept while the run's server is up: a worker may repeat a commit")
    count, taken = await run.redis.run_commands([("hlen", name), ("memory_usage", name)])
    if not only_say:
        await run.redis.run_command("unlink", name)
    return FreedSpace(what=what, count=count, bytes=0 if taken is None else taken)


def _leftovers(folder: Path, *, only_say: bool) -> FreedSpace:
    """Delete the half-written copies of servers that were killed."""
    files = list(_abandoned(folder))
    total = sum(file.stat().st_size for file in files)
    if not only_say:
        for file in files:
            file.unlink(missing_ok=True)
    return FreedSpace(what="leftover files", count=len(files), bytes=total)


def _abandoned(folder: Path) -> Iterator[Path]:
    """Yield temporary files, which are named after the writing process, if that is gone; none where /proc is missing."""
    if not Path("/proc/self").exists():
        return
    for pattern in ("temp-*", "appendonlydir/temp-*"):
        for file in folder.glob(pattern):
            writer = _LEFTOVER.fullmatch(file.name)
            if writer is not None and not Path(f"/proc/{writer[1]}").exists():
                yield file


async def _append_only_file(run: OpenRun, *, only_say: bool) -> FreedSpace:
    before = _size_on_disk(run.config.redis_folder)
    if only_say:
        return FreedSpace(what="append-only file", count=1, bytes=0, note=f"{format_size(before)} would be rewritten")
    await run.redis.run_command("bgrewriteaof")
    await _rewritten(run)
    after = _size_on_disk(run.config.redis_folder)
    return FreedSpace(what="append-only file", count=1, bytes=max(0, before - after), note=f"{format_size(after)} left")


async def _rewritten(run: OpenRun) -> None:
    deadline = time.monotonic() + REWRITE_S
    while True:
        facts: dict[str, Any] = await run.redis.run_command("info", "persistence")
        if not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]:
            break
        if time.monotonic() > deadline:
            raise AsyncRLError(f"the append-only file is still being rewritten after {REWRITE_S:g} s")
        await asyncio.sleep(0.05)  # the server does not say when it has finished
    if facts["aof_last_bgrewrite_status"] != "ok":
        raise AsyncRLError(f"the append-only file could not be rewritten; {run.config.redis_folder / 'redis.log'} says why")


def _size_on_disk(folder: Path) -> int:
    files = [*folder.glob("*.aof"), *folder.glob("appendonlydir/*")]
    return sum(file.stat().st_size for file in files if not file.name.startswith("temp-"))
