"""Finds a group in the buffer, in quarantine or in the archive, or tells how its ticket ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.payloads.codec import BadPayload, decode
from async_rl.types import RolloutGroup
from buffer.archive.reading import find as find_archived
from buffer.keys import ticket_id, ticket_number
from buffer.rules.ticket_record import BadRecord
from buffer.tools.ls import describe
from buffer.tools.open_run import OpenRun

_ID = re.compile(r"t?0*(\d{1,15})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroup:
    """Where a group is, in a word and in a sentence."""

    id: str
    place: str
    """buffer | quarantine | archive | ended"""
    facts: Mapping[str, Any]
    sentence: str
    group: RolloutGroup | None = None


def full_id(text: str) -> str:
    """Return the id of a ticket that was written as `7`, `t7` or t000000007. Raises ConfigError."""
    found = _ID.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not the id of a group; ids look like {ticket_id(7)}, or 7 for short")
    return ticket_id(int(found[1]))


async def find(run: OpenRun, text: str) -> FoundGroup:
    ticket = full_id(text)
    for look in (_in_buffer, _in_quarantine, _in_archive):
        if (found := await look(run, ticket)) is not None:
            return found
    return await _ended(run, ticket)


async def _in_buffer(run: OpenRun, ticket: str) -> FoundGroup | None:
    try:
        entry = await run.inspection.group(ticket)
    except BadRecord as error:
        raise ConfigError(f"{ticket}: {error}; see `buffer audit`") from error
    if entry is None:
        return None
    facts = describe(entry, (await run.inspection.run_state()).live_version)
    if entry.record.state == "reserved":
        return FoundGroup(id=ticket, place="buffer", facts=facts, sentence=f"worker {entry.record.worker} is rolling it out")
    group, problem = _decoded(await run.buffer.payload(ticket))
    steps = f"step {', '.join(map(str, entry.record.steps))}"
    sentences = {
        "ready": "ready for the learner",
        "again": f"trained in {steps}, and ready for another",
        "taken": f"taken for {steps}",
        "kept": f"spent in {steps}, and still kept",
    }
    return FoundGroup(
        id=ticket,
        place="buffer",
        facts=facts,
        sentence="; ".join(part for part in (sentences[entry.record.state], problem) if part),
        group=group,
    )


async def _in_quarantine(run: OpenRun, ticket: str) -> FoundGroup | None:
    for report in await run.buffer.quarantined():
        if report["ticket"] == ticket:
            group, problem = _decoded(await run.buffer.quarantined_payload(ticket))
            sentence = f"quarantined, because {report['reason']}"
            return FoundGroup(
                id=ticket,
                place="quarantine",
                facts=report,
                sentence=f"{sentence}; {problem}" if problem else sentence,
                group=group,
            )
    return None


async def _in_archive(run: OpenRun, ticket: str) -> FoundGroup | None:
    folder = run.config.archive_folder
    archived = find_archived(folder, ticket) if folder.exists() else None
    if archived is None:
        return None
    step, group = archived
    return FoundGroup(
        id=ticket, place="archive", facts={"step": step}, sentence=f"spent in step {step}, from the archive", group=group
    )


async def _ended(run: OpenRun, ticket: str) -> FoundGroup:
    issued = (await run.inspection.run_state()).next_ticket
    if ticket_number(ticket) >= issued:
        last = f"the last one was {ticket_id(issued - 1)}" if issued else "none was yet"
        raise ConfigError(f"{ticket} was never issued; {last}")
    answer = await run.inspection.ended(ticket)
    return FoundGroup(id=ticket, place="ended", facts={"answer": answer}, sentence=_ENDINGS.get(answer, _FORGOTTEN))


_FORGOTTEN = "it has ended, and nothing of it is kept"
_ENDINGS: Mapping[str | None, str] = {
    "already": "it was committed, then trained on or dropped as stale; its payload is missing",
    "no_signal": "its rewards were all equal, so it was dropped",
    "lease_lost": "its worker lost it or handed it back, and its task was rolled again",
    "quarantined": "its payload was refused, and the report on it is gone",
}


def _decoded(payload: bytes | None) -> tuple[RolloutGroup | None, str]:
    """Return the group and "", or None and the reason."""
    if payload is None:
        return None, "its payload is missing"
    try:
        return decode(payload), ""
    except BadPayload as error:
        return None, f"its payload of {len(payload)} bytes cannot be read: {error}"
