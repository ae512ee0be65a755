"""Whatever an environment does, a rollout comes out, and it says what broke."""

import asyncio
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from async_rl.config.rollout import EnvironmentConfig, TimeoutsConfig
from async_rl.errors import FailureBudgetSpent, ServiceStopped
from async_rl.protocols import EpisodeContext, InferenceInterface, Returns
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import Failure, Rollout, Status, Task, Ticket, Turn, VersionSpan
from rollout_workers.agents import RewardOnlyAgent, Score
from rollout_workers.episodes.episode import FailureBudget, play, play_group, pose_task
from rollout_workers.episodes.leaked_tasks import track_episode_tasks
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.episodes.validation import checked, trainable

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
    return await play(agent.rollout, task, model, CONTEXT, timeout_s=timeout_s)  # pyright: ignore[reportArgumentType]


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
        ("returns None", "environment", "InvalidResult", "must return a Rollout, got NoneType"),
        ("returns NaN", "reward", "InvalidResult", "finite number, got nan"),
        ("loses a logprob", "environment", "InvalidResult", "logprobs"),
        ("has an infinite logprob", "environment", "InvalidResult", "not a finite number"),
        ("forgets the versions", "environment", "InvalidResult", "do not cover"),
        ("invents versions", "environment", "InvalidResult", "outside its row"),
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


async def test_an_engine_that_is_gone_fails_the_worker_and_not_its_episodes():
    def gone(text: str) -> str:
        raise ServiceStopped("engine 0 was ended by SIGKILL")

    with pytest.raises(ServiceStopped, match="SIGKILL"):
        await play_one(Misbehaving(), ScriptedInference(gone))


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


async def test_a_task_that_cannot_be_posed_is_a_failure():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Empty(EchoAgent):
        def task(self, index: int) -> Task:
            raise IndexError(f"only 10 tasks, asked for {index}")

    posed = await pose_task(TaskSource(environment=EnvironmentConfig(type="empty"), agent=Empty(), index=11))
    assert_failed(posed, "task", "IndexError", "only 10 tasks, asked for 11")


@pytest.mark.parametrize("how", ["async", "exits", "nonsense", "hangs"])
async def test_a_task_may_be_async_and_may_not_stop_the_worker(how: str):
    released = threading.Event()

    class Odd(EchoAgent):
        def task(self, index: int) -> Task:
            match how:
                case "async":
                    return self.fetched(index)  # pyright: ignore[reportReturnType]
                case "exits":
                    sys.exit(3)
                case "nonsense":
                    return "7"  # pyright: ignore[reportReturnType]
                case _:
                    released.wait()
                    return EchoAgent.task(self, index)

        async def fetched(self, index: int) -> Task:
            await asyncio.sleep(0)
            return EchoAgent.task(self, index)

    seat = TaskSource(environment=EnvironmentConfig(type="odd"), agent=Odd(), index=7)
    posed = await pose_task(seat, TimeoutsConfig(task_s=0.05 if how == "hangs" else 60))
    released.set()
    if how == "async":
        assert posed == EchoAgent().task(7)
        return
    assert isinstance(posed, Failure)
    assert (posed.boundary, posed.kind) == (
        "task",
        {"exits": "RuntimeError", "nonsense": "InvalidResult", "hangs": "TimeoutError"}[how],
    )


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


# -- stages -----------------------------------------------------------------------------------------------------------
class Staged(RewardOnlyAgent):
    """Hangs in one stage."""

    hangs_in = ""
    max_turns = 2

    def task(self, index: int) -> Task:
        return self.new_task(index, "0")

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        await self._hang_in("observation")
        return "1"

    async def reward(self, task: Task, response: str) -> float:
        await self._hang_in("reward")
        return 1.0

    async def _hang_in(self, stage: str) -> None:
        if stage == self.hangs_in:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("stage", "boundary"), [("generation", "inference"), ("observation", "environment"), ("reward", "reward")]
)
async def test_a_stage_that_takes_too_long_is_named(stage: str, boundary: str):
    async def answer(text: str) -> str:
        await agent._hang_in("generation")
        return "5"

    agent = Staged(name="staged")
    agent.hangs_in = stage
    timeouts = TimeoutsConfig.model_validate({f"{stage}_s": 0.02})
    rollout = await play(agent.rollout, agent.task(0), ScriptedInference(answer), CONTEXT, timeout_s=30, timeouts=timeouts)
    message = f"no end within 0.02 s (worker.timeouts.{stage}_s)"
    assert rollout.failure == Failure(boundary=boundary, kind="TimeoutError", message=message)


@pytest.mark.parametrize("returns", ["text", "tokens", "logprobs"])
async def test_an_agent_sees_what_the_backend_returns(returns: Returns):
    backend = ScriptedInference(lambda text: text)
    backend.returns = returns
    seen: list[Returns] = []

    class Curious(EchoAgent):
        async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            seen.append(inference.returns)
            return await EchoAgent.rollout(self, task, inference, context)

    assert (await play_one(Curious(), backend)).status is Status.OK
    assert seen == [returns]


async def test_a_rollout_without_tokens_can_be_evaluated_but_not_trained():
    rollout = replace(await play_one(EchoAgent()), samples=())
    assert checked(rollout) is rollout
    refused = trainable(rollout).failure
    assert refused is not None
    assert "returns no token ids, logprobs and versions" in refused.message


# -- what episodes leave behind ---------------------------------------------------------------------------------------
async def test_tasks_that_an_episode_starts_end_with_it():
    told: list[tuple[str, list[str]]] = []
    ended = asyncio.Event()

    async def heartbeat() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    class Careless(EchoAgent):
        async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            asyncio.create_task(heartbeat())  # noqa: RUF006
            return await EchoAgent.rollout(self, task, inference, context)

    with track_episode_tasks(lambda environment, what, names: told.append((what, names))):
        rollout = await play_one(Careless())
    assert (rollout.status, ended.is_set()) == (Status.OK, True)
    assert [what for what, _ in told] == ["leaked tasks"]
    assert "heartbeat" in told[0][1][0]


async def test_tasks_that_end_soon_after_their_episode_are_no_leak():
    closed = asyncio.Event()

    async def close() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
        closed.set()

    class ClosesBehindItself(EchoAgent):
        async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            asyncio.create_task(close())  # noqa: RUF006
            return await EchoAgent.rollout(self, task, inference, context)

    with track_episode_tasks(lambda environment, what, names: pytest.fail(f"{names}")):
        assert (await play_one(ClosesBehindItself())).status is Status.OK
    assert closed.is_set()


async def test_tasks_of_the_backend_are_not_the_episodes():
    kept: list[asyncio.Task[None]] = []

    async def serve() -> None:
        await asyncio.Event().wait()

    async def answer(text: str) -> str:
        kept.append(asyncio.create_task(serve()))
        return text

    with track_episode_tasks(lambda environment, what, names: pytest.fail(what)):
        assert (await play_one(EchoAgent(), ScriptedInference(answer))).status is Status.OK
    assert not kept[0].done()
    kept[0].cancel()


async def test_an_episode_that_ignores_its_deadline_is_left_to_itself():
    told: list[str] = []
    released, gone = asyncio.Event(), asyncio.Event()

    class Stubborn(EchoAgent):
        async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()
            gone.set()
            raise LookupError("lost")

    with track_episode_tasks(lambda environment, what, names: told.append(what)):
        rollout = await play_one(Stubborn(), timeout_s=0.01)
    assert rollout.failure is not None
    assert rollout.failure.boundary == "deadline"
    assert told == ["tasks that ignore cancellation"]
    released.set()
    await gone.wait()


# -- groups that are played together ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Together(EchoAgent):
    """Plays its siblings at once, then does `what`."""

    what: str = ""

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        rollouts = [await self.rollout(task, inference, context) for context in contexts]
        match self.what:
            case "raises":
                raise KeyError("board")
            case "hangs":
                await asyncio.Event().wait()
            case "loses one":
                return rollouts[1:]
            case "returns one":
                return rollouts[0]  # pyright: ignore[reportReturnType]
            case "has one NaN":
                return [replace(rollouts[0], reward=float("nan")), *rollouts[1:]]
        return rollouts


@pytest.mark.parametrize(
    ("what", "failures"),
    [
        ("", [None, None, None]),
        ("raises", ["KeyError"] * 3),
        ("hangs", ["TimeoutError"] * 3),
        ("loses one", ["InvalidResult"] * 3),
        ("returns one", ["InvalidResult"] * 3),
        ("has one NaN", ["InvalidResult", None, None]),
    ],
)
async def test_a_group_that_is_played_together(what: str, failures: list[str | None]):
    agent = Together(what=what)
    contexts = [replace(CONTEXT, sibling=sibling) for sibling in range(3)]
    model, timeout_s = ScriptedInference(lambda text: text), 0.05 if what == "hangs" else 30
    rollouts = await play_group(agent, agent.task(7), model, contexts, timeout_s=timeout_s)
    assert [rollout.failure.kind if rollout.failure is not None else None for rollout in rollouts] == failures
