"""Blocking graders in real processes: they answer, or they are killed with all they started."""

import asyncio
import os
import re
import select
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import EpisodeContext
from async_rl.supervision import PipedProcess, children_of
from async_rl.testing import ScriptedInference
from async_rl.types import Task, Ticket
from rollout_workers.agents import RewardOnlyAgent, Score
from rollout_workers.episodes.episode import play
from rollout_workers.graders import GraderDied, GraderPool, GraderRaised, GraderTimeout, in_process, open_graders
from rollout_workers.registry import build_agent
from tests.support.repository import ROOT
from tests.unit.rollout_workers import grading

CONTEXT = EpisodeContext(ticket=Ticket(id="t0", task_index=0, version=0, attempt=1), sibling=0, seed=0)


@pytest.fixture
async def graders() -> AsyncIterator[GraderPool]:
    before = children_of(os.getpid())
    async with open_graders(2) as pool:
        yield pool
    assert children_of(os.getpid()) == before
    assert not PipedProcess.running


class Watched:
    """Processes, so that their end can be awaited."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files: list[int] = []
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended already
                self._files.append(os.pidfd_open(pid))

    async def all_end(self) -> None:
        for file in self._files:
            ended, _, _ = await asyncio.to_thread(select.select, [file], [], [], 100)
            os.close(file)
            assert ended


async def test_graders_answer_on_the_main_thread_and_processes_are_used_again(graders: GraderPool):
    assert await in_process(grading.same, "7", "7") == 1.0
    assert await in_process(f"{grading.__file__}:same", "7", "8") == 0.0
    assert await in_process("math:sqrt", 4) == 2.0
    assert await in_process(grading.in_parts, "7", "7") == Score(reward=0.5, parts={"format": 1.0})
    assert await in_process(grading.with_an_alarm) == "too hard on MainThread"
    assert await in_process(grading.talks) == ""
    pids = [await in_process(grading.own_pid) for _ in range(3)]
    assert len(set(pids)) == 1
    assert graders.killed == 0


async def test_what_goes_wrong_in_a_grader_is_told(graders: GraderPool):
    for grader, kind, message in (
        (grading.raises, GraderRaised, r"LookupError: no such answer \(grading\.py:\d+\)"),
        (grading.exits, GraderRaised, "SystemExit: 3"),
        (grading.returns_an_object, GraderRaised, "only plain values"),
        ("nowhere:grade", GraderRaised, "No module named 'nowhere'"),
        ("math:cubic_root", GraderRaised, "cubic_root"),
        (grading.crashes, GraderDied, "SIGSEGV"),
    ):
        with pytest.raises(kind, match=message):
            await in_process(grader)
        assert await in_process(grading.same, "7", "7") == 1.0
    assert graders.killed == 1


async def test_what_another_process_cannot_find_or_read_is_refused(graders: GraderPool):
    with pytest.raises(TypeError, match="top level of a module"):
        await in_process(lambda: 1.0)
    with pytest.raises(TypeError, match="only plain values"):
        await in_process(grading.same, object(), "7")


@pytest.mark.parametrize("ending", ["its time is over", "its episode ends"])
async def test_a_grader_is_killed_with_all_it_started(graders: GraderPool, tmp_path: Path, ending: str):
    os.mkfifo(tmp_path / "pids")
    timeout_s = 5.0 if ending == "its time is over" else 60.0
    grading_it = asyncio.create_task(in_process(grading.hangs, str(tmp_path / "pids"), timeout_s=timeout_s))
    pids = [int(pid) for pid in (await asyncio.to_thread((tmp_path / "pids").read_text)).split()]
    assert len(pids) == 3
    watched = Watched(pids)
    if ending == "its episode ends":
        grading_it.cancel()
    with pytest.raises(GraderTimeout if timeout_s == 5.0 else asyncio.CancelledError):
        await grading_it
    await watched.all_end()
    assert graders.killed == 1


async def test_what_a_grader_leaves_behind_ends_with_its_process(graders: GraderPool):
    left = await in_process(grading.leaves_a_process)
    await Watched([left]).all_end()
    assert graders.killed == 1


async def test_more_calls_than_processes_wait_their_turn(graders: GraderPool):
    pids = await asyncio.gather(*(in_process(grading.own_pid) for _ in range(20)))
    assert 1 <= len(set(pids)) <= 2


async def test_without_grader_processes_the_way_out_is_named():
    with pytest.raises(RuntimeError, match=r"async with open_graders\(\)"):
        await in_process(grading.same, "7", "7")


@pytest.mark.parametrize(("grader", "kind"), [(grading.raises, "GraderRaised"), (grading.crashes, "GraderDied")])
async def test_in_an_episode_it_is_a_failure_of_the_reward(graders: GraderPool, grader: Callable[[], None], kind: str):
    class Graded(RewardOnlyAgent):
        def task(self, index: int) -> Task:
            return self.new_task(index, "0")

        async def reward(self, task: Task, response: str) -> float:
            return await in_process(grader)

    agent = Graded(name="graded")
    rollout = await play(agent.rollout, agent.task(0), ScriptedInference(lambda text: text), CONTEXT, timeout_s=30)
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.kind) == ("reward", kind)


async def test_the_grader_of_the_documentation_works_as_shown(graders: GraderPool, tmp_path: Path):
    page = (ROOT / "docs" / "episodes.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "graded.py").write_text(shown)
    agent = build_agent(EnvironmentConfig(type=f"{tmp_path}/graded.py:Graded"), seed=0)
    rollout = await play(agent.rollout, agent.task(7), ScriptedInference(lambda text: "7"), CONTEXT, timeout_s=30)
    assert (rollout.failure, rollout.reward) == (None, 1.0)
