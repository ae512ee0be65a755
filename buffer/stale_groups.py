"""Finds the groups that `take` is about to drop because they are too old, while their payloads are there: for the recording."""

from __future__ import annotations

import math

from async_rl.payloads.codec import BadPayload, decode
from async_rl.types import TakenGroup
from buffer.payloads.store import PayloadStore
from buffer.rules.selection import is_stale
from buffer.rules.ticket_record import BadRecord, parse_record
from buffer.run_in_redis import RunInRedis

LOOKED_AT = 32
"""Oldest ready groups that are looked at; scripts/take.lua drops as many at once."""
MOST = 8
"""Groups that are read: a learner that falls far behind must not spend its time on what it drops."""


async def find_stale(run: RunInRedis, payloads: PayloadStore, version: int) -> list[TakenGroup]:
    """Return ready groups that are too old to train `version`, at most `MOST`. Changes nothing."""
    asked = [("hget", run.key("state"), "max_age"), ("zrange", run.key("ready"), 0, LOOKED_AT - 1, False, True)]
    max_age, ready = await run.run_commands(asked)
    if max_age is None:
        return []
    bound = math.ceil(float(max_age))
    tickets = [ticket.decode() for ticket, oldest in ready if is_stale(int(oldest), version=version, age_bound=bound)][:MOST]
    if not tickets:
        return []
    [records], held = await run.run_commands([("hmget", run.key("records"), tickets)]), await payloads.read(tickets)
    found: list[TakenGroup] = []
    for record, payload in zip(records, held, strict=True):
        try:
            there = payloads.resolve(payload)
            if record is not None and there is not None:
                known = parse_record(record)
                found.append(
                    TakenGroup(
                        group=decode(there), version_at_commit=known.committed, version_at_take=version,
                        task_index=known.task_index, attempt=known.attempt,
                    )
                )  # fmt: skip
        except (BadPayload, BadRecord):  # it is dropped all the same
            continue
    return found
