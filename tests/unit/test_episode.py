"""Whatever an environment does, a rollout comes out, and it says what broke."""

import asyncio
import re
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from async_rl.errors import FailureBudgetSpent
from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import Failure, Rollout, Status, Task, Ticket, VersionSpan
from rollout_workers.agents import RewardOnlyAgent, Score
from rollout_workers.episode import FailureBudget, play, pose
from rollout_workers.tasks import TaskMix, WeightedAgent

CONTEXT = EpisodeContext(ticket=Ticket(id="t0", task_index=0, version=0, attempt=1), sibling=0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaving(EchoAgent):
    """Plays a proper episode, then does `what`."""

    what: str = ""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        rollout = await EchoAgent.rollout(self, task, inference, context)
        sample = rollout.samples[0]
        match self.what:
            case "raises":
                raise KeyError("board")
            case "exits":
                sys.exit(3)
            case "cancels itself":
                raise asyncio.CancelledError
            case "hangs":
                await asyncio.Event().wait()
            case "times out by itself":
                raise TimeoutError("its own server")
            case "returns None":
                return None  # pyright: ignore[reportReturnType]
            case "returns NaN":
                return replace(rollout, reward=float("nan"))
            case "says nothing":
                return replace(rollout, samples=())
            case "loses a logprob":
                return replace(rollout, samples=(replace(sample, logprobs=sample.logprobs[:-1]),))
            case "has an infinite logprob":
                return replace(rollout, samples=(replace(sample, logprobs=sample.logprobs * np.float32("inf")),))
            case "forgets the versions":
                return replace(rollout, samples=(replace(sample, versions=()),))
            case "invents versions":
                span = VersionSpan(version=0, start=0, stop=len(sample) + 1)
                return replace(rollout, samples=(replace(sample, versions=(span,)),))
            case "fails by itself":
                failure = Failure(boundary="environment", kind="BadLuck", message="lost")
                return replace(rollout, status=Status.FAILED, failure=failure)
        return rollout


async def play_one(agent: object, inference: InferenceInterface | None = None, timeout_s: float = 30.0) -> Rollout:
    task = EchoAgent().task(7)
    model = inference if inference is not None else ScriptedInference(lambda text: text)
    return await play(agent, task, model, CONTEXT, timeout_s=timeout_s)  # pyright: ignore[reportArgumentType]


async def test_a_good_episode_passes_unchanged():
    rollout = await play_one(Misbehaving())
    assert (rollout.status, rollout.reward, rollout.failure) == (Status.OK, 1.0, None)


@pytest.mark.parametrize(
    ("what", "boundary", "kind", "message"),
    [
        ("raises", "environment", "KeyError", "board"),
        ("exits", "environment", "SystemExit", "3"),
        ("cancels itself", "environment", "CancelledError", ""),
        ("times out by itself", "environment", "TimeoutError", "its own server"),
        ("returns None", "environment", "Nonsense", "must return a Rollout, got NoneType"),
        ("returns NaN", "reward", "Nonsense", "finite number, got nan"),
        ("says nothing", "environment", "Nonsense", "no sampled token"),
        ("loses a logprob", "environment", "Nonsense", "logprobs"),
        ("has an infinite logprob", "environment", "Nonsense", "not a finite number"),
        ("forgets the versions", "environment", "Nonsense", "do not cover"),
        ("invents versions", "environment", "Nonsense", "outside its row"),
        ("fails by itself", "environment", "BadLuck", "lost"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # 0 times infinity, made on purpose
async def test_misbehaviour_becomes_a_failed_rollout(what: str, boundary: str, kind: str, message: str):
    rollout = await play_one(Misbehaving(what=what))
    assert rollout.status is Status.FAILED
    assert rollout.samples == ()
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.kind) == (boundary, kind)
    assert message in rollout.failure.message


def assert_failed(failure: object, boundary: str, kind: str, message: str) -> None:
    """With what, and in which line of whose file."""
    assert isinstance(failure, Failure)
    assert (failure.boundary, failure.kind) == (boundary, kind)
    assert re.fullmatch(rf"{re.escape(message)} \(test_episode\.py:\d+\)", failure.message)


async def test_a_hanging_environment_meets_its_deadline():
    rollout = await play_one(Misbehaving(what="hangs"), timeout_s=0.01)
    assert rollout.failure == Failure(boundary="deadline", kind="TimeoutError", message="no end within 0.01 s")


async def test_a_broken_engine_is_not_blamed_on_the_environment():
    def broken(text: str) -> str:
        raise RuntimeError("out of memory")

    rollout = await play_one(EchoAgent(), ScriptedInference(broken))
    assert_failed(rollout.failure, "inference", "RuntimeError", "out of memory")


@pytest.mark.parametrize("reward", [float("inf"), "1.0", None, Score(reward=1.0, parts={"format": float("nan")})])
async def test_a_reward_that_is_no_number_is_a_failure_of_the_reward(reward: object):
    class Odd(RewardOnlyAgent):
        def task(self, index: int) -> Task:
            return self.new_task(index, "0")

        async def reward(self, task: Task, response: str) -> float:
            return reward  # pyright: ignore[reportReturnType]

    rollout = await play_one(Odd(name="odd"))
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.kind) == ("reward", "ValueError")


async def test_a_reward_that_raises_is_named_by_its_cause():
    class Strict(RewardOnlyAgent):
        def task(self, index: int) -> Task:
            return self.new_task(index, "0")

        async def reward(self, task: Task, response: str) -> float:
            raise LookupError("no such answer")

    rollout = await play_one(Strict(name="strict"))
    assert_failed(rollout.failure, "reward", "LookupError", "no such answer")


async def test_a_real_cancellation_passes_through():
    asked = asyncio.Event()

    async def never(text: str) -> str:
        asked.set()
        return await asyncio.Future[str]()

    playing = asyncio.create_task(play_one(EchoAgent(), ScriptedInference(never)))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


def test_a_task_that_cannot_be_posed_is_a_failure():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Empty(EchoAgent):
        def task(self, index: int) -> Task:
            raise IndexError(f"only 10 tasks, asked for {index}")

    posed = pose(TaskMix([WeightedAgent(agent=Empty(), weight=1.0)]), 11)
    assert_failed(posed, "environment", "IndexError", "only 10 tasks, asked for 11")


def test_the_budget_counts_failures_in_a_row_and_names_the_last():
    budget = FailureBudget(3)
    failure = Failure(boundary="reward", kind="OSError", message="no route to the judge")
    for _ in range(5):
        budget.spend(failure)
        budget.spend(failure)
        budget.succeeded()
    budget.spend(failure)
    budget.spend(failure)
    with pytest.raises(FailureBudgetSpent, match=r"3 episodes failed in a row; .* reward boundary with OSError: no route"):
        budget.spend(failure)
