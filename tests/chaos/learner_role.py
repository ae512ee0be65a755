"""A learner without weights: the order of changes is that of learner/loop.py, the training is a pause.

Its checkpoint is one small file per life, named after the fence, which begins as a copy of the checkpoint that the life resumed
from. So a learner that resumes in the middle of saving, after a successor took over, writes a file that is no longer read.

Each life also starts a timeline; the checkpoint names it, and the journal names its parent, so that the auditor can follow the
surviving timeline back to the beginning.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from async_rl.durable.failpoints import define, failpoint
from async_rl.durable.whole_file import write_whole
from async_rl.replay_protocol import Limits, ReplayBuffer
from async_rl.types import BufferPosition, TakenGroup, VersionRecord
from learner.checkpoints.fences import Fences
from tests.chaos.evidence import newest
from tests.chaos.plan import RoundSettings
from tests.chaos.stage import Stage, stop_event

define("learner.trained", "learner.issued", "learner.published", "learner.saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Content of the checkpoint file."""

    step: int = 0
    version: int = -1
    timeline: str = ""
    position: BufferPosition | None = None


class Learner:
    def __init__(self, stage: Stage, buffer: ReplayBuffer, fence: int) -> None:
        self._stage, self._journal, self._settings = stage, stage.journal, stage.plan.settings
        self._random = stage.random
        self._buffer, self._fence = buffer, fence
        self._timeline = uuid.uuid4().hex[:8]
        self._at = Saved()
        self._live = -1

    async def run(self, stop: asyncio.Event) -> None:
        """consumes: groups           waits for:    groups_per_step groups
        produces: versions, checkpoints  unblocked by: a writer's commit; a lease that runs out; `stop`
        """
        await self._resume()
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(stop.wait(), name="stop")
            upcoming = tasks.create_task(self._take(self._at.step + 1, self._at.version), name="take")
            while True:
                self._stage.set_state("waiting for groups")
                await asyncio.wait([upcoming, stopping], return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    break
                batch, step = upcoming.result(), self._at.step + 1
                if self._settings.prefetch:
                    upcoming = tasks.create_task(self._take(step + 1, self._at.version + 1), name="take")
                await self._step(step, batch)
                if not self._settings.prefetch:
                    upcoming = tasks.create_task(self._take(step + 1, self._at.version), name="take")
            upcoming.cancel()
        await self._save()

    async def _resume(self) -> None:
        """Read the checkpoint, which must happen after acquiring the run: until then the former learner may write another."""
        saved = load(self._stage.checkpoints)
        self._keep(saved)
        self._stage.set_state("recovering")
        recovery = await self._buffer.recover(self._fence, saved.position)
        version = await self._buffer.issue(self._fence, after=max(saved.version, recovery.version))
        self._journal.add(
            "resumed",
            fence=self._fence,
            timeline=self._timeline,
            parent=saved.timeline,
            after=saved.step,
            version=version,
            returned=recovery.returned,
            spent=recovery.spent,
        )
        self._at = Saved(step=saved.step, version=version, timeline=self._timeline)
        await self._publish()

    async def _take(self, step: int, version: int) -> list[TakenGroup]:
        tries = 0
        while True:
            tries += 1
            patient = not (self._settings.impatient and tries > 2)
            groups = await self._buffer.take(
                self._fence, step=step, version=version, num_groups=self._settings.groups_per_step, wait_s=0.3, patient=patient
            )
            if groups:
                self._journal.add("taken", step=step, version=version, groups=[each.group.id for each in groups])
                return groups

    async def _step(self, step: int, batch: list[TakenGroup]) -> None:
        self._stage.set_state("training")
        await asyncio.sleep(self._random.choice((0, 0, 0.005, 0.02)))
        failpoint("learner.trained")
        self._stage.set_state("issuing")
        trained = self._at.version
        version = await self._buffer.issue(self._fence, after=trained)
        failpoint("learner.issued")
        self._journal.add(
            "trained",
            step=step,
            trained=trained,
            version=version,
            timeline=self._timeline,
            groups=[
                {
                    "id": each.group.id,
                    "task": each.group.task.key,
                    "oldest": each.group.oldest_version,
                    "at": each.version_at_take,
                }
                for each in batch
            ],
        )
        self._at = replace(self._at, step=step, version=version)
        self._stage.report_act()
        if step % self._settings.publish_every == 0:
            await self._publish()
        if step % self._settings.checkpoint_every == 0:
            await self._save()

    async def _publish(self) -> None:
        at = self._at
        if self._live == at.version:
            return
        self._stage.set_state("publishing")
        record = VersionRecord(version=at.version, timeline=self._timeline, step=at.step, digest=f"{self._timeline}-{at.step}")
        self._journal.add("publishes", version=at.version, timeline=self._timeline, step=at.step)
        await self._buffer.publish(self._fence, record)
        failpoint("learner.published")
        await self._buffer.release(self._fence, at.step)
        self._live = at.version

    async def _save(self) -> None:
        """Save in the order of learner/loop.py: position, durable file, live version, and only then `checkpoint`."""
        self._stage.set_state("saving")
        position = await self._buffer.position(self._fence, self._at.step)
        self._keep(replace(self._at, position=position))
        self._journal.add("saved", step=self._at.step, timeline=self._timeline, next_ticket=position.next_ticket)
        failpoint("learner.saved")
        await self._publish()
        self._stage.set_state("spending")
        await self._buffer.checkpoint(self._fence, self._at.step)
        self._stage.report_act()

    def _keep(self, saved: Saved) -> None:
        write_whole(self._stage.checkpoints / f"{self._fence:012d}.json", json.dumps(asdict(saved)))


async def hold(stage: Stage, buffer: ReplayBuffer, fence: int) -> None:
    """Renew the lease. FenceLost ends this life: another learner has the run."""
    while True:
        await asyncio.sleep(stage.plan.settings.learner_lease_s / 4)
        await buffer.hold(fence)


async def learn(stage: Stage) -> None:
    stop = stop_event()
    async with stage.opened() as (buffer, _):
        stage.set_state("acquiring")
        fences, owner = Fences(stage.checkpoints), f"learner-{stage.life}"
        fence = await buffer.acquire(owner, limits(stage.plan.settings), after=fences.highest())
        fences.claim(fence, owner)
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(hold(stage, buffer, fence), name="hold")
            await Learner(stage, buffer, fence).run(stop)
            holding.cancel()
        await buffer.resign(fence)


def limits(settings: RoundSettings) -> Limits:
    return Limits(
        max_age=settings.max_age,
        groups_per_step=settings.groups_per_step,
        lease_s=settings.ticket_lease_s,
        max_attempts=settings.max_attempts,
        selector=settings.selector,
        max_uses=settings.max_uses,
        keep_steps=settings.keep_steps,
    )


def load(folder: Path) -> Saved:
    """Return the newest checkpoint."""
    found = newest(folder)
    position = found.get("position")
    return Saved(
        **{**found, "position": TypeAdapter(BufferPosition).validate_python(position) if position is not None else None}
    )
