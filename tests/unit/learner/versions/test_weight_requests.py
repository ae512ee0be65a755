"""Operators' requests to the learner about weights, and its refusals."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.board.weight_requests import WeightAction, ask
from async_rl.checkpoints.draft import Draft
from async_rl.checkpoints.manifest import FORMAT, Layout, Manifest
from async_rl.errors import ConfigError
from async_rl.replay_protocol import Limits
from buffer.__main__ import main
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.progress import Progress
from learner.versions.pin_file import PinFile
from learner.versions.publish import PackedVersion, Publisher, Rollback
from learner.versions.push_policy import PushPolicy
from learner.versions.requests import WeightRequests
from tests.unit.learner.test_loop import NoWorkers, known

SLOW = PushPolicy(every_steps=100, max_steps=100)


class Learner:
    """Its end of the requests, and of the wire; the test is its loop."""

    def __init__(self, buffer: MemoryBuffer, fence: int, run_folder: Path) -> None:
        self.board = MemoryBoard(buffer)
        sender: Any = NoWorkers()
        self.publisher = Publisher(buffer=buffer, fence=fence, sender=sender, policy=SLOW)
        self.requests = WeightRequests(self.board, self.publisher, run_folder)

    def holds(self, step: int) -> None:
        self.publisher.progress = Progress(step=step, version=step, timeline="t")

    async def serves(self, step: int) -> None:
        self.publisher.offer(PackedVersion(version=step, timeline="t", step=step, digest=known("d")), releases=step)
        await self.publisher.until_live(step)

    async def asked(self, action: WeightAction, **about: int) -> tuple[bool, str]:
        """Whether it was granted, and the sentence."""
        answer = await ask(self.board, action, 5.0, **about)
        assert answer is not None
        return not answer.is_refusal, answer.text


@asynccontextmanager
async def learner(run_folder: Path) -> AsyncIterator[Learner]:
    buffer = MemoryBuffer()
    limits = Limits(max_age=2, groups_per_step=2, lease_s=60.0, max_attempts=2)
    one = Learner(buffer, await buffer.acquire("learner", limits), run_folder)
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(one.publisher.run()), tasks.create_task(one.requests.run())]
        await asyncio.sleep(0)
        yield one
        for task in beside:
            task.cancel()


def checkpoint(run_folder: Path, step: int, version: int) -> Path:
    draft = Draft.of(run_folder / "checkpoints", step)
    draft.open()
    draft.commit(Manifest(format=FORMAT, step=step, layout=Layout(), models={}, files={}, extra={"version": version}))
    return draft.final


async def test_pushing_and_pinning(tmp_path: Path):
    async with learner(tmp_path) as one:
        assert await one.asked("pin") == (False, "no version is live yet, so there is nothing to pin")
        one.holds(0)
        await one.serves(0)
        assert await one.asked("push") == (False, "the newest version is live, or on its way")
        assert await one.asked("unpin") == (False, "nothing is pinned")
        one.holds(1)
        assert not one.publisher.is_due
        assert (await one.asked("push"))[0]
        assert one.publisher.is_due

        assert "version 7 is not live, 0 is" in (await one.asked("pin", version=7))[1]
        assert (await one.asked("pin", version=0))[0]
        assert not one.publisher.may_offer
        assert "pinned already (by hand)" in (await one.asked("pin"))[1]
        assert "are pinned (by hand)" in (await one.asked("push"))[1]
        assert (await one.asked("unpin"))[0]
        assert one.publisher.is_due, "unpinning pushes the newest"


async def test_rolling_back_needs_a_checkpoint(tmp_path: Path):
    async with learner(tmp_path) as one:
        assert "no checkpoint holds version 1; there is none yet" in (await one.asked("roll back", version=1))[1]
        older, newer = checkpoint(tmp_path, 2, 3), checkpoint(tmp_path, 4, 6)
        refused = await one.asked("roll back", step=3)
        assert refused == (False, "no checkpoint holds step 3; there are versions 6 (step 4), 3 (step 2)")
        assert (await one.asked("roll back", version=3))[0]
        assert one.publisher.take_rollback() == Rollback(checkpoint=older, step=2)
        assert (await one.asked("roll back", step=4))[0]
        assert one.publisher.take_rollback() == Rollback(checkpoint=newer, step=4)
        assert one.publisher.pinned == "rolled back to step 4"


async def test_what_the_next_learner_makes_of_a_pin(tmp_path: Path):
    saved = checkpoint(tmp_path, 4, 6)
    async with learner(tmp_path) as one:
        await one.asked("roll back", step=4)
    async with learner(tmp_path) as two:
        await two.requests.resume()
        assert two.publisher.take_rollback() == Rollback(checkpoint=saved, step=4), "its weights are still there"
        await two.asked("unpin")
        two.holds(5)
        await two.serves(5)
        await two.asked("pin")
    async with learner(tmp_path) as three:
        await three.requests.resume()
        assert not three.publisher.pinned, "only the learner before had the weights"
        assert PinFile(tmp_path).read() is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("weights pin seven", "'seven' is not a version"),
        ("weights rollback", "weights rollback needs a VERSION or --step STEP"),
        ("weights rollback 7 --step 7", "needs a VERSION or --step STEP"),
        ("weights push", "no learner of run nobody answers"),
    ],
)
def test_wrong_use_is_one_sentence(redis_server: str, tmp_path: Path, words: str, sentence: str):
    path = tmp_path / "config.yaml"
    tree = {
        "run": {"name": "nobody", "folder": str(tmp_path)},
        "redis": {"url": redis_server},
        "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
        "environments": [{"type": "even_digits"}],
    }
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=sentence):
        main([*words.split(), "@", str(path)])
    with contextlib.redirect_stdout(io.StringIO()) as page:
        assert main(["weights", "status", "@", str(path)]) == 0
    assert page.getvalue() == "no version is live yet\nno learner answers\nno worker is listed\n"
