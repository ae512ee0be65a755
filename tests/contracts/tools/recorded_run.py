"""A run without a model: a real server, with the journal and checkpoints that a learner would write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rl.checkpoints.manifest import FORMAT, MANIFEST, FileFacts, Layout, Manifest, facts_of, file_of, folder_of
from async_rl.checkpoints.trained_steps import read_trained
from async_rl.config import Config
from async_rl.types import BufferPosition, RolloutGroup, TakenGroup, UndoneGroup
from buffer import open_archive, open_buffer
from buffer.archive.writing import ArchiveWriter
from buffer.redis_buffer import RedisBuffer
from buffer.server.embedded.server import EmbeddedServer
from learner.checkpoints.fences import Fences
from tests.support.groups import group
from tests.support.runs import limits, publish

GROUPS_PER_STEP = 2


def write_config(folder: Path, **sections: Any) -> Path:
    path = folder / "run.yaml"
    content = {
        "run": {"name": "recorded", "folder": str(folder)},
        "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
        "environments": [{"type": "even_digits"}],
        "batch": {"groups_per_step": GROUPS_PER_STEP, "group_size": 2},
        **sections,
    }
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


class Life:
    """One life of a learner with a worker: it trains what it takes, and writes what a learner writes."""

    def __init__(self, config: Config, buffer: RedisBuffer, fence: int, step: int, version: int, number: int) -> None:
        self.config, self.buffer, self.fence = config, buffer, fence
        self.step, self.version = step, version
        self.timeline = f"life-{number}"
        self._row({"resumed_after": step, "version": version, "timeline": self.timeline, "fence": fence})

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            await self.roll_out(GROUPS_PER_STEP)
            await self.train()

    async def roll_out(self, count: int, *, keep: bool = True) -> list[RolloutGroup]:
        made = [group(each) for each in await self.buffer.reserve("w", version=self.version, count=count, wait_s=0)]
        for each in made:
            await self.buffer.commit("w", each, keep=keep)
        return made

    async def train(self) -> list[TakenGroup]:
        taken = await self.buffer.take(
            self.fence, step=self.step + 1, version=self.version, num_groups=GROUPS_PER_STEP, wait_s=0
        )
        assert len(taken) == GROUPS_PER_STEP
        self.step += 1
        version = await self.buffer.issue(self.fence, after=self.version)
        self.record(version, [each.group for each in taken])
        self.version = await publish(self.buffer, self.fence, after=self.version)
        await self.buffer.release(self.fence, self.step)
        return taken

    def record(self, version: int, groups: Sequence[RolloutGroup]) -> None:
        rows = [
            {
                "id": each.id,
                "task": each.task.key,
                "task_index": int(each.task.key.removeprefix("k")),
                "oldest_version": each.oldest_version,
            }
            for each in groups
        ]
        self._row({"step": self.step, "version": version, "timeline": self.timeline, "fence": self.fence, "groups": rows})

    async def save(self) -> Path:
        position = await self.buffer.position(self.fence, self.step)
        folder = write_checkpoint(self.config, self.fence, self.step, self.version, self.timeline, position)
        await self.buffer.checkpoint(self.fence, self.step)
        return folder

    async def archive(self) -> None:
        writer: ArchiveWriter = open_archive(self.config)
        found = await self.buffer.spent_groups(100)
        writer.append(found)
        await self.buffer.discard(self.fence, [each.id for each in found])
        writer.close()

    def _row(self, row: dict[str, Any]) -> None:
        with (self.config.run_folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_checkpoint(config: Config, fence: int, step: int, version: int, timeline: str, position: BufferPosition) -> Path:
    folder = config.run_folder / "checkpoints" / folder_of(step, fence)
    folder.mkdir(parents=True)
    (folder / file_of(0)).write_bytes(b"weights")
    files: dict[str, FileFacts] = {file_of(0): facts_of(folder / file_of(0))}
    extra = {
        "step": step,
        "version": version,
        "timeline": timeline,
        "fence": fence,
        "position": json.loads(json.dumps(asdict(position))),
    }
    manifest = Manifest(format=FORMAT, step=step, layout=Layout(), models={}, files=files, extra=extra)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[RedisBuffer]:
    async with EmbeddedServer(config), open_buffer(config) as buffer:
        yield buffer


async def begin(
    config: Config,
    buffer: RedisBuffer,
    *,
    undone: Sequence[UndoneGroup] = (),
    number: int = 0,
    step: int = 0,
    position: BufferPosition | None = None,
    **changed: Any,
) -> Life:
    """Start a learner from the checkpoint of `step`, or from nothing."""
    chosen = limits(groups_per_step=GROUPS_PER_STEP, **changed)
    fence = await buffer.acquire(f"learner {number}", chosen, after=Fences(config.run_folder).highest())
    recovery = await buffer.recover(fence, position, undone)
    journal = read_trained(config.run_folder)
    trained = max((life.newest for life in journal.lives), default=-1) if journal is not None else -1
    version = await publish(buffer, fence, after=max(recovery.version, trained))
    return Life(config, buffer, fence, step, version, number)
