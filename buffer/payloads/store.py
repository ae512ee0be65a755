"""Where the bytes of groups lie: in Redis, or in a file beside it to which Redis holds a reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from async_rl.errors import FleetMismatch
from async_rl.types import RolloutGroup
from buffer import keys
from buffer.payloads.codec import BadPayload, decode
from buffer.payloads.files import WORTH_A_FILE, Arena, ArenaFull, is_reference
from buffer.payloads.validation import problem_with
from buffer.run_in_redis import RunInRedis, pieces

PAYLOADS_AT_ONCE = 4
"""Groups per read: replies of some megabytes at most keep the server available to others in between."""

log = logging.getLogger(__name__)


class Payloads:
    """Without an arena all of them lie in Redis."""

    def __init__(self, run: RunInRedis, arena: Arena | None) -> None:
        self._run = run
        self._arena = arena

    async def store(self, group: str, payload: bytes) -> bytes:
        """What Redis is to hold: the payload, or a reference to the file that holds it."""
        if self._arena is None or len(payload) < WORTH_A_FILE:
            return payload
        while True:
            try:
                return self._arena.put(group, payload)
            except ArenaFull:
                log.warning("%s is full: group %s waits for a checkpoint to free room", self._arena.folder, group)
            kept_made_room = await self._run.change("starve")
            if not await self.sweep() and not kept_made_room:
                await self._run.until_slots_ring()

    async def check_folder(self) -> None:
        """Tickets exist because a learner lives, and it has said in which folder it looks."""
        if self._arena is not None and await self._run.ask("hget", keys.state(self._run.name), "folder") != self._arena.token:
            raise FleetMismatch(
                f"redis.payloads: the learner does not see this machine's {self._arena.folder}; set it to redis for this worker"
            )

    async def claim_folder(self, fence: int) -> None:
        """The learner says where it looks for files."""
        await self._run.change("claim_folder", fence, self._arena.token if self._arena is not None else "")

    async def read(self, tickets: Sequence[str]) -> list[bytes | None]:
        commands = [("hmget", keys.payloads(self._run.name), some) for some in pieces(tickets, PAYLOADS_AT_ONCE)]
        return [payload for reply in await self._run.ask_all(commands) for payload in reply]

    def whole(self, payload: bytes | None) -> bytes | memoryview | None:
        if payload is None or not is_reference(payload):
            return payload
        if self._arena is None:
            raise BadPayload("its bytes are in a folder beside Redis, and redis.payloads names none here")
        return self._arena.get(payload)

    def copy(self, payload: bytes | None, ticket: str) -> bytes | None:
        try:
            whole = self.whole(payload)
        except BadPayload as error:
            log.warning("group %s cannot be read: %s", ticket, error)
            return None
        return bytes(whole) if whole is not None else None

    async def sweep(self) -> int:
        if self._arena is None:
            return 0
        swept = 0
        for some in pieces(self._arena.names()):
            unwanted = await self._run.change("unwanted", *some)
            self._arena.delete(name.decode() for name in unwanted)
            swept += len(unwanted)
        return swept


def sound_group(
    payload: bytes | memoryview | None, ticket: str, oldest_version: int | None = None, *, vocab_size: int | None = None
) -> RolloutGroup:
    """The group in a payload that somebody else may have written."""
    if payload is None:
        raise BadPayload("its payload is gone")
    group = decode(payload)
    if problem := problem_with(group, vocab_size=vocab_size):
        raise BadPayload(problem)
    if group.id != ticket:
        raise BadPayload("it carries the id of another ticket")
    if oldest_version is not None and group.oldest_version != oldest_version:
        raise BadPayload("its oldest version is not the one that was committed")
    return group
