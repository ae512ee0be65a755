"""Reads the evidence of an audit: Redis, journal, checkpoints and archive of a run; changes none of them.

Redis is read first, in one transaction, then the journal, checkpoints and archive, which were written before. So a run that
continues meanwhile is judged as of the moment at which Redis was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from async_rl.checkpoints.manifest import DamagedCheckpoint, candidates, check_files, check_sizes, place_of, read_manifest
from async_rl.checkpoints.trained_steps import TrainedSteps, read_trained
from async_rl.config import Config
from async_rl.errors import BufferUnreachable, CheckpointError, ConfigError, RestartLimit
from async_rl.types import BufferPosition
from buffer.archive.reading import archived_steps
from buffer.rules.ticket_record import TicketRecord, parse_record
from buffer.server.unexpected_replies import UnexpectedReply, reading
from buffer.tools.open_run import OpenRun, open_run

READINGS = 3
"""Tries to read everything without a learner starting meanwhile, which would make the files newer than Redis."""
_POSITION: TypeAdapter[BufferPosition] = TypeAdapter(BufferPosition)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisState:
    """What Redis holds of a run, as one snapshot, with the problems that `buffer audit` finds."""

    state: Mapping[str, str]
    records: Mapping[str, TicketRecord]
    """Ticket -> record."""
    redo: Sequence[int]
    """Tasks that wait to be rolled again."""
    dropped: Mapping[str, int]
    problems: Sequence[str] = ()
    """Problems that `buffer audit` finds."""

    def number(self, name: str, default: int = 0) -> int:
        return int(float(self.state.get(name, default)))

    @property
    def has_recovered(self) -> bool:
        """Whether a learner has recovered on this server, and none is recovering now."""
        return "saved" in self.state and "recovering" not in self.state

    @property
    def marks(self) -> Sequence[str]:
        """Marks of the latest checkpoints. If a checkpoint's mark is missing, the server is older than that checkpoint."""
        return self.state.get("marks", "").split()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvidence:
    """A checkpoint, as far as the audit needs it."""

    name: str
    life: int
    step: int
    problem: str = ""
    """Why it cannot be used; empty for an undamaged one."""
    timeline: str = ""
    version: int = -1
    position: BufferPosition | None = None
    """None for an imported model, or if it cannot be read."""
    counts_untrained: bool = False
    """Whether its position counts dropped tasks; earlier releases did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    journal: TrainedSteps | None
    checkpoints: Sequence[CheckpointEvidence]
    """Newest first."""
    redis: RedisState | None
    redis_unread: str
    """Why Redis was not read."""
    archived: Mapping[str, int] | None
    """Group -> the last step that trained it; None if the run has no archive."""
    archive_damage: int
    max_uses: int
    age_bound: int

    @property
    def newest(self) -> CheckpointEvidence | None:
        """The newest undamaged checkpoint, which the next learner resumes from."""
        return next((each for each in self.checkpoints if not each.problem), None)


async def gather(config: Config, *, files_only: bool, every_byte: bool) -> Evidence:
    if not config.run_folder.is_dir():
        raise ConfigError(f"there is no run in {config.run_folder} (run.folder is relative to the current folder)")
    if files_only:
        return _with_files(config, None, "it was left out (--files-only)", every_byte=every_byte)
    try:
        async with open_run(config) as run:
            for _ in range(READINGS):
                redis = await _read_redis(run)
                found = _with_files(config, redis, "", every_byte=every_byte)
                if await run.buffer.fence() == redis.number("fence"):
                    return found
            return _with_files(config, None, f"learners began {READINGS} times while it was read", every_byte=every_byte)
    except (BufferUnreachable, RestartLimit, ConfigError) as error:
        return _with_files(config, None, str(error), every_byte=every_byte)


def _with_files(config: Config, redis: RedisState | None, redis_unread: str, *, every_byte: bool) -> Evidence:
    limits = config.limits
    state: Mapping[str, str] = redis.state if redis is not None else {}
    archived, damage = archived_steps(config.archive_folder) if config.archive_folder.is_dir() else (None, 0)
    return Evidence(
        journal=read_trained(config.run_folder),
        checkpoints=[_read_checkpoint(path, every_byte=every_byte) for path in candidates(config.run_folder / "checkpoints")],
        redis=redis,
        redis_unread=redis_unread,
        archived=archived,
        archive_damage=damage,
        max_uses=max(limits.max_uses, int(state.get("max_uses", 1))),
        age_bound=max(limits.age_bound, ceil(float(state.get("max_age", 0)))),
    )


async def _read_redis(run: OpenRun) -> RedisState:
    hashes = [("hgetall", run.redis.key(name)) for name in ("state", "records", "dropped", "learner")]
    reads = [*hashes, ("lrange", run.redis.key("redo"), 0, -1)]
    try:
        state, records, dropped, learner, redo = await run.redis.run_commands(reads, at_once=True)
        problems: Sequence[str] = (await run.buffer.audit()).problems
        with reading("records, redo or dropped"):
            return RedisState(
                state={name.decode(): value.decode(errors="replace") for name, value in (state | learner).items()},
                records={ticket.decode(): parse_record(text) for ticket, text in records.items()},
                redo=[int(task.split()[0]) for task in redo],
                dropped={reason.decode(): int(number) for reason, number in dropped.items()},
                problems=problems,
            )
    except UnexpectedReply as error:
        return RedisState(state={}, records={}, redo=(), dropped={}, problems=(str(error),))


def _read_checkpoint(path: Path, *, every_byte: bool) -> CheckpointEvidence:
    life, step = place_of(path)
    found = CheckpointEvidence(name=path.name, life=life, step=step)
    try:
        manifest = read_manifest(path)
        if every_byte:
            check_files(path, manifest, manifest.files)
        else:
            check_sizes(path, manifest)
        extra = cast("dict[str, Any]", manifest.extra)
        if "position" not in extra:
            return found
        return replace(
            found,
            timeline=str(extra["timeline"]),
            version=int(extra["version"]),
            position=_POSITION.validate_python(extra["position"]),
            counts_untrained="untrained" in extra["position"],
        )
    except (DamagedCheckpoint, CheckpointError, ValidationError, LookupError, TypeError) as error:
        return replace(found, problem=str(error).partition("\n")[0])
