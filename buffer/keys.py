"""The Redis keys and channels of a run.

All of them share the hash tag `{run}`: they live on one node of a Cluster, and several runs can share a server.
"""

from __future__ import annotations

import re

_DIGITS = 9


def key(run: str, name: str) -> str:
    """Return one of the keys or channels listed in KINDS, _CHANNELS or _BOARD."""
    return f"{{{run}}}:{name}"


def topic(run: str, name: str) -> str:
    return key(run, f"topic:{name}")


def note(run: str, name: str) -> str:
    """A note of the learner for the receivers of its weights: `packed` or `layout` (async_rl/transport/packed_source.py);
    or the run's `configuration`, for workers that join (async_rl/board/shared_config.py)."""
    return key(run, f"note:{name}")


def group_store(run: str, name: str, key: str) -> str:
    """An entry of a store for process groups (group_store.py), and the channel that announces its changes.

    The first part of `name` is `ranks` (the learner's ranks) or `wire` (both ends of the weight wire).
    """
    return f"{{{run}}}:store:{name}:{key}"


def ticket_id(number: int) -> str:
    """Return a ticket's id. Ids sort like their numbers, which is the order of admission."""
    return f"t{number:0{_DIGITS}d}"


def ticket_number(ticket: str) -> int:
    return int(ticket.removeprefix("t"))


KINDS = {
    "state": "hash",  # counters and limits
    "learner": "hash",  # the learner's fence and lease
    "dropped": "hash",  # reason -> count
    "leases": "zset",  # reserved ticket -> end of its lease, in the server's milliseconds
    "reserved": "zset",  # reserved ticket -> its version
    "ready": "zset",  # ready group -> its oldest version; equal scores sort by id, so by admission
    "taken": "zset",  # taken group -> the step it was taken for
    "again": "zset",  # group that has trained and may train another step -> its oldest version
    "kept": "zset",  # spent group whose payload is retained -> the last step that it trained
    "lottery": "zset",  # ready group, trained before or not -> its key in the weighted draw (uniform, prioritized)
    "weights": "hash",  # group -> its priority, where it is not 1
    "records": "hash",  # ticket that has not ended, or is kept -> its record (rules/ticket_record.py)
    "payloads": "hash",  # ready, taken or kept group -> its bytes
    "redo": "list",  # tasks to roll again, in order
    "ended": "hash",  # ticket that ended recently -> the result of a repeated commit
    "quarantine": "hash",  # quarantined group -> the report on it
    "quarantine_payloads": "hash",  # quarantined group -> its payload, while there is room
    "requests": "hash",  # worker -> its latest reservation, so that a retry gets the same tickets
    "waiting": "zset",  # worker that waits for a ticket -> its place in the queue
    "asked": "zset",  # worker that waits for a ticket -> its latest request, in the server's milliseconds
    "versions": "hash",  # version -> what it is
    "tally": "hash",  # environment|NAME|WHAT or worker|NAME|WHAT -> count since the run began
    "overrides": "hash",  # limits that were changed during the run
    "mix": "list",  # "AT ID JSON": changes of the mix of environments during the run
}
_CHANNELS = (
    "on:slots",  # notifies commits that wait for memory; on:slots:WORKER notifies a worker whose turn for tickets it is
    "on:ready",  # notifies a learner that waits for groups
    "on:learner",  # notifies when the learner's lease is taken, renewed or given up
    "on:events",  # "EVENT TICKET" for `buffer tail`: stored, dropped:REASON, quarantined, taken, spent
)

_BOARD = (
    "facts",  # hash: what all fleets must agree on
    "members",  # zset: worker -> when its membership expires
    "member_facts",  # hash: worker -> what it announced
)
GIVEN = ("topic", "note", "entry", "entry_call")
"""Names of keys that the caller chooses: a topic, a note, an entry of a group store and the call that changes it."""

BY_CONSTANT = {re.sub(r"\W", "_", name).upper(): name for name in (*KINDS, *_CHANNELS, *_BOARD, *GIVEN)}
"""Constant in the Lua scripts -> name of the key."""
