"""Stores the payloads of groups: in Redis, or in a file to which Redis holds a reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from async_rl.errors import FleetMismatch
from async_rl.payloads.codec import BadPayload, decode
from async_rl.types import RolloutGroup
from buffer.payloads.files import WORTH_A_FILE, PayloadFolder, PayloadFolderFull, is_reference
from buffer.payloads.validation import problem_with
from buffer.run_in_redis import RunInRedis, chunks

PAYLOADS_AT_ONCE = 4
"""Groups per read: replies of a few megabytes keep the server available to other clients in between."""

log = logging.getLogger(__name__)


class PayloadStore:
    """The payloads of one run. Without a payload folder all of them are in Redis."""

    def __init__(self, run: RunInRedis, payload_folder: PayloadFolder | None) -> None:
        self._run = run
        self._folder = payload_folder

    async def store(self, group: str, payload: bytes) -> bytes:
        """Return what Redis is to hold: the payload itself, or a reference to the file it was written to.

        Blocks while the payload folder is full.
        """
        if self._folder is None or len(payload) < WORTH_A_FILE:
            return payload
        while True:
            try:
                return self._folder.put(group, payload)
            except PayloadFolderFull:
                log.warning("%s is full: group %s waits for a checkpoint to free room", self._folder.path, group)
            kept_made_room = await self._run.run_script("starve")
            if not await self.sweep() and not kept_made_room:
                await self._run.wait_for_slots()

    async def check_folder(self) -> None:
        """Raise FleetMismatch if the learner reads another payload folder than this worker writes."""
        if (
            self._folder is not None
            and await self._run.run_command("hget", self._run.key("state"), "folder") != self._folder.token
        ):
            raise FleetMismatch(
                f"redis.payloads: the learner does not see this machine's {self._folder.path}; set it to redis for this worker"
            )

    @property
    def folder_token(self) -> bytes:
        """What tells the payload folder from others of its name; empty without a folder."""
        return self._folder.token if self._folder is not None else b""

    async def read(self, tickets: Sequence[str]) -> list[bytes | None]:
        commands = [("hmget", self._run.key("payloads"), chunk) for chunk in chunks(tickets, PAYLOADS_AT_ONCE)]
        return [payload for reply in await self._run.run_commands(commands) for payload in reply]

    def resolve(self, payload: bytes | None) -> bytes | memoryview | None:
        """Return the bytes that a payload or a reference stands for; None for None. Raises BadPayload."""
        if payload is None or not is_reference(payload):
            return payload
        if self._folder is None:
            raise BadPayload("its payload is in a file, and redis.payloads names no folder here")
        return self._folder.get(payload)

    def to_bytes(self, payload: bytes | None, ticket: str) -> bytes | None:
        """Return a copy of the bytes that `resolve` finds; None, with a warning, where they cannot be read."""
        try:
            resolved = self.resolve(payload)
        except BadPayload as error:
            log.warning("group %s cannot be read: %s", ticket, error)
            return None
        return bytes(resolved) if resolved is not None else None

    async def sweep(self) -> int:
        """Delete the payload files that no ticket can refer to any more; returns how many."""
        if self._folder is None:
            return 0
        swept = 0
        for chunk in chunks(self._folder.names()):
            unwanted = await self._run.run_script("unwanted", *chunk)
            self._folder.delete(name.decode() for name in unwanted)
            swept += len(unwanted)
        return swept


def decode_checked(
    payload: bytes | memoryview | None, ticket: str, oldest_version: int | None = None, *, vocab_size: int | None = None
) -> RolloutGroup:
    """Decode a payload and check that it is a valid group of this ticket. Raises BadPayload."""
    if payload is None:
        raise BadPayload("its payload is missing")
    group = decode(payload)
    if problem := problem_with(group, vocab_size=vocab_size):
        raise BadPayload(problem)
    if group.id != ticket:
        raise BadPayload("it carries the id of another ticket")
    if oldest_version is not None and group.oldest_version != oldest_version:
        raise BadPayload("its oldest version is not the one that was committed")
    return group
