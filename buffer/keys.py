"""Every name the buffer uses in Redis, and nothing else.

All keys of a run share the hash tag `{run}`: they live on one node of a cluster, and runs never meet in one server.
"""

from __future__ import annotations

import re

_DIGITS = 9


def types(run: str) -> dict[str, str]:
    """What Redis says of each of the buffer's keys, if it is there."""
    return {key(run, name): kind for name, kind in KINDS.items()}


def key(run: str, name: str) -> str:
    return f"{{{run}}}:{name}"


def topic(run: str, name: str) -> str:
    return key(run, f"topic:{name}")


def note(run: str, name: str) -> str:
    """What the learner leaves for whoever takes its weights: `packed` and `layout` (async_rl/transport/packed_source.py)."""
    return key(run, f"note:{name}")


def group_store(run: str, name: str, key: str) -> str:
    """What processes tell each other to form a process group (group_store.py); the channel that rings with it is named alike.

    The name's first part says who they are: `ranks` of the learner, or both ends of the weight `wire`.
    """
    return f"{{{run}}}:store:{name}:{key}"


def payloads(run: str) -> str:
    return key(run, "payloads")


def records(run: str) -> str:
    return key(run, "records")


def kept(run: str) -> str:
    return key(run, "kept")


def overrides(run: str) -> str:
    return key(run, "overrides")


def mix(run: str) -> str:
    return key(run, "mix")


def redo(run: str) -> str:
    return key(run, "redo")


def state(run: str) -> str:
    return key(run, "state")


def learner(run: str) -> str:
    return key(run, "learner")


def versions(run: str) -> str:
    return key(run, "versions")


def tally(run: str) -> str:
    return key(run, "tally")


def quarantine(run: str) -> str:
    return key(run, "quarantine")


def quarantine_payloads(run: str) -> str:
    return key(run, "quarantine_payloads")


def slots_channel(run: str) -> str:
    """Rings when a worker that waits for a ticket should look again."""
    return key(run, "on:slots")


def ready_channel(run: str) -> str:
    """Rings when a learner that waits for groups should look again."""
    return key(run, "on:ready")


def learner_channel(run: str) -> str:
    """Rings when the learner's lease is taken, renewed or given up."""
    return key(run, "on:learner")


def events_channel(run: str) -> str:
    """Says "EVENT TICKET" for whoever likes to watch: stored, dropped:REASON, quarantined, taken, spent."""
    return key(run, "on:events")


def ticket_id(number: int) -> str:
    """Ids sort like their numbers, which is the order of admission."""
    return f"t{number:0{_DIGITS}d}"


def ticket_number(ticket: str) -> int:
    return int(ticket.removeprefix("t"))


KINDS = {
    "state": "hash",  # counters and limits
    "learner": "hash",  # the learner's fence and lease
    "dropped": "hash",  # reason -> count
    "leases": "zset",  # reserved ticket -> when its lease ends, in the server's milliseconds
    "reserved": "zset",  # reserved ticket -> its version
    "ready": "zset",  # ready group -> its oldest version; equal scores sort by id, so by admission
    "taken": "zset",  # taken group -> the step it was taken for
    "again": "zset",  # group that has trained a step and may train another -> its oldest version
    "kept": "zset",  # spent group whose payload is retained -> the last step that it trained
    "lottery": "zset",  # ready group, trained before or not -> its draw (uniform and prioritized selection)
    "weights": "hash",  # group -> its priority, where it is not 1
    "records": "hash",  # ticket that has not ended, or is kept -> its few numbers (rules/ticket_record.py)
    "payloads": "hash",  # ready, taken or kept group -> its bytes
    "redo": "list",  # tasks to roll again, first come, first served
    "ended": "hash",  # ticket that ended lately -> what a repeated commit is told
    "quarantine": "hash",  # refused group -> the report on it
    "quarantine_payloads": "hash",  # refused group -> its bytes, while there is room for them
    "requests": "hash",  # worker -> its latest reservation, so that a retry gets the same tickets
    "waiting": "zset",  # worker that waits for a ticket -> its place in the queue
    "asked": "zset",  # worker that waits for a ticket -> when it asked last, in the server's milliseconds
    "versions": "hash",  # version -> what it is
    "tally": "hash",  # environment|NAME|WHAT or worker|NAME|WHAT -> count since the run began
    "overrides": "hash",  # limits that were changed while the run goes on
    "mix": "list",  # "AT ID JSON": how the mix of environments was changed while the run goes on
}
_CHANNELS = ("on:slots", "on:ready", "on:learner", "on:events")

_BOARD = (
    "facts",  # hash: what all fleets must agree on
    "members",  # zset: worker -> when its listing ends
    "member_facts",  # hash: worker -> what it announced
)
GIVEN = ("topic", "note", "entry", "entry_call")
"""Stand for the keys that a script is called for: a topic, a note, an entry of a group store and the call that changes it."""

BY_CONSTANT = {re.sub(r"\W", "_", name).upper(): name for name in (*KINDS, *_CHANNELS, *_BOARD, *GIVEN)}
"""What scripts call each key."""
