"""Reads the archive of spent groups: every group once, in the order in which they were archived.

One payload is in memory at a time, plus the ids seen so far. Reading changes nothing and may run beside a writer. What cannot
be read is skipped and reported as `damage`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from async_rl.errors import ConfigError
from async_rl.payloads.as_json import dump_json, rollout_fields, task_fields
from async_rl.payloads.codec import BadPayload, decode
from async_rl.types import Rollout, RolloutGroup, Sample
from buffer.archive.segment import (
    Damage,
    GroupSummary,
    SegmentIndex,
    files_in,
    load_index,
    read_payload,
)


def read(
    folder: Path, *, group_id: str | None = None, damage: list[Damage] | None = None
) -> Iterator[tuple[int, RolloutGroup]]:
    """Yield groups, each with the last step that trained it; with `group_id`, that group alone.

    What cannot be read is appended to `damage`.
    """
    met: set[str] = set()
    damaged = damage if damage is not None else []
    for path, file, index in _files(folder):
        damaged.extend(index.damage)
        for entry in index.entries:
            summary = entry.summary
            if summary.id in met or group_id not in (None, summary.id):
                continue
            try:
                if (payload := read_payload(file, entry)) is None:
                    raise BadPayload("its bytes changed")
                group = decode(payload)
            except BadPayload as problem:
                damaged.append(Damage(file=path.name, offset=entry.offset, length=entry.length, reason=str(problem)))
            else:
                met.add(summary.id)
                yield summary.step, group


def find(folder: Path, group_id: str) -> tuple[int, RolloutGroup] | None:
    return next(read(folder, group_id=group_id), None)


def _files(folder: Path) -> Iterator[tuple[Path, int, SegmentIndex]]:
    if not folder.is_dir():
        raise ConfigError(f"there is no archive in {folder}; with retention.archive: true a run begins one at a checkpoint")
    for path in files_in(folder):
        with suppress(FileNotFoundError), path.open("rb") as file:  # the writer deletes the oldest file at its limit
            yield path, file.fileno(), load_index(path)


def archived_steps(folder: Path) -> tuple[dict[str, int], int]:
    """Return the last step that trained each group, and the number of damaged ranges. Reads the indexes alone."""
    steps: dict[str, int] = {}
    damaged = 0
    for _, _, index in _files(folder):
        damaged += len(index.damage)
        for entry in index.entries:
            steps.setdefault(entry.summary.id, entry.summary.step)
    return steps, damaged


# -- what it holds --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStats:
    groups: int = 0
    tokens: int = 0
    reward: float | None = None
    """Mean over the groups that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveStats:
    files: int
    bytes: int
    groups: int
    tokens: int
    """Number of sampled tokens."""
    first_step: int | None
    last_step: int | None
    since: float | None
    """When the oldest group was archived, in seconds since 1970."""
    until: float | None
    damaged: int
    """Damaged ranges that the indexes list; `read` finds the others."""
    environments: Mapping[str, EnvironmentStats]


def archive_stats(folder: Path) -> ArchiveStats:
    """Summarize the archive from its indexes; a file without one is scanned."""
    summaries: dict[str, GroupSummary] = {}
    files = size = damaged = 0
    for path, _, index in _files(folder):
        files, size, damaged = files + 1, size + path.stat().st_size, damaged + len(index.damage)
        for entry in index.entries:
            summaries.setdefault(entry.summary.id, entry.summary)
    by_environment: dict[str, list[GroupSummary]] = {}
    for group in summaries.values():
        by_environment.setdefault(group.environment, []).append(group)
    steps, times = [group.step for group in summaries.values()], [group.time for group in summaries.values()]
    return ArchiveStats(
        files=files,
        bytes=size,
        groups=len(summaries),
        tokens=sum(group.tokens for group in summaries.values()),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        since=min(times, default=None),
        until=max(times, default=None),
        damaged=damaged,
        environments={name: _summed(groups) for name, groups in sorted(by_environment.items())},
    )


def _summed(groups: Collection[GroupSummary]) -> EnvironmentStats:
    rewards = [group.reward for group in groups if group.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return EnvironmentStats(groups=len(groups), tokens=sum(group.tokens for group in groups), reward=mean)


# -- as JSON lines --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    groups: int
    rollouts: int
    damage: tuple[Damage, ...]


def export_jsonl(folder: Path, stream: TextIO, *, tokens: bool) -> Exported:
    """Write one line per rollout; docs/archive.md lists its fields. `tokens` adds the token rows."""
    damage: list[Damage] = []
    groups = rollouts = 0
    for step, group in read(folder, damage=damage):
        groups += 1
        for sibling, rollout in enumerate(group.rollouts):
            rollouts += 1
            line = _line(step, group, sibling, rollout)
            if tokens:
                line["samples"] = [_row(row) for row in rollout.samples]
            stream.write(f"{dump_json(line)}\n")
    return Exported(groups=groups, rollouts=rollouts, damage=tuple(damage))


def _line(step: int, group: RolloutGroup, sibling: int, rollout: Rollout) -> dict[str, object]:
    versions = [span.version for row in rollout.samples for span in row.versions]
    return {
        "group": group.id,
        "sibling": sibling,
        "step": step,
        "worker": group.worker,
        "task": task_fields(group.task),
        **rollout_fields(rollout),
        "sampled": rollout.num_sampled,
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
    }


def _row(sample: Sample) -> dict[str, object]:
    return {
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "versions": [[span.version, span.start, span.stop] for span in sample.versions],
    }
