"""Which versions the loop packs and pushes, over the reference buffer: by policy, and on operators' requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from async_rl.config import Config
from async_rl.types import BufferPosition
from buffer.reference.memory_buffer import MemoryBuffer
from learner.batches.batch import PackedBatch
from learner.checkpoints.writing import Written
from learner.loop import FinishedStep
from learner.progress import Progress
from learner.step import StepResult
from learner.versions.publish import Publisher, Rollback
from learner.versions.push_policy import PushPolicy
from tests.support.repository import ROOT
from tests.unit.learner.test_loop import STEPS, FakeRanks, a_loop, known

EVERY_STEP = PushPolicy()

CONFIG = ROOT / "configs" / "quickstart.yaml"


class Packer(FakeRanks):
    """Notes what is packed. All of its steps are finite; before one of them it may wait."""

    def __init__(self, *, waits_before: int = -1, skips: Collection[int] = ()) -> None:
        super().__init__()
        self.packed: list[int] = []
        self.stored: list[tuple[int, str]] = []
        self.waits, self.may_go_on = asyncio.Event(), asyncio.Event()
        self._waits_before, self._skips, self._number = waits_before, skips, 0

    async def step(self, batch: PackedBatch) -> StepResult:
        self._number += 1
        if self._number == self._waits_before:
            self.waits.set()
            await self.may_go_on.wait()
        skipped = self._number in self._skips
        return StepResult(loss=0.0, grad_norm=0.0, learning_rate=0.0, skipped=skipped, metrics={})

    async def pack_version(self, version: int, keep: Collection[int]) -> Future[str]:
        self.packed.append(version)
        return known("digest")

    async def pack_checkpoint(self, version: int, keep: Collection[int], checkpoint: Path) -> Future[str] | None:
        self.stored.append((version, checkpoint.name))
        return None if checkpoint.name == "damaged" else known("digest")

    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        return self._written(still_ours)


async def run(
    packer: Packer,
    policy: PushPolicy = EVERY_STEP,
    *,
    max_age: float = 2,
    checkpoint_every: int = 100,
    meddle: Callable[[Publisher, asyncio.Event], Awaitable[None]] | None = None,
) -> tuple[Progress, list[FinishedStep], MemoryBuffer]:
    buffer, done = MemoryBuffer(), list[FinishedStep]()
    async with a_loop(
        buffer, done, trainer=packer, policy=policy, max_age=max_age, checkpoint_every=checkpoint_every, meddle=meddle
    ) as (loop, start):
        end = await loop.run(start)
    assert (await buffer.audit()).is_clean
    return end, done, buffer


def held(publisher: Publisher) -> Progress:
    assert publisher.progress is not None
    return publisher.progress


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# -- the policy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "steps", "seconds", "is_due"),
    [
        (PushPolicy(max_steps=3), 1, 0.0, True),
        (PushPolicy(every_steps=2, max_steps=3), 1, 1e9, False),
        (PushPolicy(every_steps=2, max_steps=3), 2, 0.0, True),
        (PushPolicy(every_s=10, max_steps=3), 1, 9.9, False),
        (PushPolicy(every_s=10, max_steps=3), 1, 10.0, True),
        (PushPolicy(every_s=10, max_steps=3), 3, 0.0, True),
        (PushPolicy(every_steps=2, every_s=10, max_steps=4), 2, 9.0, False),
    ],
)
def test_due(policy: PushPolicy, steps: int, seconds: float, is_due: bool):
    assert policy.is_due(steps=steps, seconds=seconds) is is_due


@pytest.mark.parametrize(("max_age", "most"), [(0, 1), (0.5, 1), (2, 3)])
def test_what_the_age_bound_cannot_wait_for_is_refused(max_age: float, most: int):
    tree = yaml.safe_load(CONFIG.read_text()) | {"staleness": {"max_age": max_age}}
    fits = Config.model_validate(tree | {"wire": {"push_every_steps": most}})
    assert PushPolicy.of(fits) == PushPolicy(every_steps=most, max_steps=most)
    with pytest.raises(ValidationError, match=rf"push_every_steps \({most + 1}\) is never reached.*can train {most} steps"):
        Config.model_validate(tree | {"wire": {"push_every_steps": most + 1}})


# -- the loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "packed"),
    [
        (PushPolicy(), [0, 1, 2, 3, 4, 5]),
        (PushPolicy(every_steps=2, max_steps=3), [0, 2, 4, 5]),
        (PushPolicy(every_steps=3, max_steps=3), [0, 3, 5]),
        (PushPolicy(every_s=1e9, max_steps=3), [0, 3, 5]),
    ],
)
async def test_only_what_is_pushed_is_packed_and_the_last_version_always_is(policy: PushPolicy, packed: list[int]):
    packer = Packer()
    end, done, buffer = await run(packer, policy)
    assert packer.packed == packed
    assert (end.step, end.version) == (STEPS, STEPS), "a version is issued for every step"
    assert all(taken.age <= 2 for finished in done for taken in finished.step_batch.groups)
    assert (await buffer.stats()).version == end.version


async def test_a_checkpoint_is_pushed_as_its_groups_are_spent_only_then():
    packer = Packer()
    _, _, buffer = await run(packer, PushPolicy(every_steps=3, max_steps=3), checkpoint_every=2)
    assert packer.packed == [0, 2, 4, 5]
    assert (await buffer.stats()).taken == 0


async def test_a_skipped_step_gives_its_slots_back_though_versions_are_held_back():
    packer = Packer(skips=[2, 3])
    end, _, _ = await run(packer, PushPolicy(every_steps=3, max_steps=3))
    assert (end.step, end.version) == (STEPS, STEPS - 2)
    assert packer.packed == [0, 1, 2, 3], "1 when step 2 is skipped, 2 as three steps have passed, 3 as it is the last"


async def test_a_policy_that_waits_for_more_than_there_are_slots_does_not_stop_the_run():
    """As when the bound is lowered while the run goes on."""
    packer = Packer()
    end, _, _ = await run(packer, PushPolicy(every_steps=4, max_steps=4), max_age=2)
    assert end.step == STEPS
    assert packer.packed == [0, 3, 5]


# -- people ----------------------------------------------------------------------------------------------------------------


async def test_an_operator_requests_a_push():
    packer = Packer(waits_before=2)

    async def meddle(publisher: Publisher, _stop: asyncio.Event) -> None:
        await packer.waits.wait()
        assert publisher.may_offer
        publisher.request_push()
        packer.may_go_on.set()

    await run(packer, PushPolicy(every_steps=3, max_steps=3), meddle=meddle)
    assert packer.packed == [0, 2, 5]


async def test_a_pin_lets_the_learner_train_as_far_as_the_age_bound_lets_it_and_then_wait():
    packer = Packer(waits_before=1)

    async def meddle(publisher: Publisher, _stop: asyncio.Event) -> None:
        await packer.waits.wait()
        await publisher.until_live(0)
        await publisher.pin("by hand")
        packer.may_go_on.set()
        await until(lambda: held(publisher).step == 3)
        assert publisher.live_version == 0
        publisher.unpin()

    end, done, _ = await run(packer, meddle=meddle)
    assert end.step == STEPS
    assert packer.packed == [0, 3, 4, 5]
    assert all(taken.age <= 2 for finished in done for taken in finished.step_batch.groups)


async def test_a_pinned_run_that_is_told_to_stop_stops_and_leaves_its_groups_to_recovery():
    packer = Packer(waits_before=2)

    async def meddle(publisher: Publisher, stop: asyncio.Event) -> None:
        await packer.waits.wait()
        await publisher.until_live(1)
        await publisher.pin("by hand")
        packer.may_go_on.set()
        await until(lambda: held(publisher).step >= 2)
        stop.set()

    end, _, buffer = await run(packer, checkpoint_every=1, meddle=meddle)
    stats = await buffer.stats()
    assert packer.packed == [0, 1]
    assert stats.version == 1
    assert stats.taken >= 2 * (end.step - 1), "nothing is spent whose weights are not live"


@pytest.mark.parametrize("name", ["step-1", "damaged"])
async def test_a_rollback_goes_out_above_every_version_and_training_goes_on_above_it(name: str):
    packer = Packer(waits_before=2)

    async def meddle(publisher: Publisher, _stop: asyncio.Event) -> None:
        await packer.waits.wait()
        await publisher.until_live(1)
        await publisher.request_rollback(Rollback(checkpoint=Path(name), step=0))
        packer.may_go_on.set()
        await until(lambda: len(packer.stored) > 0 if name == "damaged" else publisher.live_version == 3)
        assert publisher.pinned
        publisher.unpin()

    end, done, buffer = await run(packer, meddle=meddle)
    assert end.step == STEPS
    assert packer.stored == [(3, name)]
    versions = [finished.progress.version for finished in done]
    assert versions == ([1, 2, 3, 4, 5] if name == "damaged" else [1, 2, 5, 6, 7]), "3 was served, 4 is what step 2 made"
    assert packer.packed[-1] == end.version == (await buffer.stats()).version
    assert all(taken.age >= 0 for finished in done for taken in finished.step_batch.groups)
