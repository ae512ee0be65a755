"""Every name the buffer uses in Redis, and nothing else.

All keys of a run share the hash tag `{run}`: they live on one node of a cluster, and runs never meet in one server.
"""

from __future__ import annotations

_DIGITS = 9


def buffer_keys(run: str) -> list[str]:
    """What `scripts/prelude.lua` names KEYS, in its order."""
    return [f"{{{run}}}:{name}" for name in _BUFFER_NAMES]


def board_keys(run: str) -> list[str]:
    """What the board's scripts name KEYS, in their order."""
    return [f"{{{run}}}:{name}" for name in _BOARD_NAMES]


def topic(run: str, name: str) -> str:
    return f"{{{run}}}:topic:{name}"


def payloads(run: str) -> str:
    return f"{{{run}}}:payloads"


def state(run: str) -> str:
    return f"{{{run}}}:state"


def versions(run: str) -> str:
    return f"{{{run}}}:versions"


def quarantine(run: str) -> str:
    return f"{{{run}}}:quarantine"


def slots_channel(run: str) -> str:
    """Rings when a worker that waits for a ticket should look again."""
    return f"{{{run}}}:on:slots"


def ready_channel(run: str) -> str:
    """Rings when a learner that waits for groups should look again."""
    return f"{{{run}}}:on:ready"


def learner_channel(run: str) -> str:
    """Rings when the learner's lease is taken, renewed or given up."""
    return f"{{{run}}}:on:learner"


def ticket_id(number: int) -> str:
    """Ids sort like their numbers, which is the order of admission."""
    return f"t{number:0{_DIGITS}d}"


def ticket_number(ticket: str) -> int:
    return int(ticket.removeprefix("t"))


_BUFFER_NAMES = (
    "state",  # hash: counters, limits, the learner's lease
    "dropped",  # hash: reason -> count
    "leases",  # zset: reserved ticket -> when its lease ends, in the server's milliseconds
    "reserved",  # zset: reserved ticket -> its version
    "ready",  # zset: ready group -> its oldest version; equal scores sort by id, so by admission
    "taken",  # zset: taken group -> the step it was taken for
    "records",  # hash: ticket that has not ended -> its few numbers
    "payloads",  # hash: ready or taken group -> its bytes
    "redo",  # list: tasks to roll again, first come, first served
    "ended",  # hash: ticket that ended lately -> what a repeated commit is told
    "quarantine",  # list: reports on refused payloads, newest first
    "requests",  # hash: worker -> its latest reservation, so that a retry gets the same tickets
    "versions",  # hash: version -> what it is
    "on:slots",
    "on:ready",
    "on:learner",
)

_BOARD_NAMES = (
    "facts",  # hash: what all fleets must agree on
    "members",  # zset: worker -> when its listing ends
    "member_facts",  # hash: worker -> what it announced
)
