"""Reads what a run's buffer holds, for the command line; changes nothing.

It reads key by key and in chunks, so that listing a million groups never blocks the server. The result is therefore not a
snapshot; `RedisBuffer.audit` is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from buffer.rules.ticket_record import BadRecord, TicketRecord, parse_record
from buffer.run_in_redis import RunInRedis

AT_ONCE = 1000
"""Records per reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    id: str
    record: TicketRecord
    bytes: int
    """Size of its payload or reference; 0 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingGroups:
    groups: Sequence[BufferedGroup]
    num_omitted: int
    """Groups beyond the limit that matched too."""
    num_unreadable: int
    """Records that cannot be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts since the run began."""

    environments: Mapping[str, Mapping[str, int]]
    """Environment -> what was counted -> count."""
    workers: Mapping[str, Mapping[str, int]]

    def total(self, what: str) -> int:
        return sum(counts.get(what, 0) for counts in self.environments.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What the run's learner is doing and waiting for."""

    live_version: int
    learner: str
    """The learner that holds the run's lease; empty if none does."""
    wanted: int
    """Groups that a waiting learner still needs; 0 while it does not wait."""
    next_ticket: int
    fields: Mapping[str, str]
    """The hash `state` as it stands in Redis."""


class Inspection:
    def __init__(self, run: RunInRedis) -> None:
        self._run = run

    async def find_groups(self, wanted: Callable[[TicketRecord], bool], limit: int) -> MatchingGroups:
        """Return the first `limit` groups that `wanted` accepts, in the order of admission."""
        found: dict[str, TicketRecord] = {}
        matched = unreadable = 0
        async for records in self._run.unparsed_records(AT_ONCE):  # a ticket may come twice
            for name, text in records.items():
                ticket, record = name.decode(errors="replace"), _parsed(text)
                if record is None:
                    unreadable += 1
                elif wanted(record):
                    matched += ticket not in found
                    found[ticket] = record
            if len(found) > limit + AT_ONCE:
                found = dict(sorted(found.items())[:limit])
        first = dict(sorted(found.items())[:limit])
        return MatchingGroups(groups=await self._with_sizes(first), num_omitted=matched - len(first), num_unreadable=unreadable)

    async def group(self, ticket: str) -> BufferedGroup | None:
        """Return one group; None if its ticket has ended. Raises BadRecord."""
        text = await self._run.run_command("hget", self._run.key("records"), ticket)
        return None if text is None else (await self._with_sizes({ticket: parse_record(text)}))[0]

    async def ended(self, ticket: str) -> str | None:
        """Return the result that a repeated commit of an ended ticket gets; None if it is not remembered."""
        answer = await self._run.run_command("hget", self._run.key("ended"), ticket)
        return None if answer is None else answer.decode()

    async def tally(self) -> Tally:
        counted: dict[bytes, bytes] = await self._run.run_command("hgetall", self._run.key("tally"))
        tables: dict[str, dict[str, Counter[str]]] = {"environment": {}, "worker": {}}
        for field, count in counted.items():
            kind, _, rest = field.decode().partition("|")
            name, _, what = rest.rpartition("|")
            tables[kind].setdefault(name, Counter())[what] += int(count)
        return Tally(environments=tables["environment"], workers=tables["worker"])

    async def run_state(self) -> RunState:
        fields: dict[bytes, bytes] = await self._run.run_command("hgetall", self._run.key("state"))
        state = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
        owner, expires = await self._run.run_command("hmget", self._run.key("learner"), "owner", "expires")
        now_s, _ = await self._run.run_command("time")
        return RunState(
            live_version=int(state.get("live", -1)),
            learner=owner.decode(errors="replace") if owner is not None and float(expires or 0) > now_s * 1000 else "",
            wanted=int(state.get("wanted", 0)),
            next_ticket=int(state.get("next_ticket", 0)),
            fields=state,
        )

    async def _with_sizes(self, found: Mapping[str, TicketRecord]) -> list[BufferedGroup]:
        sizes = await self._run.run_commands([("hstrlen", self._run.key("payloads"), ticket) for ticket in found])
        return [
            BufferedGroup(id=ticket, record=record, bytes=size)
            for (ticket, record), size in zip(found.items(), sizes, strict=True)
        ]


def _parsed(text: bytes) -> TicketRecord | None:
    try:
        return parse_record(text)
    except BadRecord:
        return None
